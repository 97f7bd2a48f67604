"""How fast the device is now, against when its prices were learned.

Owns that one factor. A device that throttles, or shares itself with a busy neighbour, slows everything at once: a few
iterations tell it of all kinds of work. Must not know what ran.
"""

from __future__ import annotations

import math
from collections import deque

WITNESSES = 5
"""Iterations in a row that must all have been slower (or faster) than predicted before the factor jumps."""
LEAST_CHANGE = 0.1
"""What each of them must have been off by, in log ratios; smaller changes are crept after."""
LARGEST_SURPRISE = 0.3
"""Most that one iteration counts between jumps: a stall is not a throttled device."""
CREEP = 0.05
"""Share of each surprise that is taken over at once."""


class Drift:
    """The factor `now`: predicted seconds at learned prices times it are the seconds to expect."""

    __slots__ = ("_latest", "_log", "now")

    def __init__(self) -> None:
        self._log = 0.0
        self._latest: deque[float] = deque(maxlen=WITNESSES)
        self.now = 1.0

    def observe(self, predicted_s: float, measured_s: float) -> None:
        """An iteration that was predicted with the present factor; both above zero."""
        surprise = math.log(measured_s / predicted_s)
        latest = self._latest
        latest.append(surprise)
        agreed = len(latest) == WITNESSES and (min(latest) > LEAST_CHANGE or max(latest) < -LEAST_CHANGE)
        if agreed:
            self._log += sorted(latest)[WITNESSES // 2]
            latest.clear()
        else:
            self._log += CREEP * min(LARGEST_SURPRISE, max(-LARGEST_SURPRISE, surprise))
        self.now = math.exp(self._log)
