"""Synchronous retraining, step by step: the middle row of MACE's Figure 1.

Owns the turns of fine-tuning and serving. Must not know how an iteration is filled.

Kept of the figure: a step preempts the running decodes as soon as it comes and shares its iterations with nobody.
Unlike `edged.scheduler.policies.adainf`, which lets a whole queue of steps pass before it serves again, serving has an
iteration after each step, so a stream of feedback slows answers down and does not stop them.
"""

from __future__ import annotations

from edged.scheduler.planning.queues import TaskQueues
from edged.scheduler.policies.phased import NOBODY, PhasedPolicy, runnable_steps, serve_only, train_only
from edged.scheduler.task import Plan, Resources


class Sync(PhasedPolicy):
    """A step runs alone to its end as soon as it has come; between two steps there is an iteration that serves.

    Running answers stand still with their pages during a step. One that lacks pages waits until answers have ended;
    nobody enters before it.
    """

    name = "sync"

    def plan(self, queues: TaskQueues, now: float, resources: Resources) -> Plan:
        """The rest of a step, or a new one if the iteration before served, else serving."""
        tasks = runnable_steps(queues, resources)
        serving = bool(queues.decodes or queues.started or queues.waiting)
        if not tasks or (queues.past.tuned and serving and not tasks[0].begun):
            return serve_only(queues, now, resources, self._cost)
        plan = train_only(tasks[:1], queues, now, resources, self._cost)
        return plan if plan is not None else serve_only(queues, now, resources, self._cost, NOBODY)
