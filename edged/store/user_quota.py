"""The quota of stored bytes per user, and trimming a user's own data to it."""

import json
import math
import time
from collections.abc import Callable, Sequence

from sqlite_utils import Database

from edged.settings.live import Live
from edged.settings.load import Settings
from edged.store.completions import UNUSED
from edged.store.feedback import count_queued
from edged.store.rows import first_value

_RECOUNT_S = 10.0
"""A user who is over the limit is counted again at most that often: it reads all of the user's rows."""
_TRIM_TO = 0.9
"""Share of the limit that is left after making room, so that it is not made for every single answer."""
_MAX_USERS = 10_000

_MINE = "adapter = :user OR user = :user"
_COMPLETION = """length(prompt_ids) + length(coalesce(messages, '')) + length(coalesce(prompt, ''))
    + (SELECT coalesce(sum(length(text) + length(token_ids)), 0) FROM choices WHERE completion_id = completions.id)"""
_PAIR = """length(coalesce(messages, '')) + length(coalesce(prompt, '')) + length(chosen) + length(rejected)
    + length(coalesce(prompt_ids, '')) + length(coalesce(chosen_ids, '')) + length(coalesce(rejected_ids, ''))"""

_RATINGS_QUEUED = "SELECT count(*) FROM pairs WHERE adapter = ? AND '' IN (chosen, rejected) AND state = 'queued'"


class StorageFull(ValueError):
    """The user's quota is used up; the message says how much and the way out."""


class PairQueueFull(ValueError):
    """So many of the user's pairs wait to be learned that no more are taken; the message says the way out."""

    retry_after_s = 10.0


class UserQuota:
    """Stored bytes by user, counted once and updated from there. To be used inside `Store.write` alone."""

    def __init__(self, settings: Live[Settings], clock: Callable[[], float] = time.monotonic) -> None:
        self._settings, self._clock = settings, clock
        self._known: dict[str, tuple[int, float]] = {}
        """Bytes by user, and when they were counted."""

    @property
    def _most(self) -> int:
        """Bytes of one user that are kept; 0: as much as there is."""
        return self._settings.current.limits.stored_mb * 2**20

    def demand_room(self, db: Database, user: str) -> None:
        """Raises StorageFull when no more may be kept of a user, and PairQueueFull when none may wait to be learned.

        What is not learned waits in any number: all pairs or, where `align.unpaired` is "off", single ratings.
        """
        align = self._settings.current.align
        most = self._settings.current.limits.queued_pairs if align.enabled else 0
        waiting = count_queued(db, user) if most else 0
        if waiting >= most > 0 and align.unpaired == "off":
            waiting -= first_value(db, _RATINGS_QUEUED, [user])
        if waiting >= most > 0:
            way_out = "send more when some were learned (`edged status` says what fine-tuning waits for), or raise that"
            raise PairQueueFull(
                f'{most} pairs of user "{user}" wait to be learned, and limits.queued_pairs = {most}: {way_out}'
            )
        if self._most and self._over(db, user):
            kept = f'{self._known[user][0] / 2**20:.1f} MiB of user "{user}" are kept'
            way_out = f"forget the user (`edged adapters forget {user}`), or raise the limit"
            raise StorageFull(f"{kept}, and limits.stored_mb = {self._most / 2**20:g}: {way_out}")

    def added(self, db: Database, user: str, size_bytes: int) -> None:
        """Count what was written of a user; the oldest completions that no feedback refers to make room for it."""
        if not self._most:
            return
        if user in self._known:
            kept, counted_s = self._known[user]
            self._known[user] = (kept + size_bytes, counted_s)
        if self._over(db, user):
            trim_completions(db, user, self._known[user][0] - int(self._most * _TRIM_TO))
            self._count(db, user)

    def learned(self, db: Database, user: str, pair_ids: Sequence[int]) -> None:
        """Count pairs that were written of a user."""
        if self._most and pair_ids:
            query = f"SELECT sum({_PAIR}) FROM pairs WHERE id IN (SELECT value FROM json_each(?))"
            self.added(db, user, first_value(db, query, [json.dumps(list(pair_ids))]) or 0)

    def _over(self, db: Database, user: str) -> bool:
        kept, counted_s = self._known.get(user, (self._most, -math.inf))
        if kept >= self._most and self._clock() - counted_s >= _RECOUNT_S:
            kept = self._count(db, user)
        return kept >= self._most

    def _count(self, db: Database, user: str) -> int:
        if user not in self._known and len(self._known) >= _MAX_USERS:
            self._known.clear()
        self._known[user] = (stored_bytes(db, user), self._clock())
        return self._known[user][0]


def stored_bytes(db: Database, user: str) -> int:
    """Characters and digits of all that is kept of a user: completions, signals and pairs."""
    parts = (
        f"SELECT {_COMPLETION} AS size FROM completions WHERE {_MINE}",
        "SELECT length(coalesce(text, '')) FROM signals WHERE user = :user",
        f"SELECT {_PAIR} FROM pairs WHERE adapter = :user",
    )
    query = f"SELECT coalesce(sum(size), 0) FROM ({' UNION ALL '.join(parts)})"
    return int(first_value(db, query, {"user": user}))


def trim_completions(db: Database, user: str, excess_bytes: int) -> int:
    """Delete a user's oldest completions that no feedback refers to, until `excess_bytes` are gone: how many."""
    return db.execute(
        f"""DELETE FROM completions WHERE rowid IN (
                SELECT rowid FROM (
                    SELECT rowid, sum({_COMPLETION}) OVER (ORDER BY rowid) - ({_COMPLETION}) AS before
                    FROM completions WHERE ({_MINE}) AND {UNUSED})
                WHERE before < :excess)""",
        {"user": user, "excess": excess_bytes},
    ).rowcount
