"""The table `iteration_samples`: a sample of what the engine's iterations did."""

from __future__ import annotations

from sqlite_utils import Database


def insert_sample(db: Database, created_at: str, sample: dict[str, float | int | None]) -> None:
    """Add one iteration (keys: the table's columns)."""
    db.execute(
        """INSERT INTO iteration_samples VALUES (NULL, :created_at, :prefill_tokens, :decode_tokens, :finetune_tokens,
               :finetune_units, :latency_ms, :predicted_ms, :budget_ms, :free_pages)""",
        {"created_at": created_at, **sample},
    )
