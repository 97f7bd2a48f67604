"""Ablations: MACE with one of its parts taken away (MACE 6.3 and Table 1)."""

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from edged.scheduler.planning.bin_builder import BinBuilder
from edged.scheduler.planning.queues import TaskQueues, by_arrival
from edged.scheduler.policies.base import Order, Policy, Row, Spare
from edged.scheduler.policies.mace.admission import MaceAdmission
from edged.scheduler.policies.mace.packing import Item
from edged.scheduler.policies.mace.policy import MACE, MaceSpare
from edged.scheduler.policies.phased import PhasedFill, runnable_steps, serve_only, train_only
from edged.scheduler.task import Plan, Resources, Task

MACE_PREFIX = replace(MACE, name="mace-prefix", keeps="MACE/Prefix of 6.3", shares_prefixes=False)
MACE_PRUNE = replace(MACE, name="mace-prune", keeps="MACE/Prune of 6.3", prunes=False)


class AdmissionByArrival(MaceAdmission):
    """Admission without priorities: no base, no growth with the wait, no reward for a loss.

    Deadlines order nobody, and a step comes before serving only when it is older than every request. Packing, chunks
    and the latency budget stay, and so does what fine-tuning is owed when it comes first. As in MACE, work moves a
    step's arrival towards now.
    """

    def _ranked(self, queues: TaskQueues, draft: BinBuilder, now: float) -> list[Task]:
        return sorted(super()._ranked(queues, draft, now), key=lambda task: (not task.begun, by_arrival(task)))

    def _outranks_serving(self, draft: BinBuilder, queues: TaskQueues, first: Task, spare: Spare, now: float) -> bool:
        serving = [grant.task for grant in queues.decodes[:1]] + draft.prompts
        return bool(serving) and by_arrival(first) < min(by_arrival(task) for task in serving)

    def _asking(
        self, draft: BinBuilder, tuning: list[Task], waiting: Sequence[Task], due: bool, now: float
    ) -> Iterator[Item]:
        own = super()._asking(draft, tuning, [], due, now)
        # Nobody is too late to be overtaken: deadlines count for nothing.
        prompts = (replace(item, patient=True) for item in super()._asking(draft, [], waiting, due, now))
        return heapq.merge(own, prompts, key=lambda item: by_arrival(item.task))


MACE_PRIORITY = replace(MACE, name="mace-priority", keeps='Table 1\'s "PA"', order=Order, admission=AdmissionByArrival)


class FixedBatches(PhasedFill):
    """At most `fixed_requests` sequences, or `fixed_steps` fine-tune steps, share an iteration.

    Taken away: memory-aware hybrid batching (4.2), and with it the priorities (4.1) that order its bins. Instead there
    are fixed largest batches, and one queue, first in first out, from which an iteration takes either requests or
    steps: those at the head, up to the first that needs a backward pass (the paper's Algorithm 2). Prefix sharing and
    pruning stay.

    When a step is first in the queue, it runs alone, to its end, with the steps right behind it. Between two batches of
    steps there is an iteration that serves the running answers, and prompts from before the next step. A step that
    lacks pages waits until answers have ended.
    """

    def plan(self, policy: Policy, queues: TaskQueues, now: float, resources: Resources) -> Plan:
        """Return a batch of steps, when it is their turn, else a batch of requests."""
        resources = replace(resources, max_sequences=min(resources.max_sequences, self.settings.fixed_requests))
        tasks = runnable_steps(queues, resources)
        if not tasks:
            return serve_only(policy, queues, now, resources)
        batch = self._batch(tasks, queues)
        plan = train_only(batch, policy, queues, now, resources) if batch else None
        return plan if plan is not None else serve_only(policy, queues, now, resources, tasks[0].arrival_s)

    def _batch(self, tasks: list[Task], queues: TaskQueues) -> list[Task]:
        """Return the steps whose turn it is: those under way, or those before the first waiting prompt."""
        begun = [task for task in tasks if task.begun]
        if begun:
            return begun
        oldest_s = min([task.arrival_s for task in queues.first(1)], default=math.inf)
        if self.tuned and (queues.decodes or queues.started):
            return []
        return [task for task in tasks[: self.settings.fixed_steps] if task.arrival_s <= oldest_s]


MACE_BIN = Row(
    "mace-bin",
    "MACE/Bin of 6.3: fixed largest batches, one FIFO queue, iterations that serve or learn",
    fill=FixedBatches,
    spare=MaceSpare,  # moves the arrival of a step that was worked on to the end of the queue
    prunes=True,
)
