"""Drift: how fast the device is now, against its prices and against what is usual.

A device that throttles, or shares itself with a busy neighbour, slows all kinds of work at once: a few iterations
show it.
"""

import math
from collections import deque

WITNESSES = 5
"""Iterations in a row that must all have been slower (or faster) than priced to show that the device is."""
MIN_CHANGE = 0.1
"""Least error of each of them, in log ratios; the fits follow smaller changes by themselves."""
NOISES = 2.0
"""Least error of each of them, in mean errors of an iteration: chance gives five in a row once in millions."""
_LATEST = 0.05
"""Share of the latest iteration in `now`."""
_LATEST_NOISE = 0.02
_LARGEST_NOISE = 1.0
"""A single stall counts as this, in log ratios."""
_LATEST_SLOWNESS = 0.4
"""Share of the latest iteration in `slowness`."""
_LARGEST_STEP = 0.04
"""Most that one iteration moves `slowness`, in log ratios: a stall predicts nothing of what comes next."""


class Drift:
    """A tracker of the device's speed.

    `slowness`: how many times longer work takes at the moment than it is priced at. Processors share caches, memory
    and power with others, which come and go within tens of milliseconds: prices, the mean of about a hundred
    iterations, are late for that. Idle time is not counted. `now`: how many times longer work takes than usual.

    Nothing is summed up without end: both compare two numbers, and a jump is moved into the prices for good.
    """

    __slots__ = ("_latest", "_log", "_log_slowness", "_noise", "now", "slowness")

    def __init__(self) -> None:
        self._log = self._noise = self._log_slowness = 0.0
        self._latest: deque[float] = deque(maxlen=WITNESSES)
        self.now = self.slowness = 1.0

    def observe(self, priced_s: float, usual_s: float, measured_s: float) -> float:
        """Take an iteration in: its seconds at present prices, at usual prices, and as measured, all above zero.

        Returns the factor by which all prices rise from here on; mostly 1.
        """
        surprise = math.log(measured_s / priced_s)
        missing = _LATEST_SLOWNESS * (surprise - self._log_slowness)
        self._log_slowness += max(-_LARGEST_STEP, min(_LARGEST_STEP, missing))
        latest, least = self._latest, max(MIN_CHANGE, NOISES * self._noise)
        latest.append(surprise)
        self._noise += _LATEST_NOISE * (min(_LARGEST_NOISE, abs(surprise)) - self._noise)
        jump = 0.0
        if len(latest) == WITNESSES and (min(latest) > least or max(latest) < -least):
            jump = sorted(latest)[WITNESSES // 2]
            latest.clear()
            # The prices take it in whole.
            self._log_slowness = 0.0
        self._log += jump + _LATEST * (math.log(priced_s / usual_s) - self._log)
        self.now, self.slowness = math.exp(self._log), math.exp(self._log_slowness)
        return math.exp(jump)
