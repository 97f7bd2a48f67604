"""Copies of what a user has said, from one node's tables into another's; a pair is known by its origin.

The origin is the id of the first signal of a pair and the pair's id, where it was first stored: ids of signals are
random, so that a data folder that began anew gives no origin twice.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from sqlite_utils import Database

from edged.store.feedback import last_pair_id, requeue_newer
from edged.store.quarantine import drop
from edged.store.rows import first_column, first_value, insert_row, update_rows

ORIGIN = "coalesce(origin, signal_id || '/' || id)"
_LOCAL = (
    *("id", "first_stored", "handed_on", "chosen_completion_id", "chosen_choice"),
    *("rejected_completion_id", "rejected_choice"),
)
"""Columns of `pairs` that mean something on one node alone."""
_PROGRESS = ("state", "epochs_done", "trained_version", "ref_chosen_logp", "ref_rejected_logp", "ref_model", "note")
_BEGIN_AGAIN = {"state": "queued", "epochs_done": 0, "trained_version": None, "note": ""}
_OPINIONS = ("preferences", "struck_beliefs")
Copied = Mapping[str, Sequence[dict[str, Any]]]
"""Rows by table, as JSON has them."""


def copied_pairs(db: Database, pair_ids: Sequence[int]) -> Copied:
    """Return pairs, with their signals and what was decided about them."""
    ids = {"ids": json.dumps(list(pair_ids))}
    chosen = "IN (SELECT value FROM json_each(:ids))"
    pairs = [
        {name: value for name, value in {**row, "origin": row["first_stored"]}.items() if name not in _LOCAL}
        for row in db.query(f"SELECT *, {ORIGIN} AS first_stored FROM pairs WHERE id {chosen} ORDER BY id", ids)
    ]
    held = f"""SELECT {ORIGIN} AS origin, q.created_at, q.reason, q.decision, q.decided_at
               FROM quarantine AS q JOIN pairs ON pairs.id = q.pair_id WHERE q.pair_id {chosen}"""
    said = f"SELECT * FROM signals WHERE id IN (SELECT signal_id FROM pairs WHERE id {chosen})"
    return {
        "signals": [{**row, "completion_id": None, "choice": None} for row in db.query(said, ids)],
        "pairs": pairs,
        "quarantine": list(db.query(held, ids)),
    }


def copied_user(db: Database, adapter: str) -> Copied:
    """Return all pairs of an adapter, and its user's written preference and struck beliefs."""
    pair_ids = first_column(db, "SELECT id FROM pairs WHERE adapter = ?", [adapter])
    opinions = {table: list(db.query(f"SELECT * FROM {table} WHERE adapter = ?", [adapter])) for table in _OPINIONS}
    return {**copied_pairs(db, pair_ids), **opinions}


def take_pairs(db: Database, copied: Copied, now: str) -> tuple[list[int], list[int]]:
    """Take pairs in that another node has; returns the ids of new ones, which begin anew, and of those dropped there.

    What nobody may learn from stays so. A pair that is known already is passed over.
    """
    fresh, dropped = _add(db, copied, _BEGIN_AGAIN), []
    for row in copied["quarantine"]:
        pair_id = _local(db, row["origin"])
        if row["decision"] == "dropped" and pair_id is not None and not _dropped(db, pair_id):
            drop(db, pair_id, now, row["reason"])
            dropped.append(pair_id)
    return [pair_id for pair_id in fresh if pair_id not in dropped], dropped


def take_user(db: Database, adapter: str, copied: Copied, version: int, epoch: int) -> None:
    """Take the writer's rows of an adapter in, whose newest version is `version`.

    What later versions had learned, of which this node has none, waits to be learned again.
    """
    _add(db, copied, {})
    told_dropped = {row["origin"] for row in copied["quarantine"] if row["decision"] == "dropped"}
    for row in copied["pairs"]:
        pair_id, progress = _local(db, row["origin"]), {name: row[name] for name in _PROGRESS}
        # What was dropped here is still to be told to the writer.
        if row["origin"] in told_dropped or not _dropped(db, pair_id):
            update_rows(db, "pairs", {**progress, "handed_on": epoch}, id=pair_id)
    for row in copied["quarantine"]:
        pair_id, told = _local(db, row["origin"]), {name: value for name, value in row.items() if name != "origin"}
        insert_row(db, "quarantine", {"pair_id": pair_id, "adapter": adapter, **told}, "INSERT OR REPLACE")
    for table in _OPINIONS:
        db.execute(f"DELETE FROM {table} WHERE adapter = ?", [adapter])
        for row in copied[table]:
            insert_row(db, table, row)
    requeue_newer(db, adapter, version)


def _add(db: Database, copied: Copied, changes: Mapping[str, Any]) -> list[int]:
    """Add the pairs that are not known, with these changes, and their signals; returns their ids."""
    fresh = []
    for row in copied["signals"]:
        insert_row(db, "signals", {**row, "pair_ids": []}, "INSERT OR IGNORE")
    for row in copied["pairs"]:
        if _local(db, row["origin"]) is None:
            begun = changes if row["state"] != "skipped" else {}
            fresh.append(insert_row(db, "pairs", {**row, **begun, "id": last_pair_id(db) + 1}))
    for row in copied["signals"]:
        known = json.loads(first_value(db, "SELECT pair_ids FROM signals WHERE id = ?", [row["id"]]))
        own = first_column(db, "SELECT id FROM pairs WHERE signal_id = ?", [row["id"]])
        update_rows(db, "signals", {"pair_ids": sorted({*known, *own})}, id=row["id"])
    return fresh


def _local(db: Database, origin: str) -> int | None:
    """Return the id that a pair of this origin has here; None where it is not known."""
    found: int | None = first_value(db, f"SELECT id FROM pairs WHERE {ORIGIN} = ?", [origin])
    return found


def _dropped(db: Database, pair_id: int | None) -> bool:
    return bool(first_value(db, "SELECT 1 FROM quarantine WHERE pair_id = ? AND decision = 'dropped'", [pair_id]))


def hand_on(db: Database, origins: Sequence[str], epoch: int) -> None:
    """Record that the writer of an epoch has these pairs on its disk."""
    for origin in origins:
        db.execute(f"UPDATE pairs SET handed_on = ? WHERE {ORIGIN} = ?", [epoch, origin])
