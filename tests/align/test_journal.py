"""What the learning loop reports reaches the tables in order, and a restart resumes with what is not learned yet."""

from __future__ import annotations

import logging
import threading

import pytest

from edged.align.feedback.pair import IterationSample, JobStepped, PairRetired, StepSkipped, VersionSaved, VersionTested
from edged.align.journal import FLUSH_SAMPLES, Journal, load_pasts, requeue_lost
from edged.align.metrics import summary, versions
from edged.store import Store, feedback, utc_now
from edged.store.adapters import forget_adapters, unanswered_versions, update_version
from edged.store.feedback import get_pairs, taken_back
from tests.align.learning import published, queue_pairs, scored, trained

SAMPLE = IterationSample(10, 2, 3, 4, 5.5, 6.5, None, 100)


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path / "edged.db")
    yield store
    store.close()


def append(store, *records, ref_model="base"):
    Journal(store, ref_model).append(records).exception()
    # What is said of a write is said before the next one.
    store.write(lambda db: None).result()


def hold(store):
    """The store's thread is busy until the event that this returns is set: what is written meanwhile is one commit."""
    busy, release = threading.Event(), threading.Event()
    store.write(lambda db: (busy.set(), release.wait(10)))
    assert busy.wait(10)
    return release


def rows(store, table):
    return store.read(lambda db: list(db.query(f"SELECT * FROM {table}")))


def open_pairs(store, ref_model="base", replay=2):
    return store.read(lambda db: feedback.get_pairs(db, list(feedback.open_pairs(db, replay)), ref_model))


def test_a_score_is_a_metric_and_its_reference_stays_with_the_pair(store):
    (number,) = queue_pairs(store, 1)
    append(store, scored(number, version=4, difference=-2.0, margin=0.25))
    (metric,) = rows(store, "alignment_metrics")
    assert metric["logp_difference"] == -2.0
    assert (metric["win"], metric["reward_correct"], metric["version"], metric["kl_nats"]) == (0, 1, 4, None)
    (pair,) = store.read(lambda db: get_pairs(db, [number]))
    assert (pair.ref_chosen_logp, pair.ref_rejected_logp, pair.ref_model) == (-11.0, -12.0, "base")


def test_a_pairs_first_prequential_score_stays_and_held_out_scores_add_up(store):
    (number,) = queue_pairs(store, 1)
    append(store, scored(number, margin=1.0), scored(number, version=1, margin=2.0))
    append(store, *(scored(number, version=version, split="held_out", kl_nats=0.1) for version in (1, 2)))
    assert [(row["split"], row["version"]) for row in rows(store, "alignment_metrics")] == [
        ("prequential", 0),
        ("held_out", 1),
        ("held_out", 2),
    ]


def test_outcomes_set_the_pairs_state(store):
    numbers = queue_pairs(store, 4)
    append(
        store,
        trained(numbers[0], 3),
        PairRetired(numbers[1], "ada", "skipped", 2, 0, "loss is nan"),
        PairRetired(numbers[2], "ada", "learnt", 2, 0, "loss 0.0100 is under align.loss_threshold"),
        PairRetired(numbers[3], "ada", "queued", 5, 1),
    )
    found = store.read(lambda db: get_pairs(db, numbers))
    assert [(pair.state, pair.trained_version, pair.epochs_done, pair.note) for pair in found] == [
        ("trained", 3, 1, ""),
        ("skipped", None, 0, "loss is nan"),
        ("learnt", 2, 0, "loss 0.0100 is under align.loss_threshold"),
        ("queued", 5, 1, ""),
    ]


def test_versions_are_published_saved_and_removed(store):
    append(
        store,
        published(1, loss=0.6, grad_norm=2.0, pairs=4, step_s=0.5),
        published(2),
        VersionSaved("ada", 2, "/data/ada/2", (1,)),
        published(3, reason="guard: too far"),
    )
    append(store, VersionSaved("ada", 1, "/data/ada/1"), VersionSaved("ada", 2, "/data/ada/2", (1,)))
    found = store.read(lambda db: versions(db, "ada"))
    assert [(row["version"], row["parent"], row["reason"], row["path"], row["on_disk"]) for row in found] == [
        (3, 2, "guard: too far", None, False),
        (2, 1, "trained", "/data/ada/2", True),
        (1, 0, "trained", None, False),
    ]
    assert (found[2]["loss"], found[2]["grad_norm"], found[2]["pairs"], found[2]["step_s"]) == (0.6, 2.0, 4, 0.5)


