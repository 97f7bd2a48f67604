"""The most of the time that fine-tuning may work, whatever else there is to do: heat and power decide it.

Owns that account of seconds. Must not know who sets the share, nor policies.
"""

from __future__ import annotations

import math

_MOST_SAVED_S = 0.1
"""Time that was not used is not made up for beyond this: heat is a matter of the present."""


class Throttle:
    """Open while fine-tuning has had no more than its `share` of the time; of 1, always."""

    __slots__ = ("_left_s", "_now", "share")

    def __init__(self) -> None:
        self.share = 1.0
        self._left_s = self._now = 0.0

    def settle(self, finetune_s: float, now: float) -> None:
        """Account for an iteration in which fine-tuning worked for `finetune_s`."""
        self._left_s = self._left(now) - finetune_s
        self._now = now

    def closed(self, now: float) -> bool:
        """Whether fine-tuning has to wait."""
        return self.share < 1.0 and self._left(now) <= 0.0

    def opens_s(self, now: float) -> float:
        """From when on it has not; inf if never."""
        return now + max(0.0, -self._left(now)) / self.share if self.share else math.inf

    def _left(self, now: float) -> float:
        return min(_MOST_SAVED_S, self._left_s + self.share * (now - self._now))
