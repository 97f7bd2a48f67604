"""What fine-tuning may still take of the time of those who are being served.

Owns that account of seconds. Must not know who decides: a policy reads what is left.
"""

from __future__ import annotations

from edged.config import SchedulerSettings

SPAN_S = 10.0
"""Seconds of serving over which the slow-down is a mean: what was not taken in them is not made up for later."""


class Allowance:
    """Seconds of work beside serving that keep the mean time between tokens within `tbt_slowdown` of serving alone.

    A second of serving earns `tbt_slowdown - 1` seconds, and the first span is granted in advance. Work beyond what is
    left (a share that was owed, a unit that took longer than predicted) is paid back by less work later, but for what
    is older than the span.
    """

    __slots__ = ("_most_s", "_rate", "left_s")

    def __init__(self, settings: SchedulerSettings) -> None:
        self._rate = settings.tbt_slowdown - 1.0
        self._most_s = SPAN_S * self._rate
        self.left_s = self._most_s
        """Seconds of work that may be done now; below zero where more was done than that."""

    def settle(self, serving_s: float, finetune_s: float) -> None:
        """Account for an iteration in which somebody was served: the time for that, and the time that it grew by."""
        self.left_s = min(self._most_s, max(-self._most_s, self.left_s + self._rate * serving_s - finetune_s))
