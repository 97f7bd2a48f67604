"""Supply: how many boxes of each kind came in the last 24 hours (Venn 4.4.4)."""

from __future__ import annotations

from collections import Counter, deque
from typing import Generic, TypeVar

Kind = TypeVar("Kind")
_HOUR_S = 3600.0
_HOURS = 24


class Supply(Generic[Kind]):
    """Counts by kind, in bins of an hour. Times never go back."""

    def __init__(self) -> None:
        self.counts: Counter[Kind] = Counter()
        """Counts of the last 24 hours, by kind."""
        self._bins: deque[tuple[int, Counter[Kind]]] = deque()
        self._since_s: float | None = None

    def add(self, kind: Kind, now: float, count: int = 1) -> None:
        """Count what came at `now`, in seconds."""
        self._since_s = now if self._since_s is None else self._since_s
        hour = int(now // _HOUR_S)
        if not self._bins or self._bins[-1][0] != hour:
            self.forget(now)
            self._bins.append((hour, Counter()))
        self._bins[-1][1][kind] += count
        self.counts[kind] += count

    def forget(self, now: float) -> None:
        """Drop the bins that ended 24 hours ago."""
        while self._bins and self._bins[0][0] < now // _HOUR_S - _HOURS:
            self.counts -= self._bins.popleft()[1]

    def span_s(self, now: float) -> float:
        """Return the seconds that the counts are of, at least one."""
        since_s = now if self._since_s is None else self._since_s
        return max(1.0, min(now - since_s, _HOURS * _HOUR_S + now % _HOUR_S))
