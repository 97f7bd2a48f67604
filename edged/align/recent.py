"""The adapters that something happened to lately, by name, and all others together: a bounded view of many.

Owns which adapters are shown and what their figures mean. Must not know who shows them. A look reads a bounded number
of rows, whatever the database has grown to.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from sqlite_utils import Database

from edged.align.metrics import RECENT_PAIRS, latest_test

OTHER = "other"
"""Under this name the rest is summed; a user of that name is part of it."""
_ROWS = 1000
"""Latest scores and pairs that are looked at."""


@dataclass(frozen=True, slots=True)
class AdapterReading:
    """One adapter's means over its latest RECENT_PAIRS scores (None without any), and the pairs that wait."""

    adapter: str
    pairs_pending: int
    win_rate: float | None = None
    clpd_nats: float | None = None
    reward_accuracy: float | None = None
    kl_nats: float | None = None
    """Of its latest test: to the base, per token of held-out answers; and the change of neutral text's NLL."""
    nll_change: float | None = None


def recent_adapters(db: Database, known: Collection[str], pairs_pending: int, most: int) -> list[AdapterReading]:
    """The `most` adapters of `known` that were scored or given pairs last, and OTHER where there are more.

    `pairs_pending` is how many pairs wait in all. OTHER's means are over all their scores among the latest ones.
    """
    shown = [_reading(db, name) for name in _latest(db, known)[:most]]
    if len(shown) < len(set(known)):
        waiting = pairs_pending - sum(reading.pairs_pending for reading in shown)
        means = _means_of_others(db, [reading.adapter for reading in shown])
        # The store hears of a step's end a moment after the trainer.
        shown.append(AdapterReading(OTHER, max(0, waiting), *means))
    return shown


def _latest(db: Database, known: Collection[str]) -> list[str]:
    """Names in order of their latest scores and pairs, then the others by name."""
    active = db.execute(
        """SELECT adapter FROM (
               SELECT * FROM (SELECT adapter, created_at FROM alignment_metrics ORDER BY id DESC LIMIT :rows)
               UNION ALL SELECT * FROM (SELECT adapter, created_at FROM pairs ORDER BY id DESC LIMIT :rows))
           GROUP BY adapter ORDER BY max(created_at) DESC, adapter""",
        {"rows": _ROWS},
    )
    names = dict.fromkeys([*(name for (name,) in active), *sorted(known)])
    return [name for name in names if name in known and name != OTHER]


def _reading(db: Database, name: str) -> AdapterReading:
    (pending,) = db.execute("SELECT count(*) FROM pairs WHERE adapter = ? AND state = 'queued'", [name]).fetchone()
    means = db.execute(
        """SELECT avg(win), avg(logp_difference), avg(reward_correct) FROM (
               SELECT * FROM alignment_metrics WHERE adapter = ? AND split = 'prequential'
               ORDER BY version DESC, id DESC LIMIT ?)""",
        [name, RECENT_PAIRS],
    ).fetchone()
    win_rate, clpd, accuracy = means
    test = latest_test(db, name)
    return AdapterReading(name, pending, win_rate, clpd, accuracy, test["held_out_kl_nats"], test["neutral_nll_change"])


def _means_of_others(db: Database, shown: list[str]) -> tuple[float | None, float | None, float | None]:
    marks = ", ".join("?" * len(shown))
    win_rate, clpd, accuracy = db.execute(
        f"""SELECT avg(win), avg(logp_difference), avg(reward_correct)
            FROM (SELECT * FROM alignment_metrics ORDER BY id DESC LIMIT ?)
            WHERE split = 'prequential' AND adapter NOT IN ({marks})""",
        [_ROWS, *shown],
    ).fetchone()
    return win_rate, clpd, accuracy
