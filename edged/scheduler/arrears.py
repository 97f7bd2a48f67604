"""How long fine-tuning has waited for the work it is owed.

Owns that one wait, of fine-tuning as a whole: work on any adapter pays for it. Must not know who decides.
"""

from __future__ import annotations

from edged.config import SchedulerSettings
from edged.scheduler.task import Task

LONGEST_WAITS, LONGEST_S = 2.0, 5.0
"""Waits count up to this many `finetune_max_wait_s`, or seconds where that is more: a debt that grew while there was no
memory for fine-tuning must not stop serving later."""


class Arrears:
    """The time since when fine-tuning waits, moved towards now by the work that it gets.

    A second of work pays for `1 / finetune_min_share` seconds of waiting. A sliver of work therefore does not count as
    if nothing were owed any more, and the share holds over any longer time. Time without any fine-tune task is no wait.
    """

    __slots__ = ("_longest_s", "_since_s", "_stopped_s", "share")

    def __init__(self, settings: SchedulerSettings) -> None:
        self.configure(settings)
        self._since_s = 0.0
        self._stopped_s = 0.0

    def configure(self, settings: SchedulerSettings) -> None:
        """Take over another share and another longest wait; what is owed stays owed."""
        self.share = settings.finetune_min_share
        self._longest_s = max(LONGEST_S, LONGEST_WAITS * settings.finetune_max_wait_s)

    def wait_s(self, now: float) -> float:
        """Seconds that fine-tuning has waited."""
        return min(max(0.0, now - self._since_s), self._longest_s)

    def start(self, now: float) -> None:
        """There is a fine-tune task again: what was owed when the last one left still is, and the clock runs on."""
        owed_s = self.wait_s(self._stopped_s)
        self._since_s = now - owed_s if owed_s else max(now, self._since_s)

    def stop(self, now: float) -> None:
        """The last fine-tune task has left."""
        self._stopped_s = now

    def pay(self, task: Task, work_s: float, now: float, prepaid: bool) -> None:
        """`task` was worked on for `work_s`: its own wait and that of all fine-tuning grow shorter.

        Work beyond what was owed is forgotten, unless it was `prepaid`: then the next wait begins that much later.
        """
        paid_s = work_s / self.share if self.share > 0.0 else self._longest_s
        oldest_s = now - self._longest_s
        task.arrival_s = min(now, max(task.arrival_s, oldest_s) + paid_s)
        latest_s = now + self._longest_s if prepaid else max(now, self._since_s)
        self._since_s = min(latest_s, max(self._since_s, oldest_s) + paid_s)
