"""Budgets of fine-tuning as a whole, in seconds: the time it is owed, and the time it may take from serving."""

import math

from edged.scheduler.task import FinetuneTask
from edged.settings.load import SchedulerSettings

LONGEST_S = 5.0
"""Seconds beyond `finetune_max_wait_s` that a wait counts at most: a debt that grew while there was no memory for
fine-tuning must not stop serving later."""


class FinetuneDeficit:
    """The wait of fine-tuning: the moment since when it waits, moved towards now by the work that it gets.

    A second of work pays for `1 / finetune_min_share` seconds of waiting. A sliver of work therefore does not count as
    if nothing were owed any more, and the share holds over any longer time. Time without any fine-tune task is no wait.
    """

    def __init__(self) -> None:
        self._since_s = 0.0
        self._stopped_s = 0.0

    def configure(self, settings: SchedulerSettings) -> None:
        """Take the share and the longest wait, at the start and at a reload; what is owed stays owed."""
        self.share = settings.finetune_min_share
        self._longest_s = settings.finetune_max_wait_s + LONGEST_S

    def wait_s(self, now: float) -> float:
        """Return the seconds that fine-tuning has waited."""
        return min(max(0.0, now - self._since_s), self._longest_s)

    def start(self, now: float) -> None:
        """Start the wait at the first fine-tune task: what was owed when the last one left still is."""
        owed_s = self.wait_s(self._stopped_s)
        self._since_s = now - owed_s if owed_s else max(now, self._since_s)

    def stop(self, now: float) -> None:
        """Stop the wait: the last fine-tune task has left."""
        self._stopped_s = now

    def pay(self, task: FinetuneTask, work_s: float, now: float, prepaid: bool) -> None:
        """Shorten the wait of `task`, which was worked on for `work_s`, and that of all fine-tuning.

        Work beyond what was owed is forgotten, unless it was `prepaid`: then the next wait begins that much later.
        """
        paid_s = work_s / self.share if self.share > 0.0 else self._longest_s
        oldest_s = now - self._longest_s
        task.arrival_s = min(now, max(task.arrival_s, oldest_s) + paid_s)
        latest_s = now + self._longest_s if prepaid else max(now, self._since_s)
        self._since_s = min(latest_s, max(self._since_s, oldest_s) + paid_s)


SPAN_S = 10.0
"""Seconds over which load and slow-down are means: what was not taken is not made up for later."""


class SlowdownBudget:
    """Seconds of work beside serving that keep the mean time between tokens within a slow-down of serving alone.

    Where serving takes a share rho of the time, a request's time in a processor-sharing queue grows as 1 / (1 - rho); a
    share f of other work makes that 1 / (1 - rho - f), so f = (1 - 1 / slow-down) * (1 - rho) of the time is earned.
    The most that is saved up is granted in advance. Work beyond what is left (a share that was owed, a unit that took
    longer than predicted) is paid back by less work later, but for what is older than the span.
    """

    def __init__(self) -> None:
        self._busy_s = self._now = 0.0
        self.left_s = math.inf
        """Seconds of work that may be done now; below zero where more was done."""

    def configure(self, slowdown: float, max_saved_s: float = math.inf) -> None:
        """Allow this slow-down from now on; work that is not done is saved up for a span, or to `max_saved_s`."""
        self._share = 1.0 - 1.0 / slowdown
        self._saved_s = min(max_saved_s, SPAN_S * self._share)
        self.left_s = min(self.left_s, self._saved_s)

    def settle(self, serving_s: float, used_s: float, finetune_s: float, now: float) -> None:
        """Account for an iteration that served requests: the seconds of serving, those of them that more requests could
        not have shared, which make rho, and those that fine-tuning added."""
        self._busy_s = self._busy_s * math.exp((self._now - now) / SPAN_S) + used_s
        self._now = now
        share = self._share * max(0.0, 1.0 - self._busy_s / SPAN_S)
        earned_s = serving_s * share / (1.0 - share)
        self.left_s = min(self._saved_s, max(-SPAN_S * self._share, self.left_s + earned_s - finetune_s))


_MAX_SAVED_S = 0.1
"""Most unused seconds that are made up for later: heat is a matter of the present."""


class DutyCycle:
    """A gate that is open while fine-tuning has had no more than its `share` of the time; at 1 always."""

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
        """Return the moment from which fine-tuning need not wait; inf if never."""
        return now + max(0.0, -self._left(now)) / self.share if self.share else math.inf

    def _left(self, now: float) -> float:
        return min(_MAX_SAVED_S, self._left_s + self.share * (now - self._now))
