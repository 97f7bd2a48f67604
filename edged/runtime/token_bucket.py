"""How many of a user's pairs an hour may be trained on: a token bucket that holds one hour's worth."""

from __future__ import annotations

import math


class TokenBucket:
    """`per_hour` 0 is no limit."""

    def __init__(self, per_hour: int = 0) -> None:
        self._most = float(per_hour)
        self._left = self._most
        self._counted_s: float | None = None

    def take(self, now: float) -> bool:
        """Whether one more may be trained on at `now` (seconds); it is counted then."""
        if not self._most:
            return True
        self._refill(now)
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True

    def next_s(self) -> float:
        """When the next one may be; -inf for now, and before the first."""
        if not self._most or self._left >= 1.0 or self._counted_s is None:
            return -math.inf
        return self._counted_s + (1.0 - self._left) * 3600.0 / self._most

    def _refill(self, now: float) -> None:
        if self._counted_s is not None:
            # A hair more than was asked to wait for, so that rounding never makes it wait twice.
            self._left = min(self._most, self._left + (now - self._counted_s) * self._most / 3600.0 + 1e-9)
        self._counted_s = now
