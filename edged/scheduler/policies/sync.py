"""Synchronous retraining, step by step: the middle row of MACE's Figure 1.

Kept of the figure: a step preempts the running decodes as soon as it comes and shares its iterations with nobody.
Unlike `edged.scheduler.policies.adainf`, which lets a whole queue of steps pass before it serves again, serving has an
iteration after each step, so a stream of feedback slows answers down and does not stop them.
"""

from __future__ import annotations

from edged.scheduler.planning.queues import TaskQueues
from edged.scheduler.policies.base import Policy, Row
from edged.scheduler.policies.phased import NOBODY, PhasedFill, runnable_steps, serve_only, train_only
from edged.scheduler.task import Plan, Resources


class StepsInTurn(PhasedFill):
    """A step runs alone to its end as soon as it has come; between two steps there is an iteration that serves.

    Running answers stand still with their pages during a step. One that lacks pages waits until answers have ended;
    nobody enters before it.
    """

    def plan(self, policy: Policy, queues: TaskQueues, now: float, resources: Resources) -> Plan:
        """The rest of a step, or a new one if the iteration before served, else serving."""
        tasks = runnable_steps(queues, resources)
        serving = bool(queues.decodes or queues.started or queues.waiting)
        if not tasks or (self.tuned and serving and not tasks[0].begun):
            return serve_only(policy, queues, now, resources)
        alone = train_only(tasks[:1], policy, queues, now, resources)
        return alone or serve_only(policy, queues, now, resources, NOBODY)


SYNC = Row("sync", 'MACE Figure 1, "sync": each step preempts decodes as it comes', fill=StepsInTurn)
