"""Who works in an iteration, and who enters memory for it: MACE's priorities and Algorithm 1.

Owns that choice. Must not know how long anybody works: that is the latency budget's
(`edged.scheduler.policies.mace.policy`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from edged.scheduler.cost.model import CostModel
from edged.scheduler.planning.bin_builder import BinBuilder
from edged.scheduler.planning.queues import TaskQueues
from edged.scheduler.policies.mace.packing import Bin, Item, Packing
from edged.scheduler.policies.mace.priority import Priorities
from edged.scheduler.task import Kind, Task
from edged.settings.load import SchedulerSettings


@dataclass(slots=True)
class FinetuneTurn:
    """Fine-tuning's part in one iteration: which task may run, and what it gets whatever the budget."""

    due: bool
    """It outranks serving, and is owed a share of the time that it waited."""
    task: Task | None = None
    in_the_way: bool = False
    """It holds pages without which a prompt cannot enter: the sooner it ends, the better."""
    owed_s: float = 0.0


class MaceAdmission:
    """MACE 4.1 and Algorithm 1 over all who ask for memory."""

    def __init__(self, settings: SchedulerSettings, cost: CostModel) -> None:
        self._cost = cost
        self._priorities = Priorities.derive(settings)
        self._packing = Packing(
            settings.lambda_memory, settings.lambda_latency, settings.tau_memory, settings.tau_tasks
        )

    def choose(
        self, draft: BinBuilder, queues: TaskQueues, prompts: Sequence[Task], now: float
    ) -> tuple[FinetuneTurn, list[Task]]:
        """Fine-tuning's part in the iteration, and the prompts that may run; `prompts` are the next ones due."""
        tuning = self._ranked(queues, draft, now) if queues.finetunes and not queues.throttled else []
        turn = FinetuneTurn(due=bool(tuning) and self._outranks_serving(queues, prompts, tuning[0], now))
        return turn, self._admit(draft, queues, tuning, turn, now)

    def _ranked(self, queues: TaskQueues, draft: BinBuilder, now: float) -> list[Task]:
        """Fine-tune tasks with work to do: one in the middle of a step first, since what it keeps holds memory and half
        a step serves nobody; then by priority."""
        rank = self._priorities.finetune
        able = [task for task in queues.finetunes if task.has_work and task not in draft.preempted]
        return sorted(able, key=lambda task: (not task.begun, -rank(now - task.arrival_s, task.loss)))

    def _outranks_serving(self, queues: TaskQueues, prompts: Sequence[Task], first: Task, now: float) -> bool:
        """Whether fine-tuning, by the wait of all of it and the loss of its `first`, stands at or above all serving."""
        priorities = self._priorities
        own = priorities.finetune(queues.arrears.wait_s(now), first.loss)
        if queues.decodes and own < priorities.decode(now - queues.decodes[0].task.arrival_s):
            return False
        if prompts and own < priorities.prefill(now - min([task.arrival_s for task in prompts])):
            return False
        return bool(queues.decodes or prompts)

    def _admit(
        self, draft: BinBuilder, queues: TaskQueues, tuning: list[Task], turn: FinetuneTurn, now: float
    ) -> list[Task]:
        """Algorithm 1 over all who ask for memory. Returns the prompts that may run; `turn` gets its task.

        One step at a time is begun: a second one would hold memory and delay the first.
        """
        runnable = [task for task in queues.started if task not in draft.preempted]
        first_step = tuning[0] if tuning and tuning[0].begun else None
        # Between its groups, and when its pages were taken, a step asks for pages as everybody does.
        asks = first_step is not None and not first_step.context and draft.pages(first_step, first_step.tokens) > 0
        begun = None if asks else first_step
        asking = [] if begun else [first_step] if first_step else tuning
        asking = [task for task in asking if draft.pages(task, task.tokens) <= draft.total_pages]
        waiting = queues.waiting if draft.sequences_left > 0 else []
        turn.task = begun
        if not (asking or waiting) or draft.preempted:
            return runnable
        length_s = draft.tokens_left * self._cost.token_s
        running = bool(runnable or draft.load.decodes)
        first_pages = draft.open_pages
        first = Bin(first_pages, length_s, occupied=running)
        items = self._asking(draft, asking, waiting, turn.due, now)
        bins = self._packing.best_fit(items, first, draft.total_pages, length_s, draft.total_pages)
        # What best fit put off may still run behind the others: no iteration idles in wait for a better fit.
        packed = [item for room in bins for item in room.items]
        step = next((item for item in packed if item.task.kind is Kind.FINETUNE and item.pages <= first_pages), None)
        if step is not None and (turn.due or 2 * step.pages <= first_pages or not (running or waiting)):
            turn.task = step.task
            draft.enter(turn.task)
        elif turn.due and asking and running:
            # The pages that it lacks are those that come free next: nobody enters before it.
            return runnable
        for item in packed:
            enters = item.task.kind is Kind.PREFILL and draft.sequences_left > 0
            if enters and item.pages <= draft.open_pages:
                draft.sequences_left -= 1
                draft.enter(item.task)
                runnable.append(item.task)
        if begun is not None and draft.sequences_left > 0:
            entered = set(runnable)
            head = next((task for task in waiting if task not in entered), None)
            turn.in_the_way = head is not None and draft.pages(head, head.tokens) > draft.open_pages
        return runnable

    def _asking(
        self, draft: BinBuilder, tuning: list[Task], waiting: list[Task], due: bool, now: float
    ) -> Iterator[Item]:
        """Who asks for memory, by priority.

        A prompt that waited for twice its target is not to be overtaken any more. Not before: one that is late has
        missed its target anyway, and many that are not would wait with it.
        """
        token_s, most = self._cost.token_s, draft.tokens_left
        steps = [Item(task, draft.pages(task, task.tokens), min(task.tokens, most) * token_s) for task in tuning]
        if due:
            yield from steps
        for task in waiting:
            patient = now < task.deadline_s + (task.deadline_s - task.arrival_s)
            yield Item(task, draft.pages(task, task.tokens), min(task.tokens, most) * token_s, patient)
        if not due:
            yield from steps
