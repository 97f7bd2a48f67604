"""How long people waited for tokens, and whether these came in time: a record each, for percentiles and histograms.

Written by the engine thread alone, which pays three assignments; read by any.
"""

from __future__ import annotations

from array import array

from edged.scheduler.task import ServiceClass

KEPT = 1 << 15
"""Records that are kept: a reader that looks once a second misses none below so many tokens a second."""

Wait = tuple[int, float, bool, ServiceClass]
"""Number (from 1, without gaps), seconds, whether the target was met, whose targets."""

_CLASSES = tuple(ServiceClass)
_CODES = {service: 2 * place for place, service in enumerate(_CLASSES)}


class LatencyRing:
    """The latest `KEPT` waits of one sort: for first tokens, or from a token to the next.

    The ring has its full size from the start, 9 bytes a record, whatever is recorded.
    """

    __slots__ = ("_codes", "_seconds", "count")

    def __init__(self) -> None:
        self.count = 0
        """Waits since start."""
        # One place more, which is written while the others are read.
        self._seconds = array("d", bytes(8 * (KEPT + 1)))
        self._codes = bytearray(KEPT + 1)
        """Twice the place of the class, and one more where the target was met."""

    def add(self, seconds: float, met: bool, service: ServiceClass) -> None:
        """Record one; the engine thread alone calls it."""
        place = self.count % len(self._codes)
        self._seconds[place] = seconds
        self._codes[place] = _CODES[service] + met
        self.count += 1

    def since(self, number: int) -> list[Wait]:
        """Records after `number` that are still kept, newest first."""
        newest = self.count
        seconds, codes = self._seconds[:], bytes(self._codes)
        # Meanwhile the oldest may have been overwritten, and one more may be about to be.
        oldest = max(number, self.count + 1 - len(codes))
        return [
            (each, seconds[place], bool(codes[place] & 1), _CLASSES[codes[place] >> 1])
            for each in range(newest, oldest, -1)
            for place in ((each - 1) % len(codes),)
        ]

    def latest(self, count: int) -> list[Wait]:
        """The last `count` records, newest first."""
        return self.since(max(0, self.count - count))[:count]
