"""MACE's admission: the tasks of an iteration and those that enter memory for it, by priority and Algorithm 1."""

from collections.abc import Iterable, Iterator
from itertools import chain

from edged.scheduler.cost.model import CostModel
from edged.scheduler.planning.bin_builder import BinBuilder
from edged.scheduler.planning.queues import TaskQueues
from edged.scheduler.policies.base import Admission, Entry, FinetuneShare
from edged.scheduler.policies.hybrid import LOOK_AHEAD
from edged.scheduler.policies.mace.packing import Bin, Item, best_fit, in_order
from edged.scheduler.policies.mace.priority import Priorities
from edged.scheduler.policies.options import PackingOptions
from edged.scheduler.task import FINETUNE, FinetuneTask, ServingTask, Task
from edged.settings.load import SchedulerSettings


class MaceAdmission(Admission):
    """Admission by MACE 4.1 and Algorithm 1 over all tasks that ask for memory.

    Beside serving no step begins unless it leaves as many pages as it takes, or is due.
    """

    patience = 2.0
    """Multiple of its target that a prompt may have waited before it is not to be overtaken any more."""
    bins = True
    """Whether tasks enter by best fit into bins, not in the order of their priorities until one finds no room."""

    def configure(self, settings: SchedulerSettings, cost: CostModel) -> None:
        """Derive the priorities and take the constants of packing."""
        super().configure(settings, cost)
        self._priorities = Priorities(settings)
        self._packing = PackingOptions.of(settings)

    def choose(self, builder: BinBuilder, queues: TaskQueues, finetune_share: FinetuneShare, now: float) -> Entry:
        """Choose the prompts that may run, and the step by the wait that `finetune_share` knows."""
        tuning = self._ranked(queues, builder, now) if queues.finetunes and not queues.throttled else []
        entry = Entry(builder.started.copy())
        entry.due = (
            bool(tuning)
            and not tuning[0].bulk
            and self._outranks_serving(builder, queues, tuning[0], finetune_share, now)
        )
        self._admit(builder, queues, tuning, entry, now)
        return entry

    def _ranked(self, queues: TaskQueues, builder: BinBuilder, now: float) -> list[FinetuneTask]:
        """Return fine-tune tasks with work to do, by priority: only those in the middle of a step where there are any,
        for they hold memory, of no use before the end; those of jobs and passes where there are no others."""
        rank, gone, tasks = self._priorities.finetune, builder.preempted, queues.finetunes
        # `has_work` and `begun`, of which calls for each would take longer than the rest.
        able = [task for task in tasks if (task.num_tokens or task.next_unit < len(task.units)) and task not in gone]
        able = [task for task in able if not task.bulk] or able
        able = [task for task in able if task.underway or task.context or task.next_unit] or able
        return able if len(able) < 2 else sorted(able, key=lambda task: -rank(now - task.arrival_s, task.loss))

    def _outranks_serving(
        self, builder: BinBuilder, queues: TaskQueues, first: FinetuneTask, finetune_share: FinetuneShare, now: float
    ) -> bool:
        """Whether fine-tuning, by the wait of all of it and the loss of its `first`, stands at or above all serving."""
        priorities = self._priorities
        own = priorities.finetune(finetune_share.waited_s(now), first.loss)
        if queues.decodes and own < priorities.decode(now - queues.decodes[0].task.arrival_s):
            return False
        prompts = builder.prompts or queues.first(LOOK_AHEAD)
        if prompts and own < priorities.prefill(now - min([task.arrival_s for task in prompts])):
            return False
        return bool(queues.decodes or prompts)

    def _admit(
        self, builder: BinBuilder, queues: TaskQueues, tuning: list[FinetuneTask], entry: Entry, now: float
    ) -> None:
        """Run Algorithm 1 over all tasks that ask for memory: `entry` gets the prompts that enter, and its step.

        One step at a time is begun: a second one would hold memory and delay the first.
        """
        runnable = entry.runnable
        first_step = tuning[0] if tuning and tuning[0].begun else None
        # Between its groups, and when its pages were taken, a step asks for pages like any other task.
        asks = (
            first_step is not None and not first_step.context and builder.pages(first_step, first_step.num_tokens) > 0
        )
        begun = None if asks else first_step
        asking = [] if begun else [first_step] if first_step else tuning
        tau_tasks, waiting = self._packing.tau_tasks, builder.sequences_left > 0 and bool(builder.waiting)
        entry.step = begun
        if not (asking or waiting) or builder.preempted:
            return
        length_s = builder.tokens_left * self.cost.token_s
        running = bool(runnable or builder.load.decodes)
        first_pages = builder.open_pages
        first = Bin(first_pages, length_s, running, promised_pages=builder.promised_pages)
        upcoming = builder.upcoming(tau_tasks) if waiting else ()
        items = self._asking(builder, asking, upcoming, entry.due, now)
        strict = queues.order.strict
        if strict or not self.bins:
            packed = in_order(self._packing, items, first)
        else:
            bins = best_fit(self._packing, items, first, builder.total_pages, length_s)
            # What best fit put off may still run behind the others: no iteration idles in wait for a better fit.
            packed = [item for room in bins for item in room.items]
        steps = ((item.task, item.pages) for item in packed if item.task.kind is FINETUNE and item.pages <= first_pages)
        step, pages = next(steps, (None, 0))
        if step is not None and (entry.due or 2 * pages <= first_pages or not (running or waiting)):
            entry.step = step
            builder.enter(step)
        elif (
            entry.due
            and running
            and any(builder.pages(task, task.num_tokens) <= builder.total_pages for task in asking)
        ):
            # The pages that it lacks are those that come free next: nobody enters before it.
            return
        for item in packed:
            if item.task.kind is FINETUNE:
                continue
            if builder.sequences_left > 0 and item.pages <= builder.open_pages:
                builder.sequences_left -= 1
                builder.promised_pages += item.pages
                runnable.append(item.task)
            elif strict:
                break
        if begun is not None and builder.sequences_left > 0:
            entered = set(runnable[len(builder.started) :])
            upcoming = builder.upcoming(tau_tasks + 1) if waiting else ()
            head = next((task for task in upcoming if task not in entered), None)
            entry.in_the_way = head is not None and builder.pages(head, head.num_tokens) > builder.open_pages

    def _asking(
        self, builder: BinBuilder, tuning: list[FinetuneTask], waiting: Iterable[ServingTask], due: bool, now: float
    ) -> Iterator[Item]:
        """Yield the tasks that ask for memory, by priority.

        A prompt that waited for twice its target is not to be overtaken any more. Not before: one that is late has
        missed its target anyway, and many that are in time would wait with it. A step has no deadline.
        """
        token_s, most, size, patience = self.cost.token_s, builder.tokens_left, builder.page_size, self.patience
        tasks: Iterable[Task] = chain(tuning, waiting) if due else chain(waiting, tuning)
        for task in tasks:
            asks = task.pages_for(task.num_tokens, size)
            # A step that would never fit asks for nothing.
            if asks <= builder.total_pages or task.kind is not FINETUNE:
                patient = task.kind is FINETUNE or now < task.arrival_s + patience * (task.deadline_s - task.arrival_s)
                yield Item(task, asks, min(task.num_tokens, most) * token_s, patient)