def test_a_skipped_step_is_recorded(store):
    append(store, StepSkipped("ada", 7, (1, 2), "gradient is nan"))
    (row,) = rows(store, "skipped_steps")
    assert (row["adapter"], row["version"], row["pair_ids"], row["reason"]) == ("ada", 7, "[1,2]", "gradient is nan")


def test_append_does_not_wait_for_the_disk(store):
    release = threading.Event()
    store.write(lambda db: release.wait(10))
    (journal, record) = Journal(store, "base"), published(1)
    journal.append([record])
    assert rows(store, "adapter_versions") == []
    release.set()
    store.write(lambda db: None).result()
    assert len(rows(store, "adapter_versions")) == 1


def test_a_record_that_does_not_fit_is_logged_and_the_others_stand(store, caplog):
    (number,) = queue_pairs(store, 1)
    append(store, published(1), scored(number, loss=float("nan")), published(2))
    assert [row["version"] for row in rows(store, "adapter_versions")] == [1, 2]
    assert "does not fit the database: PairScored" in caplog.text


def test_records_of_a_forgotten_adapter_leave_nothing(store, caplog):
    (number,) = queue_pairs(store, 1)
    store.write(lambda db: forget_adapters(db, "ada")).result()
    append(store, scored(number), trained(number, 1))
    assert rows(store, "alignment_metrics") == rows(store, "pairs") == []
    assert caplog.text == ""


def test_a_write_that_fails_altogether_is_logged(store, caplog):
    store.write(lambda db: db.execute("DROP TABLE adapter_versions")).result()
    append(store, published(1))
    assert "records of the learning loop were not stored" in caplog.text
    assert "no such table: adapter_versions" in caplog.text
    assert caplog.records[-1].levelno == logging.ERROR


def test_a_write_that_follows_a_failed_one_carries_it_along(store):
    (number,) = queue_pairs(store, 1)
    journal, release = Journal(store, "base"), hold(store)
    store.write(lambda db: db.execute("ALTER TABLE adapter_versions RENAME TO away"))
    first = journal.append([PairRetired(number, "ada", "queued", 1, 1), published(1)])
    store.write(lambda db: db.execute("ALTER TABLE away RENAME TO adapter_versions"))
    second = journal.append([trained(number, 2, epochs=2), published(2), VersionSaved("ada", 1, "/data/ada/1")])
    release.set()
    assert "no such table" in str(first.exception())
    second.result()
    found = rows(store, "adapter_versions")
    assert [(row["version"], row["on_disk"]) for row in found] == [(1, 1), (2, 0)], "what was waited for is on disk"
    journal.retry()
    store.write(lambda db: None).result()
    (pair,) = store.read(lambda db: get_pairs(db, [number]))
    assert (pair.state, pair.epochs_done, pair.trained_version) == ("trained", 2, 2)
    assert rows(store, "adapter_versions") == found


def test_what_a_commit_lost_is_written_in_its_order(store):
    (number,) = queue_pairs(store, 1)
    journal, release = Journal(store, "base"), hold(store)

    def spoil(db):
        db.execute("PRAGMA defer_foreign_keys = ON")
        db.execute("INSERT INTO quarantine (pair_id, created_at, adapter, reason) VALUES (99, '', 'ada', '')")

    journal.append([PairRetired(number, "ada", "queued", 1, 1)])
    store.write(lambda db: db.execute("ALTER TABLE adapter_versions RENAME TO away"))
    last = journal.append([trained(number, 2, epochs=2), published(2)])
    spoiled = store.write(spoil)
    release.set()
    assert last.exception()
    assert "FOREIGN KEY" in str(spoiled.exception())
    journal.append([]).result()
    (pair,) = store.read(lambda db: get_pairs(db, [number]))
    assert (pair.state, pair.epochs_done) == ("trained", 2)
    assert [row["version"] for row in rows(store, "adapter_versions")] == [2]


def test_iteration_samples_are_written_together(store):
    journal = Journal(store, "base")
    for _ in range(FLUSH_SAMPLES - 1):
        journal.append([SAMPLE])
    store.write(lambda db: None).result()
    assert rows(store, "iteration_samples") == []
    journal.flush()
    journal.flush()
    store.write(lambda db: None).result()
    found = rows(store, "iteration_samples")
    assert len(found) == FLUSH_SAMPLES - 1
    assert {key: value for key, value in found[0].items() if key not in ("id", "created_at")} == {
        "prefill_tokens": 10,
        "decode_tokens": 2,
        "finetune_tokens": 3,
        "finetune_units": 4,
        "latency_ms": 5.5,
        "predicted_ms": 6.5,
        "budget_ms": None,
        "free_pages": 100,
    }


