"""Win rate, CLPD and their companions are the means they claim to be."""

from __future__ import annotations

import json
from statistics import mean

import pytest

from edged.align.feedback.pair import PairRetired
from edged.align.journal import Journal
from edged.align.metrics import NOT_JUDGED, RECENT_PAIRS, Liked, series, summaries, summary, versions, wilson
from edged.store import Store
from tests.align.learning import published, queue_pairs, scored, trained


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path / "edged.db")
    yield store
    store.close()


def append(store, *records):
    Journal(store, "base").append(records)
    store.write(lambda db: None).result()


def test_a_store_without_feedback_has_no_adapters(store):
    assert store.read(summaries) == []
    assert store.read(lambda db: summary(db, "ada")) is None
    assert store.read(lambda db: series(db, "ada")) == []
    assert store.read(lambda db: versions(db, "ada")) == []


def test_an_adapter_with_only_queued_pairs_has_counts_and_no_means(store):
    queue_pairs(store, 2)
    (found,) = store.read(summaries)
    assert found["adapter"] == "ada"
    assert (found["version"], found["pairs_seen"], found["pairs_queued"], found["pairs_trained"]) == (0, 2, 2, 0)
    for key in ("win_rate", "clpd", "reward_accuracy", "reward_margin", "loss", "win_rate_recent", "held_out_win_rate"):
        assert found[key] is None


def test_the_summary_counts_pairs_by_what_became_of_them(store):
    numbers = queue_pairs(store, 6)
    append(
        store,
        trained(numbers[0], 1),
        trained(numbers[1], 1, state="learnt"),
        PairRetired(numbers[2], "ada", "held_out", 0, 0),
        PairRetired(numbers[3], "ada", "skipped", 0, 0, "nan"),
        published(1),
        published(2),
    )
    found = store.read(lambda db: summary(db, "ada"))
    keys = ("version", "pairs_seen", "pairs_trained", "pairs_queued", "pairs_held_out", "pairs_skipped")
    assert [found[key] for key in keys] == [2, 6, 2, 2, 1, 1]


def test_the_means_go_over_all_prequential_scores_and_over_the_recent_ones(store):
    numbers = queue_pairs(store, RECENT_PAIRS + 30)
    differences = [(i * 37 % 19) - 6.5 for i in range(len(numbers))]
    margins = [(i * 23 % 11) - 4.0 for i in range(len(numbers))]
    losses = [i / 100 for i in range(len(numbers))]
    append(
        store,
        *(
            scored(number, difference=difference, margin=margin, loss=loss)
            for number, difference, margin, loss in zip(numbers, differences, margins, losses, strict=True)
        ),
        scored(numbers[0], version=3, split="held_out", difference=1e6, loss=1e6),
    )
    found = store.read(lambda db: summary(db, "ada"))
    for suffix, part in (("", slice(None)), ("_recent", slice(-RECENT_PAIRS, None))):
        assert found["win_rate" + suffix] == pytest.approx(mean(d > 0 for d in differences[part]))
        assert found["clpd" + suffix] == pytest.approx(mean(differences[part]))
        assert found["reward_accuracy" + suffix] == pytest.approx(mean(m > 0 for m in margins[part]))
        assert found["reward_margin" + suffix] == pytest.approx(mean(margins[part]))
        assert found["loss" + suffix] == pytest.approx(mean(losses[part]))
    points = store.read(lambda db: series(db, "ada", limit=40))
    assert [point["pair"] for point in points] == list(range(len(numbers) - 39, len(numbers) + 1))
    assert [point["logp_difference"] for point in points] == pytest.approx(differences[-40:])
    for point in points:
        part = slice(max(0, point["pair"] - RECENT_PAIRS), point["pair"])
        assert point["win_rate"] == pytest.approx(mean(d > 0 for d in differences[part]))
        assert point["clpd"] == pytest.approx(mean(differences[part]))
        assert point["reward_accuracy"] == pytest.approx(mean(m > 0 for m in margins[part]))


def test_a_taste_of_few_pairs_judges_no_answers(store):
    append(store, *(scored(number, margin=1.0) for number in queue_pairs(store, 4)))
    found = store.read(lambda db: summary(db, "ada", Liked((0, 24), (0, 24), (12, 24))))
    assert found["verdict"] == "too early to tell: 4 pairs"


