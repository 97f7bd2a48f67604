"""What fine-tuning may still take of the time of those who are being served.

Owns that account of seconds. Must not know who decides: a policy reads what is left.
"""

from __future__ import annotations

import math

from edged.config import SchedulerSettings

SPAN_S = 10.0
"""Seconds over which the load is told, and the slow-down is a mean: what was not taken is not made up for later."""


class Allowance:
    """Seconds of work beside serving that keep the mean time between tokens within `tbt_slowdown` of serving alone.

    Where serving takes a share rho of the time, a request's time in a processor-sharing queue grows as 1 / (1 - rho); a
    share f of other work makes that 1 / (1 - rho - f), so f = (tbt_slowdown - 1) * (1 - rho) of the serving time is
    earned, to first order. The first span is granted in advance. Work beyond what is left (a share that was owed, a
    unit that took longer than predicted) is paid back by less work later, but for what is older than the span.
    """

    __slots__ = ("_busy_s", "_most_s", "_now", "_rate", "left_s")

    def __init__(self, settings: SchedulerSettings) -> None:
        self.configure(settings)
        self._busy_s = self._now = 0.0
        self.left_s = self._most_s
        """Seconds of work that may be done now; below zero where more was done than that."""

    def configure(self, settings: SchedulerSettings) -> None:
        """Earn at another rate from now on."""
        self._rate = settings.tbt_slowdown - 1.0
        self._most_s = SPAN_S * self._rate

    def settle(self, serving_s: float, finetune_s: float, now: float) -> None:
        """Account for an iteration in which somebody was served: the time for that, and the time that it grew by."""
        self._busy_s = self._busy_s * math.exp((self._now - now) / SPAN_S) + serving_s
        self._now = now
        earned_s = self._rate * serving_s * max(0.0, 1.0 - self._busy_s / SPAN_S)
        self.left_s = min(self._most_s, max(-self._most_s, self.left_s + earned_s - finetune_s))
