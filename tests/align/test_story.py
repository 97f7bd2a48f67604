"""An adapter's story tells in sentences what the database knows of it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from edged.align.feedback.pair import PairRetired, Record, StepSkipped, VersionPublished, VersionTested
from edged.align.journal import write_record
from edged.align.story import PAUSE_S, events
from edged.store import Store, quarantine, utc_text
from tests.align.learning import published, queue_pairs, scored, trained

NOON = datetime(2025, 1, 31, 12, tzinfo=UTC)
Write = Callable[..., None]


@pytest.fixture
def store(tmp_path: Path) -> Any:
    store = Store(tmp_path / "edged.db")
    yield store
    store.close()


def write(store: Store, seconds: float, *records: Record) -> None:
    """Store records as of so many seconds after noon."""
    now = NOON + timedelta(seconds=seconds)
    store.write(lambda db: [write_record(db, record, "base", now) for record in records]).result()


def told(store: Store) -> list[str]:
    return [event["text"] for event in store.read(lambda db: events(db, "ada"))]


def test_steps_that_follow_each_other_are_one_sentence_with_their_signals(store: Store) -> None:
    numbers = queue_pairs(store, 4)
    store.write(lambda db: db.execute("UPDATE pairs SET source = 'edit' WHERE id = ?", [numbers[0]])).result()
    for version, number in enumerate(numbers[:3], 1):
        write(store, version, published(version), trained(number, version))
    write(store, 3 + PAUSE_S, published(4), trained(numbers[3], 4))
    first, second = store.read(lambda db: events(db, "ada"))
    assert first["text"].startswith("Versions 1 to 3 learned 3 pairs (2 ")
    assert first["text"].endswith(", 1 edit).")
    assert (first["first_version"], first["version"], first["pairs"]) == (1, 3, 3)
    assert first["at"] == utc_text(NOON + timedelta(seconds=3))
    assert second["text"].startswith("Version 4 learned 1 pair (1 ")


def test_a_test_stands_beside_the_one_before_it_with_intervals(store: Store) -> None:
    numbers = queue_pairs(store, 8)
    for version, right in ((1, 4), (2, 7)):
        scores = [
            scored(n, version=version, split="held_out", margin=1.0 if i < right else -1.0)
            for i, n in enumerate(numbers)
        ]
        write(store, version, published(version), *scores, VersionTested("ada", version, 2.02, 2.0))
    (event,) = store.read(lambda db: events(db, "ada"))
    assert (
        "Its test: 7 of 8 held-out pairs right (53 to 98 %); before 4 of 8 held-out pairs right (22 to 78 %)"
        in event["text"]
    )
    assert event["text"].endswith("neutral text +1.0 %.")
    # Wilson's interval of 7 of 8, from a table.
    assert event["held_out"]["interval"] == pytest.approx([0.5291, 0.9776], abs=1e-3)


def test_what_was_undone_is_told_with_the_reason(store: Store) -> None:
    numbers = queue_pairs(store, 2)
    write(store, 1, published(1), trained(numbers[0], 1), published(2), trained(numbers[1], 2))
    write(store, 2, VersionPublished("ada", 3, 2, "guard: KL to the base is 0.90 nats a token", restored=1))
    write(
        store, 3, VersionPublished("ada", 4, 3, "rollback to 0", restored=0), VersionPublished("ada", 5, 4, "imported")
    )
    first, *others = told(store)
    # Of the two pairs the second waits again.
    assert first.startswith("Versions 1 to 2 learned 1 pair ")
    assert others == [
        "Version 3 is version 1 again, since version 2 was taken back (KL to the base is 0.90 nats a token); what the "
        "versions between had learned is learned again.",
        "Version 4 is the untrained adapter again, as was asked for.",
        "Version 5 was imported.",
    ]


def test_held_pairs_that_were_decided_about_and_skipped_steps_are_told(store: Store) -> None:
    numbers = queue_pairs(store, 3)
    held = [PairRetired(number, "ada", "quarantined", 0, 0, "burst: 4 of 8") for number in numbers[:2]]
    write(store, 1, *held, StepSkipped("ada", 0, (numbers[2],), "the loss is not finite"))
    later = utc_text(NOON + timedelta(seconds=5))
    store.write(lambda db: [quarantine.decide(db, number, "dropped", later) for number in numbers[:2]]).result()
    # A rating that another one replaced was never held.
    store.write(lambda db: quarantine.drop(db, numbers[2], later, "its answer was rated anew")).result()
    assert told(store) == [
        "A step of 1 pair was not taken: the loss is not finite.",
        "2 pairs, held because of burst: 4 of 8, were dropped.",
    ]
