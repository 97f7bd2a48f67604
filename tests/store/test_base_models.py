"""What was learned on one base model and on another are kept apart, and neither is lost."""

from __future__ import annotations

import json

import pytest

from edged.align.feedback.pair import PairRetired, Record, StepSkipped, VersionSaved
from edged.align.journal import Journal
from edged.store import Store
from edged.store.adapters import forget_adapters
from edged.store.base_models import SHELVES, OtherBase, refuse_other_base, serve_base
from edged.store.feedback import open_pairs
from tests.align.learning import published, queue_pairs, scored, trained

LIVE = (*SHELVES, "pairs")


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path / "edged.db")
    yield store
    store.close()


def serve(store: Store, base: str, learn: bool = False) -> bool:
    return store.write(lambda db: serve_base(db, base, learn)).result()


def learn(store: Store, base: str, *records: Record) -> None:
    Journal(store, base).append(records)
    store.write(lambda db: None).result()


def rows(store: Store, *tables: str) -> dict[str, list[dict]]:
    return store.read(lambda db: {table: list(db.query(f"SELECT * FROM {table}")) for table in tables})


def learned_on(store: Store, base: str) -> list[int]:
    """Serve `base` and learn three pairs on it; returns their ids."""
    serve(store, base)
    numbers = queue_pairs(store, 3)
    learn(
        store,
        base,
        scored(numbers[0], 0),
        trained(numbers[0], 1),
        PairRetired(numbers[1], "ada", "held_out", 1, 0),
        scored(numbers[1], 1, split="held_out", kl_nats=0.5),
        published(1, loss=0.5),
        VersionSaved("ada", 1, f"/data/{base}/ada/v1"),
        StepSkipped("ada", 1, (numbers[2],), "loss is nan"),
    )
    return numbers


def test_a_base_finds_everything_as_it_left_it(store):
    assert learned_on(store, "A")
    before = rows(store, *LIVE)
    assert serve(store, "B")
    learn(store, "B", *(scored(pair["id"], 0) for pair in before["pairs"]), published(1), published(2))
    on_b = rows(store, *LIVE)
    assert serve(store, "A")
    assert rows(store, *LIVE) == before
    assert serve(store, "B")
    assert rows(store, *LIVE) == on_b


@pytest.mark.parametrize("asked", ["never", "at once", "later"])
def test_another_base_has_learned_nothing_and_is_trained_on_earlier_pairs_only_where_that_is_asked(store, asked):
    learned_on(store, "A")
    assert serve(store, "B", learn=asked == "at once")
    if asked == "later":
        assert not serve(store, "B", learn=True)
    found = rows(store, *LIVE)
    assert [found[table] for table in SHELVES] == [[], [], []]
    progress = ("state", "epochs_done", "trained_version", "ref_chosen_logp", "ref_model")
    state = "skipped" if asked == "never" else "queued"
    assert [[pair[key] for key in progress] for pair in found["pairs"]] == [[state, 0, None, None, None]] * 3
    assert len(store.read(open_pairs)) == (0 if asked == "never" else 3)


def test_a_base_that_was_not_asked_for_is_refused_where_something_was_learned(store, tmp_path):
    def refuse(base: str) -> None:
        store.read(lambda db: refuse_other_base(db, tmp_path, base, "tiny"))

    for base in ("A", "B"):
        refuse(base)
        serve(store, "A")
        refuse(base)
    learned_on(store, "A")
    refuse("A")
    with pytest.raises(OtherBase, match=r'another base model .weights A. than "tiny" .weights B.'):
        refuse("B")
    manifest = tmp_path / "adapters" / "A" / "ada" / "v000001" / "edged.json"
    manifest.parent.mkdir(parents=True)
    manifest.write_text(json.dumps({"base_model": "demo"}))
    with pytest.raises(OtherBase, match=r'"demo", weights A.*`edged serve --model demo`.*--new-base shelve'):
        refuse("B")
    serve(store, "B")
    refuse("A")
    queue_pairs(store, 1)
    with pytest.raises(OtherBase):
        refuse("A")


def test_pairs_that_came_meanwhile_wait_for_the_base_that_returns(store):
    learned_on(store, "A")
    serve(store, "B")
    (number,) = queue_pairs(store, 1)
    learn(store, "B", trained(number, 1))
    serve(store, "A")
    assert [pair["state"] for pair in rows(store, "pairs")["pairs"]] == ["trained", "held_out", "queued", "queued"]


def test_the_same_base_again_changes_nothing(store):
    learned_on(store, "A")
    before = rows(store, *LIVE)
    assert not serve(store, "A")
    assert rows(store, *LIVE) == before


def test_forgetting_reaches_the_shelves(store):
    learned_on(store, "A")
    serve(store, "B")
    store.write(lambda db: forget_adapters(db, "ada")).result()
    shelves = (*SHELVES.values(), "shelved_progress")
    assert rows(store, *shelves) == {table: [] for table in shelves}
    serve(store, "A")
    assert rows(store, *LIVE) == {table: [] for table in LIVE}
