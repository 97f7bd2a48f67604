"""The table `iteration_samples`: a bounded sample of what the engine's iterations did.

Owns its rows. Must not know the engine.
"""

from __future__ import annotations

from sqlite_utils import Database

PRUNE_EVERY = 1024
"""Insertions between two looks at the retention bound."""


def insert_sample(db: Database, created_at: str, sample: dict[str, float | int | None], keep: int) -> None:
    """Add one iteration (keys: the table's columns); the table never holds more than `keep` + PRUNE_EVERY rows."""
    cursor = db.execute(
        """INSERT INTO iteration_samples VALUES (NULL, :created_at, :prefill_tokens, :decode_tokens, :finetune_tokens,
               :finetune_units, :latency_ms, :predicted_ms, :budget_ms, :free_pages)""",
        {"created_at": created_at, **sample},
    )
    newest = cursor.lastrowid or 0
    if newest % PRUNE_EVERY == 0:
        db.execute("DELETE FROM iteration_samples WHERE id <= ?", [newest - keep])
