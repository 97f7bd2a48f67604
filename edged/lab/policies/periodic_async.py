"""Periodic retraining in the gaps of serving: the upper row of MACE's Figure 1.

Kept of the figure: updates are deferred to fixed intervals, and inference has priority even then, so that requests
meanwhile are answered by an outdated model. The figure says nothing of requests that arrive during a step: here they
interrupt it, and it goes on in the next gap.
"""

from edged.lab.policies.options import GapOptions
from edged.lab.policies.phases import PhasedFill, train_only
from edged.scheduler.cost.model import CostModel
from edged.scheduler.planning.queues import TaskQueues
from edged.scheduler.policies.base import Policy, Row
from edged.scheduler.policies.phased import runnable_steps, serve_only
from edged.scheduler.task import Plan, Resources
from edged.settings.load import SchedulerSettings


class RetrainingGaps(PhasedFill):
    """Every `retrain_every_s` what there is to learn becomes due; it runs in iterations without requests.

    It stays due, pairs that come meanwhile included, until nothing is left to learn. Under steady load it waits.
    """

    def configure(self, settings: SchedulerSettings, cost: CostModel) -> None:
        """Take the interval and the quantum."""
        super().configure(settings, cost)
        self._quantum_s = GapOptions.of(settings).idle_quantum_ms / 1000.0

    def plan(self, policy: Policy, queues: TaskQueues, now: float, resources: Resources) -> Plan:
        """Return serving, or without requests a quantum of what is due; with `resume_s` when something will be."""
        plan = serve_only(policy, queues, now, resources)
        tasks = runnable_steps(queues, resources)
        if plan.grants or plan.preempt or not tasks:
            return plan
        start_s = self.interval_start_s(now)
        if self.caught_up_s < start_s:
            return train_only(tasks[:1], policy, queues, now, resources, self._quantum_s) or plan
        plan.resume_s = start_s + self.every_s
        return plan


PERIODIC_ASYNC = Row(
    "periodic-async",
    'MACE Figure 1, "periodic": updates deferred to fixed intervals, inference first',
    fill=RetrainingGaps,
    options=GapOptions,
)
