"""Continuous retraining: the baseline that MACE calls AdaInf (MACE 6.1; Shubha and Shen, SIGCOMM 2023).

Kept of AdaInf: retraining is incremental, on the samples that just came, before the inference that comes after them.
Kept of MACE's account of it: retraining has the highest priority in a queue, first in first out, runs to completion,
and interference with inference is not handled. Left out: AdaInf divides the GPU between applications by their SLOs,
an application's time between retraining and inference so that its SLO is met, and what is for retraining among models
by how much drift harms them; it uses early exits and saves transfers between CPU and GPU. Here is one model that has
no early exit, and never leaves the device.
"""

from edged.lab.policies.phases import NOBODY, PhasedFill, train_only
from edged.scheduler.planning.queues import TaskQueues
from edged.scheduler.policies.base import Policy, Row
from edged.scheduler.policies.phased import runnable_steps, serve_only
from edged.scheduler.task import Plan, Resources


class StepsFirst(PhasedFill):
    """While there is anything to learn, steps run alone, in the order in which they came, each to its end.

    Only then are requests served; running answers stand still with their pages meanwhile. A step that lacks pages
    waits until answers have ended; nobody enters before it.
    """

    in_turn = False
    """Whether an iteration serves between two steps."""

    def plan(self, policy: Policy, queues: TaskQueues, now: float, resources: Resources) -> Plan:
        """Return the first step alone; serving when there is none, or in its turn."""
        tasks = runnable_steps(queues, resources)
        serves = self.in_turn and self.tuned and bool(queues.decodes or queues.started or queues.flows)
        if not tasks or (serves and not tasks[0].begun):
            return serve_only(policy, queues, now, resources)
        alone = train_only(tasks[:1], policy, queues, now, resources)
        return alone or serve_only(policy, queues, now, resources, NOBODY)


ADAINF = Row(
    "adainf",
    "AdaInf (SIGCOMM 2023) as MACE 6.1 describes it: retraining first, first in first out, to completion",
    fill=StepsFirst,
)