@pytest.mark.parametrize(
    ("liked", "said"),
    [
        (Liked((20, 24), (17, 24), (9, 24)), "better than chance: 83 % of the last 24 answers are liked (64 to 93), "
         "71 % of those that the adapter gives unchosen, 38 % of the base's"),
        (Liked((9, 24), (8, 24), (9, 24)), "not followed yet: 38 % of the last 24 answers are liked (21 to 57), "
         "33 % of those that the adapter gives unchosen, 38 % of the base's"),
        (Liked((6, 8), (0, 0), (0, 0)), "not sure yet: 75 % of the last 8 answers are liked (41 to 93)"),
        (Liked((1, 24), (0, 0), (12, 24)), "worse than chance: 4 % of the last 24 answers are liked (1 to 20), "
         "50 % of the base's"),
        (Liked((0, 2), (20, 20), (0, 0)), "better than chance: 100 % of the last 20 answers are liked (84 to 100)"),
        (Liked((5, 5), (0, 0), (5, 5)), "too early to tell: 5 pairs"),
        (NOT_JUDGED, "too early to tell: 5 pairs"),
    ],
)  # fmt: skip
def test_the_verdict_is_a_sentence_about_answers(store, liked, said):
    """Right as all pairs are predicted, no answer is said to follow them."""
    append(store, *(scored(number, margin=1.0) for number in queue_pairs(store, 5)))
    found = store.read(lambda db: summary(db, "ada", liked))
    assert found["verdict"] == said
    assert found["liked"]["served"] == (None if not liked.served[1] else {
        "share": liked.served[0] / liked.served[1], "answers": liked.served[1], "interval": wilson(*liked.served),
    })  # fmt: skip


@pytest.mark.parametrize(("hits", "count"), [(0, 12), (3, 12), (29, 30), (7, 7)])
def test_an_interval_ends_where_the_share_would_be_off_by_196_deviations(store, hits, count):
    numbers = queue_pairs(store, count)
    signs = [1.0] * hits + [-1.0] * (count - hits)
    append(store, *(scored(n, margin=sign, difference=sign) for n, sign in zip(numbers, signs, strict=True)))
    found = store.read(lambda db: summary(db, "ada"))
    assert found["win_rate_recent_interval"] == found["reward_accuracy_recent_interval"]
    low, high = found["win_rate_recent_interval"]
    for end in (low, high):
        deviation = (end * (1 - end) / count) ** 0.5
        assert abs(end - hits / count) == pytest.approx(1.96 * deviation, rel=1e-3, abs=1e-9)
    assert low <= hits / count <= high


def test_nothing_scored_has_no_interval(store):
    queue_pairs(store, 1)
    found = store.read(lambda db: summary(db, "ada"))
    assert (found["reward_accuracy_recent_interval"], found["win_rate_recent_interval"]) == (None, None)


def test_held_out_means_are_those_of_the_latest_tested_version(store):
    numbers = queue_pairs(store, 2)
    for version, difference in ((1, -5.0), (4, 3.0)):
        append(
            store,
            *(
                scored(n, version, split="held_out", difference=difference + i, margin=difference, kl_nats=0.5 + i)
                for i, n in enumerate(numbers)
            ),
        )
    found = store.read(lambda db: summary(db, "ada"))
    assert found["held_out_version"] == 4
    assert (found["held_out_win_rate"], found["held_out_clpd"]) == (1.0, 3.5)
    assert (found["held_out_reward_accuracy"], found["held_out_kl_nats"]) == (1.0, 1.0)
    assert found["win_rate"] is None


def test_adapters_are_listed_by_name_and_ready_for_json(store):
    queue_pairs(store, 1, "zoe")
    append(store, published(3, "bob"))
    found = store.read(summaries)
    assert [(row["adapter"], row["version"], row["pairs_seen"]) for row in found] == [("bob", 3, 0), ("zoe", 0, 1)]
    assert found[0]["updated_at"] > "2025"
    json.dumps(found, allow_nan=False)


def test_a_version_has_what_its_held_out_test_came_to(store):
    numbers = queue_pairs(store, 3)
    append(store, published(1), published(2))
    for number, margin, kl in zip(numbers, (1.0, -1.0, 1.0), (0.2, 0.4, 0.6), strict=True):
        append(store, scored(number, 2, split="held_out", margin=margin, kl_nats=kl), scored(number, 2, margin=-1.0))
    append(store, scored(numbers[0], 2, split="held_out", margin=1.0, kl_nats=0.2))  # tested again
    new, old = store.read(lambda db: versions(db, "ada"))
    assert (new["held_out_reward_accuracy"], new["held_out_pairs"]) == (pytest.approx(2 / 3), 3)
    assert new["kl_nats"] == pytest.approx(0.4)
    assert (old["held_out_reward_accuracy"], old["held_out_pairs"], old["kl_nats"]) == (None, 0, None)


def test_versions_come_newest_first_up_to_a_limit(store):
    append(store, *(published(version) for version in range(1, 8)))
    assert [row["version"] for row in store.read(lambda db: versions(db, "ada", limit=3))] == [7, 6, 5]
