"""Copies of users between the databases of a fleet's nodes: a pair is one pair, wherever and however often it comes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from sqlite_utils import Database

from edged.store.feedback import (
    PairRow,
    Side,
    Signal,
    WrittenPreference,
    get_pairs,
    get_preference,
    get_signal,
    insert_pair,
    insert_signal,
    pair_ids_of,
    set_pair_state,
    set_preference,
    set_signal_pairs,
    strike,
    struck,
)
from edged.store.fleet.copies import copied_pairs, copied_user, hand_on, take_pairs, take_user
from edged.store.fleet.leases import Lease, adapters_elsewhere, get_lease, known_adapters, pairs_shown, set_lease
from edged.store.fleet.leases import unsent_pairs as unsent
from edged.store.migrations import migrate
from edged.store.quarantine import drop
from tests.store.rows import MOMENT


@pytest.fixture
def nodes() -> dict[str, Database]:
    """Two nodes' databases; a writes, and b has been told."""
    made = {}
    for name in "ab":
        made[name] = Database(memory=True, execute_plugins=False)
        made[name].execute("PRAGMA foreign_keys = ON")
        migrate(made[name])
    set_lease(made["b"], "ann", Lease(0, "a"))
    return made


def say(db: Database, number: int, **more: Any) -> int:
    """Add a pair of ann's, with its signal."""
    name = f"fb-{id(db)}-{number}"
    insert_signal(db, Signal(name, MOMENT, "ann", "pair", account="ann"))
    sides = Side(f"yes {number}", (1, 2)), Side("no")
    row = PairRow(0, MOMENT, "ann", name, "pair", 1.0, None, f"Q{number}", None, *sides, "queued", **more)
    pair_id = insert_pair(db, row, f"key{number}")
    set_signal_pairs(db, name, [pair_id])
    return pair_id


def through_json(copied: Any) -> Any:
    return json.loads(json.dumps(copied))


def chosen(db: Database) -> list[tuple[str, str]]:
    return [(pair.chosen.text, pair.state) for pair in get_pairs(db, pair_ids_of(db, "ann"))]


def test_a_pair_is_taken_once_however_often_it_is_sent(nodes: dict[str, Database]) -> None:
    a, b = nodes["a"], nodes["b"]
    say(a, 1)
    ids = [say(b, 2), say(b, 3)]
    sent = through_json(copied_pairs(b, ids))
    assert [len(take_pairs(a, sent, MOMENT)[0]) for _ in range(2)] == [2, 0]
    assert chosen(a) == [("yes 1", "queued"), ("yes 2", "queued"), ("yes 3", "queued")]
    # Back again by the writer's copy they are the same rows.
    take_user(b, "ann", through_json(copied_user(a, "ann")), 0, 0)
    assert sorted(chosen(b)) == sorted(chosen(a))
    signal = get_signal(a, sent["signals"][0]["id"])
    assert signal is not None
    assert (signal.completion_id, len(signal.pair_ids)) == (None, 1)


def test_what_is_to_be_sent_follows_from_the_epoch(nodes: dict[str, Database]) -> None:
    b = nodes["b"]
    ids = [say(b, 1), say(b, 2)]
    origins = [row["origin"] for row in copied_pairs(b, ids)["pairs"]]
    assert unsent(b, "ann", "b", 9) == ids
    hand_on(b, origins[:1], 0)
    assert (unsent(b, "ann", "b", 9), pairs_shown(b, ids, "b")) == (ids[1:], ids[1:])
    hand_on(b, origins, 0)
    assert (unsent(b, "ann", "b", 9), pairs_shown(b, ids, "b")) == ([], [])
    # Another writer may have none of them.
    set_lease(b, "ann", Lease(1, "c"))
    assert (unsent(b, "ann", "b", 9), pairs_shown(b, ids, "b")) == (ids, ids)
    set_lease(b, "ann", Lease(2, "b"))
    assert (unsent(b, "ann", "b", 9), pairs_shown(b, ids, "b")) == ([], ids)
    assert known_adapters(b, "b") == [{"adapter": "ann", "node": "b", "epoch": 2, "unsent": False}]
    assert (adapters_elsewhere(b, "b"), get_lease(b, "ann")) == ([], Lease(2, "b"))


def test_a_copy_has_the_writer_s_progress_up_to_the_version_that_came_with_it(nodes: dict[str, Database]) -> None:
    a, b = nodes["a"], nodes["b"]
    for number, version in ((1, 3), (2, 5)):
        set_pair_state(a, say(a, number), "trained", 1, version, "")
    set_preference(a, WrittenPreference("ann", "Be brief.", MOMENT, "ann", 0.5))
    strike(a, "ann", "length", MOMENT)
    take_user(b, "ann", through_json(copied_user(a, "ann")), 4, 0)
    assert chosen(b) == [("yes 1", "trained"), ("yes 2", "queued")]
    assert (get_preference(b, "ann"), struck(b, "ann")) == (get_preference(a, "ann"), {"length"})
    assert unsent(b, "ann", "b", 9) == []


def test_what_was_dropped_at_a_reader_is_dropped_at_the_writer(nodes: dict[str, Database]) -> None:
    a, b = nodes["a"], nodes["b"]
    pair_id = say(b, 1)
    (learned,), _ = take_pairs(a, through_json(copied_pairs(b, [pair_id])), MOMENT)
    hand_on(b, [row["origin"] for row in copied_pairs(b, [pair_id])["pairs"]], 0)
    set_pair_state(a, learned, "trained", 1, 1, "")
    drop(b, pair_id, MOMENT, "rated otherwise")
    # A copy that was made before does not undo it.
    take_user(b, "ann", through_json(copied_user(a, "ann")), 1, 0)
    assert (chosen(b), unsent(b, "ann", "b", 9)) == ([("yes 1", "skipped")], [pair_id])
    assert take_pairs(a, through_json(copied_pairs(b, [pair_id])), MOMENT) == ([], [learned])
    assert chosen(a) == [("yes 1", "skipped")]
    assert take_pairs(a, through_json(copied_pairs(b, [pair_id])), MOMENT) == ([], [])


def test_pairs_that_a_writer_had_learned_begin_anew_at_another(nodes: dict[str, Database]) -> None:
    a, b = nodes["a"], nodes["b"]
    ids = [say(a, number) for number in range(3)]
    set_pair_state(a, ids[0], "trained", 1, 3, "")
    set_pair_state(a, ids[1], "held_out", 0, None, "")
    set_pair_state(a, ids[2], "skipped", 0, None, "too long")
    fresh, _ = take_pairs(b, through_json(copied_pairs(a, ids)), MOMENT)
    assert [(pair.state, pair.epochs_done, pair.trained_version) for pair in get_pairs(b, fresh)] == [
        ("queued", 0, None),
        ("queued", 0, None),
        ("skipped", 0, None),
    ]
