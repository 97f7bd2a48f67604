"""What may leave the database, by age, number and size: one rule a table.

Owns the rules. Must not know when they are applied (see `edged.store.upkeep`), nor what feedback means.

Two things hold whatever the settings say: what a signal or a pair refers to stays as long as these do, and so do pairs
that wait for training, are held out, or are replayed. The newest rows of a table stay whatever their date says, since
a box may have lived in 1970 until its clock was set.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlite_utils import Database

from edged.config import StoreSettings
from edged.store.completions import UNUSED
from edged.store.feedback import REPLAY_PAIRS
from edged.store.timestamps import utc_text

SLICE_ROWS = 64
"""Most rows that are deleted in one write."""
NEWEST = 1000
"""Completions and samples that neither age nor size takes."""

_DONE = """pairs.created_at < :feedback_cutoff AND pairs.state IN ('trained', 'learnt', 'skipped')
    AND pairs.id < (SELECT value FROM json_each(:replayed_from) WHERE key = pairs.adapter)"""


@dataclass(frozen=True, slots=True)
class Rule:
    """Rows of `table` for which the SQL condition `gone` holds may go; its parameters are `parameters`' keys."""

    table: str
    gone: str


BY_AGE_AND_NUMBER = (
    Rule(
        "completions",
        f"(rowid <= :completions_over OR (rowid <= :completions_old AND created_at < :cutoff)) AND {UNUSED}",
    ),
    Rule("iteration_samples", "id <= :samples_over OR (id <= :samples_old AND created_at < :cutoff)"),
    Rule(
        "alignment_metrics",
        """split = 'held_out' AND created_at < :cutoff AND version < (
               SELECT max(version) FROM alignment_metrics AS newer
               WHERE newer.adapter = alignment_metrics.adapter AND newer.split = 'held_out')""",
    ),
    Rule("shelved_metrics", "split = 'held_out' AND created_at < :cutoff"),
    Rule(
        "adapter_versions",
        """on_disk = 0 AND created_at < :cutoff AND version < (
               SELECT max(version) FROM adapter_versions AS newer WHERE newer.adapter = adapter_versions.adapter)""",
    ),
    Rule("shelved_versions", "on_disk = 0 AND created_at < :cutoff"),
    Rule("skipped_steps", "created_at < :cutoff"),
    Rule("shelved_steps", "created_at < :cutoff"),
    # In this order: scores refer to pairs, and pairs to signals.
    Rule("alignment_metrics", f"pair_id IN (SELECT id FROM pairs WHERE {_DONE})"),
    Rule("pairs", f"{_DONE} AND NOT EXISTS (SELECT 1 FROM alignment_metrics WHERE pair_id = pairs.id)"),
    Rule(
        "signals",
        """created_at < :feedback_cutoff AND NOT EXISTS (SELECT 1 FROM pairs WHERE signal_id = signals.id)
           AND NOT EXISTS (SELECT 1 FROM pairs WHERE chosen_completion_id = signals.completion_id)
           AND NOT EXISTS (SELECT 1 FROM pairs WHERE rejected_completion_id = signals.completion_id)""",
    ),
)
BY_SIZE = (
    Rule("completions", f"rowid <= :completions_old AND {UNUSED}"),
    Rule("iteration_samples", "id <= :samples_old"),
)
"""What goes, the oldest first, while the file is larger than it may be."""


def parameters(db: Database, settings: StoreSettings, now: datetime) -> dict[str, Any]:
    """The rules' parameters for the present state."""
    replayed = db.execute(
        """SELECT adapter, min(id) FROM (
               SELECT adapter, id, row_number() OVER (PARTITION BY adapter ORDER BY id DESC) AS age
               FROM pairs WHERE state IN ('trained', 'learnt')) WHERE age <= ? GROUP BY adapter""",
        [REPLAY_PAIRS],
    )
    return {
        "completions_over": _before_newest(db, "completions", settings.keep_completions),
        "completions_old": _before_newest(db, "completions", min(NEWEST, settings.keep_completions)),
        "samples_over": _before_newest(db, "iteration_samples", settings.keep_samples),
        "samples_old": _before_newest(db, "iteration_samples", min(NEWEST, settings.keep_samples)),
        "cutoff": _cutoff(now, settings.keep_days),
        "feedback_cutoff": _cutoff(now, settings.keep_feedback_days),
        "replayed_from": json.dumps(dict(replayed.fetchall())),
    }


def _before_newest(db: Database, table: str, count: int) -> int:
    """The rowid up to which a table's rows are older than its newest `count`; -1 where there are no more."""
    row = db.execute(f"SELECT rowid FROM {table} ORDER BY rowid DESC LIMIT 1 OFFSET ?", [count]).fetchone()
    return row[0] if row else -1


def _cutoff(now: datetime, days: float) -> str:
    """Rows from before this moment are old; "" is before every one."""
    try:
        return utc_text(now - timedelta(days=days)) if days else ""
    except OverflowError:
        return ""


def find(db: Database, rule: Rule, values: dict[str, Any], after: int) -> list[int]:
    """Rowids beyond `after` of the next rows that may go, at most SLICE_ROWS. Takes long: not for the writer thread."""
    rows = db.execute(
        f"SELECT rowid FROM {rule.table} WHERE rowid > :after AND ({rule.gone}) ORDER BY rowid LIMIT {SLICE_ROWS}",
        {**values, "after": after},
    )
    return [rowid for (rowid,) in rows.fetchall()]


def delete(db: Database, rule: Rule, values: dict[str, Any], rowids: list[int]) -> int:
    """Delete those of the rows that may still go; returns how many."""
    return db.execute(
        f"DELETE FROM {rule.table} WHERE rowid IN (SELECT value FROM json_each(:rowids)) AND ({rule.gone})",
        {**values, "rowids": json.dumps(rowids)},
    ).rowcount


def used_bytes(db: Database) -> int:
    """Bytes of the file's pages that hold something."""
    pages, free, size = (db.execute(f"PRAGMA {x}").fetchone()[0] for x in ("page_count", "freelist_count", "page_size"))
    return int((pages - free) * size)
