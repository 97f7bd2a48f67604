"""How long people waited for tokens, and whether these came in time: a record each, for percentiles and histograms.

Owns the ring of records. Written by the engine thread, which pays one append; read by any: records are never changed.
"""

from __future__ import annotations

from collections import deque
from itertools import islice

from edged.scheduler.task import ServiceClass

KEPT = 1 << 15
"""Records that are kept: a reader that looks once a second misses none below so many tokens a second."""

Wait = tuple[int, float, bool, ServiceClass]
"""Number (from 1, without gaps), seconds, whether the target was met, whose targets. Bare: every token makes one."""


class Waits:
    """The latest `KEPT` waits of one sort: for first tokens, or from a token to the next."""

    __slots__ = ("_kept", "count")

    def __init__(self) -> None:
        self.count = 0
        """Waits since start."""
        self._kept: deque[Wait] = deque(maxlen=KEPT)

    def add(self, seconds: float, met: bool, service: ServiceClass) -> None:
        """Record one; the engine thread alone calls it."""
        self.count += 1
        self._kept.append((self.count, seconds, met, service))

    def since(self, number: int) -> list[Wait]:
        """Records after `number` that are still kept, newest first."""
        kept = self._kept.copy()
        newest = kept[-1][0] if kept else number
        return list(islice(reversed(kept), max(0, newest - number)))

    def latest(self, count: int) -> list[Wait]:
        """The last `count` records, newest first."""
        return list(islice(reversed(self._kept.copy()), count))
