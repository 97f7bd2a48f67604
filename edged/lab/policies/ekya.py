"""Periodic, blocking retraining: the baseline that MACE calls Ekya (MACE 6.1; Bhardwaj et al., NSDI 2022).

Kept of Ekya: time is divided into fixed intervals, what was collected in one is learned at the start of the next, and
the end of an interval is served with what was learned at its beginning. Kept of MACE's account of it: retraining and
serving are phases, and requests queue while the model is retrained. Left out: Ekya's retraining shares the GPU with
inference; its scheduler moves shares of the GPU between jobs, and its micro-profiler picks retraining configurations,
so as to gain the most accuracy. Here one model with exact DPO steps has neither shares nor configurations to choose
from.
"""

from edged.lab.policies.options import EkyaOptions
from edged.lab.policies.phases import PhasedFill, train_only
from edged.scheduler.cost.model import CostModel
from edged.scheduler.planning.queues import TaskQueues
from edged.scheduler.policies.base import Policy, Row
from edged.scheduler.policies.phased import runnable_steps, serve_only
from edged.scheduler.task import Plan, Resources
from edged.settings.load import SchedulerSettings


class RetrainingWindows(PhasedFill):
    """Every `retrain_every_s` a window opens if there is anything to learn. It closes when nothing is left to learn,
    pairs that came meanwhile included, or, with the step under way, after `retrain_window_s`.

    In the window steps run alone, one after another; requests queue, and running answers stand still. They keep their
    pages, but for the latest ones where a step lacks pages: waiting for their end could take the whole window. Between
    windows nothing is learned.
    """

    def configure(self, settings: SchedulerSettings, cost: CostModel) -> None:
        """Take the interval and the window."""
        super().configure(settings, cost)
        self._window_s = EkyaOptions.of(settings).retrain_window_s

    def plan(self, policy: Policy, queues: TaskQueues, now: float, resources: Resources) -> Plan:
        """Return a step alone while a window is open, else serving; with `resume_s` where a later window has work."""
        tasks = runnable_steps(queues, resources)
        start_s, every_s = self.interval_start_s(now), self.every_s
        due = self.caught_up_s < start_s and now < start_s + (self._window_s or every_s / 2.0)
        if tasks and (due or tasks[0].begun):
            plan = train_only(tasks[:1], policy, queues, now, resources, preempts=True)
            if plan is not None:
                return plan
        plan = serve_only(policy, queues, now, resources)
        if tasks:
            plan.resume_s = start_s + every_s
        return plan


EKYA = Row(
    "ekya",
    "Ekya (NSDI 2022) as MACE 6.1 describes it: at fixed intervals inference is stopped for a retraining window",
    fill=RetrainingWindows,
    options=EkyaOptions,
)
