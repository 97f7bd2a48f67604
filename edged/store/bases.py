"""The base model that the learning tables speak of, and the shelves where those of other base models wait.

Owns the change from one base model to another. Must not know models: a base is the fingerprint of its weights.

What was learned belongs to the base it was learned on: versions, scores, skipped steps, and how far each pair has come.
The tables hold that of one base alone, so that no query can mix two; the pairs themselves belong to every base.
"""

from __future__ import annotations

from sqlite_utils import Database

from edged.store.quarantine import HELD

SHELVES = {
    "adapter_versions": "shelved_versions",
    "alignment_metrics": "shelved_metrics",
    "skipped_steps": "shelved_steps",
}
"""Where a table's rows wait while another base is served."""
_PROGRESS = "state, epochs_done, trained_version, ref_chosen_logp, ref_rejected_logp, ref_model, note"
"""What a base changes of a pair."""


def served_base(db: Database) -> str | None:
    """Fingerprint of the base that the learning tables speak of; None before the first."""
    row = db.execute("SELECT fingerprint FROM served_base").fetchone()
    return row[0] if row else None


def serve_base(db: Database, fingerprint: str) -> bool:
    """Make the learning tables speak of this base: as it left them, or anew with every pair queued.

    Returns whether another base's were shelved for that.
    """
    before = served_base(db)
    if before == fingerprint:
        return False
    if before is not None:
        _shelve(db, before)
        _unshelve(db, fingerprint)
    db.execute("DELETE FROM served_base")
    db.execute("INSERT INTO served_base VALUES (?)", [fingerprint])
    return before is not None


def _shelve(db: Database, base: str) -> None:
    for table, shelf in SHELVES.items():
        columns = _columns(db, table)
        db.execute(f"INSERT INTO {shelf} (base, {columns}) SELECT ?, {columns} FROM {table}", [base])
        db.execute(f"DELETE FROM {table}")
    db.execute(
        f"""INSERT INTO shelved_progress (base, pair_id, {_PROGRESS})
            SELECT ?, id, {_PROGRESS} FROM pairs WHERE id NOT IN ({HELD})""",
        [base],
    )
    db.execute(
        f"""UPDATE pairs SET state = 'queued', epochs_done = 0, trained_version = NULL, ref_chosen_logp = NULL,
                ref_rejected_logp = NULL, ref_model = NULL, note = ''
            WHERE id NOT IN ({HELD})"""
    )


def _unshelve(db: Database, base: str) -> None:
    for table, shelf in SHELVES.items():
        columns = _columns(db, table)
        db.execute(f"INSERT INTO {table} ({columns}) SELECT {columns} FROM {shelf} WHERE base = ?", [base])
        db.execute(f"DELETE FROM {shelf} WHERE base = ?", [base])
    db.execute(
        f"""UPDATE pairs SET ({_PROGRESS}) =
                (SELECT {_PROGRESS} FROM shelved_progress WHERE base = :base AND pair_id = pairs.id)
            WHERE id IN (SELECT pair_id FROM shelved_progress WHERE base = :base) AND id NOT IN ({HELD})""",
        {"base": base},
    )
    db.execute("DELETE FROM shelved_progress WHERE base = ?", [base])


def _columns(db: Database, table: str) -> str:
    return ", ".join(column.name for column in db[table].columns)