def test_iteration_samples_are_written_when_enough_wait_or_with_other_records(store):
    journal = Journal(store, "base")
    for _ in range(FLUSH_SAMPLES):
        journal.append([SAMPLE])
    store.write(lambda db: None).result()
    assert len(rows(store, "iteration_samples")) == FLUSH_SAMPLES
    journal.append([SAMPLE, published(1)])
    store.write(lambda db: None).result()
    assert len(rows(store, "iteration_samples")) == FLUSH_SAMPLES + 1


# -- after a restart ---------------------------------------------------------------------------------------------------


def test_a_restart_resumes_queued_and_held_out_pairs_and_the_latest_trained_of_each_adapter(store):
    ada, bob = queue_pairs(store, 7), queue_pairs(store, 2, "bob")
    append(
        store,
        *(trained(number, 1) for number in ada[:3]),
        PairRetired(ada[3], "ada", "learnt", 1, 0),
        PairRetired(ada[4], "ada", "held_out", 1, 0),
        PairRetired(ada[5], "ada", "skipped", 1, 0, "nan"),
        trained(bob[0], 1, adapter="bob"),
    )
    found = open_pairs(store, replay=2)
    assert [(pair.id, pair.state) for pair in found] == [
        (ada[2], "trained"),
        (ada[3], "learnt"),
        (ada[4], "held_out"),
        (ada[6], "queued"),
        (bob[0], "trained"),
        (bob[1], "queued"),
    ]


def test_references_of_another_model_are_not_resumed(store):
    numbers = queue_pairs(store, 2)
    append(store, scored(numbers[0]))
    append(store, scored(numbers[1]), ref_model="older")
    assert [(pair.ref_chosen_logp, pair.ref_model) for pair in open_pairs(store)] == [(-11.0, "base"), (None, None)]


def test_pairs_of_versions_that_were_lost_are_queued_again(store):
    numbers = queue_pairs(store, 7)
    append(
        store,
        *(published(version) for version in (1, 2, 3)),
        trained(numbers[0], 1),
        trained(numbers[1], 2),
        trained(numbers[2], 3, state="learnt", epochs=2),
        PairRetired(numbers[3], "ada", "queued", 3, 1),
        PairRetired(numbers[4], "ada", "skipped", 3, 0, "nan"),
        scored(numbers[0], 2, split="held_out"),
        scored(numbers[0], 1, split="held_out"),
        scored(numbers[2], 2),
        PairRetired(numbers[5], "ada", "learnt", 2, 0),
        scored(numbers[6], 0),
        trained(numbers[6], 3, epochs=3),
    )
    assert store.write(lambda db: requeue_lost(db, "ada", 1)).result() == 5
    found = store.read(lambda db: get_pairs(db, numbers))
    assert [(pair.state, pair.epochs_done, pair.trained_version) for pair in found] == [
        ("trained", 1, 1),
        ("queued", 0, None),
        ("queued", 0, None),
        ("queued", 0, None),
        ("skipped", 0, None),
        ("queued", 0, None),
        ("queued", 2, None),
    ]
    assert found[1].note == "queued again: version 2 was lost"
    assert [row["version"] for row in rows(store, "adapter_versions")] == [1]
    assert [(row["version"], row["split"]) for row in rows(store, "alignment_metrics")] == [
        (1, "held_out"),
        (0, "prequential"),
    ]
    assert store.write(lambda db: requeue_lost(db, "ada", 1)).result() == 0


def test_losing_an_adapters_versions_leaves_other_adapters_alone(store):
    (ada,), (bob,) = queue_pairs(store, 1), queue_pairs(store, 1, "bob")
    append(store, published(1), published(1, "bob"), trained(ada, 1), trained(bob, 1, adapter="bob"))
    store.write(lambda db: requeue_lost(db, "ada", 0)).result()
    assert {pair.adapter: pair.state for pair in open_pairs(store)} == {"ada": "queued", "bob": "trained"}
    append(store, published(1, pairs=9))
    assert store.read(lambda db: versions(db, "ada"))[0]["pairs"] == 9
    assert store.read(lambda db: summary(db, "bob"))["version"] == 1


