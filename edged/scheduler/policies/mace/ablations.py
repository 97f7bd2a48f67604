"""MACE with one of its parts taken away (MACE 6.3 and Table 1).

Owns what each lacks; `MaceBin` is a policy of its own. Everything else is `edged.scheduler.policies.mace.policy`.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from edged.scheduler.cost.model import CostModel
from edged.scheduler.planning.bin_builder import BinBuilder
from edged.scheduler.planning.queues import TaskQueues, by_arrival
from edged.scheduler.policies.mace.admission import MaceAdmission
from edged.scheduler.policies.mace.packing import Item
from edged.scheduler.policies.mace.policy import Mace
from edged.scheduler.policies.phased import PhasedPolicy, runnable_steps, serve_only, train_only
from edged.scheduler.task import Plan, Resources, Task
from edged.settings.load import SchedulerSettings


class MacePrefix(Mace):
    """Without prefix sharing (4.3): each prompt is computed whole, as "MACE/Prefix"."""

    name = "mace-prefix"
    shares_prefixes = False


class MacePrune(Mace):
    """Without K/V pruning (4.3): all K/V is kept while a request decodes, as "MACE/Prune"."""

    name = "mace-prune"
    prunes = False


class _ByArrival(MaceAdmission):
    """All in the order of their arrival."""

    def _ranked(self, queues: TaskQueues, draft: BinBuilder, now: float) -> list[Task]:
        return sorted(super()._ranked(queues, draft, now), key=lambda task: (not task.begun, by_arrival(task)))

    def _outranks_serving(self, queues: TaskQueues, prompts: Sequence[Task], first: Task, now: float) -> bool:
        serving = [grant.task for grant in queues.decodes[:1]] + list(prompts)
        return bool(serving) and by_arrival(first) < min(by_arrival(task) for task in serving)

    def _asking(
        self, draft: BinBuilder, tuning: list[Task], waiting: list[Task], due: bool, now: float
    ) -> Iterator[Item]:
        own = super()._asking(draft, tuning, [], due, now)
        # Nobody is too late to be overtaken: deadlines count for nothing.
        prompts = (replace(item, patient=True) for item in super()._asking(draft, [], waiting, due, now))
        return heapq.merge(own, prompts, key=lambda item: by_arrival(item.task))


class MacePriority(Mace):
    """Without priorities (4.1; "PA" of Table 1): no base, no growth with the wait, no reward for a loss.

    Prompts and steps come in the order of their arrival; deadlines order nobody, and a step comes before serving only
    when it is older than every request. Packing, chunks and the latency budget stay, and so does what fine-tuning is
    owed when it comes first. As in MACE, work moves a step's arrival towards now.
    """

    name = "mace-priority"
    order = staticmethod(by_arrival)
    admission = _ByArrival


class MaceBin(PhasedPolicy):
    """At most `fixed_requests` sequences, or `fixed_steps` fine-tune steps, share an iteration.

    Taken away: memory-aware hybrid batching (4.2), and with it the priorities (4.1) that order its bins. Instead there
    are fixed largest batches, and one queue, first in first out, from which an iteration takes either requests or
    steps: those at the head, up to the first that needs a backward pass (the paper's Algorithm 2). Prefix sharing and
    pruning stay.

    When a step is first in the queue, it runs alone, to its end, with the steps right behind it. Between two batches of
    steps there is an iteration that serves the running answers, and prompts from before the next step. A step that
    lacks pages waits until answers have ended.
    """

    name = "mace-bin"
    prunes = True

    def __init__(self, settings: SchedulerSettings, cost: CostModel) -> None:
        super().__init__(settings, cost)
        self._requests, self._steps = settings.fixed_requests, settings.fixed_steps

    def plan(self, queues: TaskQueues, now: float, resources: Resources) -> Plan:
        """A batch of steps, when it is their turn, else a batch of requests."""
        resources = replace(resources, max_sequences=min(resources.max_sequences, self._requests))
        tasks = runnable_steps(queues, resources)
        if not tasks:
            return serve_only(queues, now, resources, self._cost)
        batch = self._batch(tasks, queues)
        plan = train_only(batch, queues, now, resources, self._cost) if batch else None
        return plan if plan is not None else serve_only(queues, now, resources, self._cost, tasks[0].arrival_s)

    def _batch(self, tasks: list[Task], queues: TaskQueues) -> list[Task]:
        """The steps whose turn it is: those under way, or those before the first waiting prompt."""
        begun = [task for task in tasks if task.begun]
        if begun:
            return begun
        oldest_s = queues.waiting[0].arrival_s if queues.waiting else math.inf
        if queues.past.tuned and (queues.decodes or queues.started):
            return []
        return [task for task in tasks[: self._steps] if task.arrival_s <= oldest_s]
