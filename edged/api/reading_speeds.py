"""How fast users read, where a request does not say: by the settings, or learned from how long they stayed."""

import asyncio
import statistics
from contextlib import suppress

from sqlite_utils import Database

from edged.runtime.pacer import count_words
from edged.settings.by_user import value_of
from edged.settings.live import Live
from edged.settings.load import Settings
from edged.store import Store, StoreError
from edged.store.feedback import latest_dwells

LATEST, LEAST = 20, 5
"""Most dwell signals that a speed is learned from, and the fewest."""
SLOWEST, FASTEST = 2.0, 10.0
"""Words a second of somebody who reads; others glanced, or were elsewhere."""
_KEPT = 4096


class ReadingSpeeds:
    """The words that users read in a second."""

    def __init__(self, live: Live[Settings], store: Store) -> None:
        self._live, self._store = live, store
        self._learned: dict[str, float | None] = {}

    async def of(self, user: str | None) -> float:
        """Return a user's words a second: `reading.users`, else learned, else `reading.words_per_s`."""
        reading = self._live.current.reading
        named = value_of(reading.users, user) if user else None
        if named is not None or user is None or not reading.learn:
            return named or reading.words_per_s
        if user not in self._learned:
            if len(self._learned) >= _KEPT:
                self._learned.clear()
            with suppress(StoreError):
                self._learned[user] = await asyncio.to_thread(self._store.read, lambda db: learned(db, user))
        return self._learned.get(user) or reading.words_per_s

    def forget(self, user: str) -> None:
        """Learn a user's speed anew when it is wanted next: there is a new signal, or no signal any more."""
        self._learned.pop(user, None)


def learned(db: Database, user: str) -> float | None:
    """Return the median words a second of a user's latest dwell signals; None where too few tell of reading."""
    paces = [count_words(text) / seconds for seconds, text in latest_dwells(db, user, LATEST) if seconds > 0.0]
    read = [pace for pace in paces if SLOWEST <= pace <= FASTEST]
    return statistics.median(read) if len(read) >= LEAST else None