@pytest.mark.parametrize(
    ("reason", "foreign"),
    [("guard: KL to the base is 3.00", "queued"), ("guard: held-out reward accuracy fell", "quarantined")],
)
def test_what_a_version_taken_back_had_learned_is_queued_again_or_held(store, reason, foreign):
    own, other, early = queue_pairs(store, 3)
    store.write(lambda db: db.execute("UPDATE pairs SET direct = 1 WHERE id = ?", [own])).result()
    append(store, trained(early, 1), trained(own, 2), trained(other, 2), scored(own, 1))
    append(store, published(3, reason=reason, restored=1))
    states = {pair.id: pair.state for pair in store.read(lambda db: get_pairs(db, [own, other, early]))}
    assert states == {own: "queued", other: foreign, early: "trained"}
    again = store.read(lambda db: taken_back(db, "ada"))
    assert again == ([own, other] if foreign == "queued" else [own])
    (score,) = [row for row in rows(store, "alignment_metrics") if row["pair_id"] == own]
    assert score["version"] == 1, "what was served then is no less true"


def test_a_restart_knows_the_newest_version_that_passed_and_the_step_size_that_is_left(store):
    queue_pairs(store, 1)
    append(store, published(1), VersionTested("ada", 1, 2.0, 1.9), published(2, step_scale=0.5))
    append(store, VersionTested("ada", 2, 9.0, 1.9, "NLL of neutral text is +374%"))
    past = store.read(lambda db: load_pasts(db, utc_now()))["ada"]
    assert (past.tested_version, past.lr_scale) == (1, 0.5)


def test_a_version_that_a_job_made_counts_as_passed_after_a_restart(store):
    queue_pairs(store, 1)
    append(store, published(1), JobStepped("job", "ada", 1, 1), published(2), JobStepped("job", "ada", 2, 2))
    append(store, published(3), JobStepped("job", "ada", 3, 3, error="its loss is nan"))
    assert store.read(lambda db: load_pasts(db, utc_now()))["ada"].tested_version == 2


def test_what_a_job_left_is_known_after_a_restart_until_something_else_takes_its_place(store):
    def floor():
        past = store.read(lambda db: load_pasts(db, utc_now()))["ada"]
        return past.baseline_version, past.baseline_nll_change

    append(store, published(1, reason="job"), published(2, reason="job"))
    assert floor() == (2, None)
    append(store, VersionTested("ada", 2, 3.0, 2.0), published(3), published(4, reason="guard: x", restored=2))
    assert floor() == (2, 0.5)
    append(store, published(5, reason="rollback to 3", restored=3))
    assert floor() == (2, 0.5)
    append(store, published(6, reason="rollback to 1", restored=1))
    queue_pairs(store, 1)
    assert floor() == (0, None)


def test_a_restart_knows_the_highest_kl_of_what_a_job_left(store):
    pairs = queue_pairs(store, 2)

    def tested(version, *kl_nats):
        scores = zip(pairs, kl_nats, strict=False)
        append(store, *(scored(pair, version=version, split="held_out", kl_nats=kl) for pair, kl in scores))
        return store.read(lambda db: load_pasts(db, utc_now()))["ada"].baseline_kl_nats

    append(store, published(1, reason="job"), published(2, reason="job"), published(3))
    append(store, published(4, reason="guard: x", restored=2))
    assert tested(3, 9.0) is None, "another version's"
    assert tested(2, 0.25) == 0.25
    assert tested(4, 0.5, 1.0) == 0.75, "its weights, restored"


def test_the_newest_versions_that_passed_and_were_not_asked_are_known_the_latest_first(store):
    def unanswered(most=9):
        return store.read(lambda db: unanswered_versions(db, most))

    append(store, published(1), VersionTested("ada", 1, None, None), published(2))
    assert unanswered() == [], "there is no pair whose prompt it could answer"
    queue_pairs(store, 1)
    assert unanswered() == [], "the newest is not tested"
    append(store, VersionTested("ada", 2, None, None, "KL"))
    assert unanswered() == []
    append(store, published(3), VersionTested("ada", 3, None, None))
    assert unanswered() == [("ada", 3)]
    assert unanswered(0) == []
    store.write(lambda db: update_version(db, "ada", 3, answer="yes")).result()
    assert unanswered() == []
