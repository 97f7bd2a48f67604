"""Iterations of fine-tuning alone, beside which nobody is served, and a fill that knows what ran before."""

import math
from collections.abc import Sequence

from edged.lab.policies.options import IntervalOptions
from edged.scheduler.cost.model import CostModel
from edged.scheduler.planning.bin_builder import BinBuilder, grant_finetune
from edged.scheduler.planning.queues import TaskQueues
from edged.scheduler.policies.base import Fill, Policy
from edged.scheduler.task import FinetuneTask, Kind, Plan, Resources, Task
from edged.settings.load import SchedulerSettings

NOBODY = -math.inf
"""A `before_s` of `serve_only` with which no prompt enters."""


class PhasedFill(Fill):
    """A fill that knows what ran before: when fine-tuning was caught up, and whether it ran last."""

    def __init__(self) -> None:
        self._began_s = math.inf
        self._tasks, self._had_tasks = 0, False
        self.caught_up_s = -math.inf
        """Moment of the latest iteration before which no fine-tune task was left; the first one counts as such."""
        self.tuned = False
        """Whether the latest iteration in which anything ran was for fine-tuning."""

    def configure(self, settings: SchedulerSettings, cost: CostModel) -> None:
        """Take the interval."""
        super().configure(settings, cost)
        self.every_s = IntervalOptions.of(settings).retrain_every_s

    def arrived(self, task: Task, now: float) -> None:
        """Count fine-tune tasks; the first to come at an engine without any finds it caught up."""
        if task.kind is Kind.FINETUNE:
            if not self._tasks and not self._had_tasks and self._began_s < math.inf:
                self.caught_up_s = now
            self._tasks += 1

    def left(self, task: Task, now: float) -> None:
        """Count the fine-tune tasks."""
        self._tasks -= task.kind is Kind.FINETUNE

    def before(self, queues: TaskQueues, now: float) -> None:
        """Note whether there is anything to learn; fixed intervals are counted from the first iteration."""
        if self._began_s == math.inf:
            self._began_s = self.caught_up_s = now
        self._had_tasks = bool(queues.finetunes)
        if not self._had_tasks:
            self.caught_up_s = now

    def begun(self, plan: Plan, now: float) -> None:
        """Note what runs."""
        if plan.grants:
            self.tuned = plan.grants[0].task.kind is Kind.FINETUNE

    def interval_start_s(self, now: float) -> float:
        """Return when the present interval of `retrain_every_s` seconds began."""
        began_s = min(self._began_s, now)
        return began_s + math.floor((now - began_s) / self.every_s) * self.every_s


def train_only(
    tasks: Sequence[FinetuneTask],
    policy: Policy,
    queues: TaskQueues,
    now: float,
    resources: Resources,
    limit_s: float = math.inf,
    preempts: bool = False,
) -> Plan | None:
    """Plan an iteration of fine-tuning alone, in which sequences stand still and keep their pages.

    Each of `tasks` does as much as is left to do of its step, the first one at least a token or a unit, the others as
    far as `limit_s` is predicted to suffice. Where the first finds no pages for its forward, the latest requests lose
    theirs if it `preempts`; else there is no such iteration yet.
    """
    builder = BinBuilder(queues, now, resources, policy.victims.ranked, serves=False)
    if preempts:
        builder.make_room(tasks[0])
    plan, free_pages = builder.plan, builder.free_pages
    for task in tasks:
        # Promises to prompts under way still hold: by the time that they run again, this step has ended.
        free_pages -= builder.pages(task, task.num_tokens)
        if free_pages < 0:
            break
        grant_finetune(builder, task, policy.cost, limit_s, 0 if plan.grants else 1)
    plan.predicted_forward_s = policy.cost.forward_s(builder.load)
    return plan if plan.grants else None
