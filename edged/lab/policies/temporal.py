"""Temporal sharing (FlexLLM 8.2 and Algorithm 3): iterations that serve, then a whole group of pairs, and so on.

Kept of FlexLLM's baselines: fine-tuning is not split below a mini-batch's forward and backward, which run alone. With
nobody to serve, groups follow one another.
"""

from edged.lab.policies.options import TemporalOptions
from edged.lab.policies.phases import NOBODY, train_only
from edged.scheduler.cost.model import CostModel
from edged.scheduler.planning.queues import TaskQueues
from edged.scheduler.policies.base import Fill, Policy, Row
from edged.scheduler.policies.phased import runnable_steps, serve_only
from edged.scheduler.task import Kind, Plan, Resources, Task
from edged.settings.load import SchedulerSettings

SHORTEST, LONGEST = 64, 512
"""Fewest and most serving iterations between two groups (Algorithm 3)."""
_PATIENCE = 3
"""Number of intervals that share one decision."""


class TemporalSharing(Fill):
    """After `temporal_every` iterations that serve, one group of pairs runs alone, forward and backward, to its end.

    Answers stand still with their pages meanwhile. A group that lacks pages waits until answers have ended; nobody
    enters before it.
    """

    def __init__(self) -> None:
        self._served = 0
        self._group = -1, 0
        """Task, and number in its step, of the group that ran last."""
        self._due = False

    def configure(self, settings: SchedulerSettings, cost: CostModel) -> None:
        """Take the interval."""
        super().configure(settings, cost)
        self._every = TemporalOptions.of(settings).temporal_every

    def plan(self, policy: Policy, queues: TaskQueues, now: float, resources: Resources) -> Plan:
        """Return a group alone where it has begun or is due, else serving."""
        tasks = runnable_steps(queues, resources)[:1]
        goes_on = any(task.begun and self._group == (task.task_id, task.groups_done) for task in tasks)
        if not tasks or not (goes_on or self._due or not (queues.decodes or queues.started or queues.flows)):
            return serve_only(policy, queues, now, resources)
        alone = train_only(tasks, policy, queues, now, resources)
        return alone or serve_only(policy, queues, now, resources, NOBODY)

    def begun(self, plan: Plan, now: float) -> None:
        """Count the iterations that serve, from the latest group on."""
        if not plan.grants:
            return
        task = plan.grants[0].task
        if task.kind is Kind.FINETUNE:
            self._group, self._due, self._served = (task.task_id, task.groups_done), False, 0
        else:
            self._served += 1
            self._due |= self._turns()

    def _turns(self) -> bool:
        """Return whether the iteration that serves now is the last one before a group."""
        return self._served >= self._every


class DynamicInterval:
    """The number of serving iterations between two groups, by the pressure of requests (FlexLLM Algorithm 3).

    It also collects batch sizes, of which it makes no use. Lines 37 and 38 are read as one branch: the adjustment of
    line 38 is of the interval that lies between the shortest and the longest.
    """

    def __init__(self) -> None:
        self._left = self._before = float(SHORTEST)
        self._intervals = 0
        self._queued: list[int] = []
        self._growth = 0

    def step(self, queued: int, arrived: int, ended: int) -> bool:
        """Take a serving iteration in, with the requests that wait, came and ended; returns whether a group follows."""
        self._growth += arrived - ended
        self._queued.append(queued)
        self._left -= 1
        if self._left > 0:
            return False
        self._intervals += 1
        if self._intervals >= _PATIENCE:
            self._left, self._intervals = self._next(), 0
        else:
            self._left = min(LONGEST, 1.1 * self._before)
        self._queued, self._growth = [], 0
        return True

    def _next(self) -> float:
        iterations = len(self._queued)
        pressure = min(1.0, sum(self._queued) / iterations / 20.0) + min(0.5, max(self._queued) / 25.0)
        pressure += max(0.0, self._growth / iterations / 8.0)
        if pressure <= 0.8:
            interval = float(SHORTEST)
        elif pressure >= 2.0:
            interval = float(LONGEST)
        else:
            interval = 1.35 * (SHORTEST + 0.6 * (LONGEST - SHORTEST) * (pressure - 0.8) / 1.2)
        self._before = (interval + 2.0 * self._before) / 3.0
        return min(max(self._before, SHORTEST + 16.0), float(LONGEST))


class DynamicTemporalSharing(TemporalSharing):
    """Temporal sharing whose interval follows the queue, arrivals and ends."""

    def __init__(self) -> None:
        super().__init__()
        self._interval = DynamicInterval()
        self._queued = self._arrived = self._ended = 0

    def arrived(self, task: Task, now: float) -> None:
        """Count requests."""
        self._arrived += task.kind is not Kind.FINETUNE

    def left(self, task: Task, now: float) -> None:
        """Count requests that ended."""
        self._ended += task.kind is not Kind.FINETUNE

    def before(self, queues: TaskQueues, now: float) -> None:
        """Note how many requests wait."""
        self._queued = queues.count_waiting

    def _turns(self) -> bool:
        turns = self._interval.step(self._queued, self._arrived, self._ended)
        self._arrived = self._ended = 0
        return turns


TEMPORAL = Row(
    "temporal",
    "FlexLLM 8.2, temporal sharing: a mini-batch alone after a fixed number of iterations that serve",
    fill=TemporalSharing,
    options=TemporalOptions,
)
TEMPORAL_DYNAMIC = Row(
    "temporal-dynamic",
    "FlexLLM Algorithm 3: temporal sharing whose interval follows queue, arrivals and ends",
    fill=DynamicTemporalSharing,
)
