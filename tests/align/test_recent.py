"""Which adapters the metrics show by name, and what becomes of the others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from edged.align.metrics import OTHER, AdapterReading, recent_adapters
from edged.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(tmp_path / "edged.db")
    yield store
    store.close()


def add(store: Store, adapter: str, minute: int, state: str = "trained", win: int | None = None) -> None:
    """A pair, and its score where there is one, both of that minute."""
    moment = f"2026-01-01T00:{minute:02}:00+00:00"

    def write(db) -> None:  # type: ignore[no-untyped-def]
        signal = f"{adapter}-{minute}-{db.execute('SELECT count(*) FROM signals').fetchone()[0]}"
        db["signals"].insert(
            {"id": signal, "created_at": moment, "user": adapter, "signal": "up", "pair_ids": "[]", "reason": ""}
        )
        pair = db["pairs"].insert(
            {
                **{"created_at": moment, "adapter": adapter, "signal_id": signal, "source": "up", "weight": 1.0},
                **{"prompt_key": "k", "chosen": "a", "rejected": "b", "state": state},
            }
        )
        if win is not None:
            db["alignment_metrics"].insert(
                {
                    **{"created_at": moment, "adapter": adapter, "version": 1, "pair_id": pair.last_pk},
                    **{"split": "prequential", "chosen_logp": -1.0, "rejected_logp": -2.0, "ref_chosen_logp": -1.0},
                    **{"ref_rejected_logp": -1.0, "win": win, "logp_difference": 1.0, "reward_margin": 0.1},
                    **{"reward_correct": win, "loss": 0.5},
                }
            )

    store.write(write).result()


def names(readings: list[AdapterReading]) -> list[str]:
    return [reading.adapter for reading in readings]


def test_the_latest_active_are_shown_and_the_rest_is_summed(store: Store) -> None:
    for minute, adapter in enumerate(("ann", "bob", "cid", "dot")):
        add(store, adapter, minute, win=minute % 2)
        add(store, adapter, minute, "queued")
    known = {"ann", "bob", "cid", "dot", "eve"}
    shown = store.read(lambda db: recent_adapters(db, known, 4, 2))
    assert names(shown) == ["dot", "cid", OTHER]
    assert [reading.pairs_pending for reading in shown] == [1, 1, 2]
    assert [reading.win_rate for reading in shown] == [1.0, 0.0, 0.5]
    add(store, "ann", 50, "queued")
    assert names(store.read(lambda db: recent_adapters(db, known, 5, 2))) == ["ann", "dot", OTHER]


def test_all_are_shown_where_there_is_room_and_none_where_it_is_asked(store: Store) -> None:
    add(store, "ann", 1, win=1)
    assert names(store.read(lambda db: recent_adapters(db, {"ann", "bob"}, 0, 5))) == ["ann", "bob"]
    assert names(store.read(lambda db: recent_adapters(db, {"ann", "bob"}, 0, 0))) == [OTHER]
    assert store.read(lambda db: recent_adapters(db, set(), 0, 5)) == []


def test_a_user_called_other_is_part_of_the_rest(store: Store) -> None:
    add(store, OTHER, 1, win=1)
    shown = store.read(lambda db: recent_adapters(db, {OTHER, "ann"}, 0, 5))
    assert names(shown) == ["ann", OTHER]
    assert shown[1].win_rate == 1.0


def test_a_forgotten_adapter_is_not_shown(store: Store) -> None:
    add(store, "ann", 1, win=1)
    assert names(store.read(lambda db: recent_adapters(db, {"bob"}, 0, 5))) == ["bob"]


def test_means_go_over_the_latest_pairs(store: Store) -> None:
    for minute in range(8):
        add(store, "ann", minute, win=0)
    for minute in range(50):
        add(store, "ann", 9 + minute, win=1)
    (ann,) = store.read(lambda db: recent_adapters(db, {"ann"}, 0, 5))
    assert ann.win_rate == ann.reward_accuracy == 1.0
