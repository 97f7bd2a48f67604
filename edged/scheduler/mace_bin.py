"""MACE without its bins: the ablation "MACE/Bin" of MACE 6.3.

Owns the turns of batches. Must not know how an iteration is filled.

Taken away: memory-aware hybrid batching (4.2), and with it the priorities (4.1) that order its bins. Instead there are
fixed largest batches, and one queue, first in first out, from which an iteration takes either requests or steps: those
at the head, up to the first that needs a backward pass (the paper's Algorithm 2). Prefix sharing and pruning stay.
"""

from __future__ import annotations

import math
from dataclasses import replace

from edged.config import SchedulerSettings
from edged.scheduler.cost import CostModel
from edged.scheduler.phases import Phased, serve, steps, tune
from edged.scheduler.queues import Queues
from edged.scheduler.task import Plan, Resources, Task


class MaceBin(Phased):
    """At most `fixed_requests` sequences, or `fixed_steps` fine-tune steps, share an iteration.

    When a step is first in the queue, it runs alone, to its end, with the steps right behind it. Between two batches of
    steps there is an iteration that serves the running answers, and prompts from before the next step. A step that
    lacks pages waits until answers have ended.
    """

    name = "mace-bin"
    prunes = True

    def __init__(self, settings: SchedulerSettings, cost: CostModel) -> None:
        super().__init__(settings, cost)
        self._requests, self._steps = settings.fixed_requests, settings.fixed_steps

    def plan(self, queues: Queues, now: float, resources: Resources) -> Plan:
        """A batch of steps, when it is their turn, else a batch of requests."""
        resources = replace(resources, max_sequences=min(resources.max_sequences, self._requests))
        tasks = steps(queues, resources)
        if not tasks:
            return serve(queues, now, resources, self._cost)
        batch = self._batch(tasks, queues)
        plan = tune(batch, queues, now, resources, self._cost) if batch else None
        return plan if plan is not None else serve(queues, now, resources, self._cost, tasks[0].arrival_s)

    def _batch(self, tasks: list[Task], queues: Queues) -> list[Task]:
        """The steps whose turn it is: those under way, or those before the first waiting prompt."""
        begun = [task for task in tasks if task.begun]
        if begun:
            return begun
        oldest_s = queues.waiting[0].arrival_s if queues.waiting else math.inf
        if queues.past.tuned and (queues.decodes or queues.started):
            return []
        return [task for task in tasks[: self._steps] if task.arrival_s <= oldest_s]
