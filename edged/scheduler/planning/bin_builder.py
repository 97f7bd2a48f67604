"""The builder of a plan: what every policy may do to it, within the iteration's resources."""

import math
from bisect import insort
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from itertools import chain

from edged.scheduler.cost.model import CostModel
from edged.scheduler.cost.prices import Load
from edged.scheduler.planning.queues import TaskQueues, by_arrival
from edged.scheduler.task import FINETUNE, FinetuneTask, Grant, Plan, Resources, ServingTask, Task

VictimOrder = Callable[[list[ServingTask]], list[ServingTask]]


class BinBuilder:
    """The bin of the coming iteration while it is being filled; it starts with every decode.

    Of the `free_pages` that can still be granted, `promised_pages` are for the rest of the prompts and pair forwards
    that entered before. Nobody enters on promised pages, so those who entered cannot starve each other.
    """

    def __init__(
        self, queues: TaskQueues, now: float, resources: Resources, victims: VictimOrder, serves: bool = True
    ) -> None:
        """Grant the decodes their tokens, where it `serves`; preempt in the order of `victims` if one lacks a page."""
        self._queues, self._victim_order = queues, victims
        self.page_size = resources.page_size
        self.free_pages = resources.free_pages
        self.total_pages = resources.total_pages
        self.tokens_left = resources.max_tokens
        self.max_sequences = resources.max_sequences
        self.sequences_left = resources.max_sequences - len(queues.decodes) - len(queues.started)
        self.preempted: set[Task] = set()
        self.load = Load()
        self.candidates = 0
        """Decodes of the bin that are candidates: whoever asks for their places gets them."""
        self._adapters: set[int] = {0}
        self.plan = Plan()
        self.decodes: list[Grant[ServingTask]] = []
        """Grants of the decodes, with which those of `plan` begin."""
        self.slack_s = math.inf
        """Time until the first decode's next token is due."""
        self.prompts: list[ServingTask] = []
        """Prompts under way and the next waiting ones, in the order of the policy."""
        self.heeded: list[ServingTask] = []
        """Those of `prompts` whose deadlines count."""
        self.waiting: list[ServingTask] = []
        """The next waiting prompts in the order of the policy: see `upcoming`."""
        if serves:
            self._add_decodes(now)
        gone, started, size, promised = self.preempted, queues.started, self.page_size, 0
        self.started = [task for task in started if task not in gone] if gone else started
        """Prompts under way that keep their pages."""
        for task in (*self.started, *queues.finetunes):
            # As `Task.pages_for`, of which a call for each would take longer than the rest.
            if task.context and task.num_tokens and (missing := task.context + task.num_tokens - task.capacity) > 0:
                promised += 0 if task in gone else -(-missing // size)
        self.promised_pages = promised

    def upcoming(self, most: int) -> Iterator[ServingTask]:
        """Yield the next waiting prompts in the order of the policy, about as many as an admission looks at."""
        queues, known = self._queues, len(self.waiting)
        yield from self.waiting
        # Where nobody overtakes, those beyond are looked for only if all before them have entered.
        if queues.order.strict and known < queues.count_waiting:
            yield from queues.first(most)[known:]

    def pages(self, task: Task, num_tokens: int) -> int:
        """Return the pages that `task` must get to compute `num_tokens` more."""
        return task.pages_for(num_tokens, self.page_size)

    def max_pages(self, tasks: Collection[Task]) -> int:
        """Return a bound on the pages that all tokens of `tasks` ask for, if they hold room for what they computed."""
        return sum([task.num_tokens for task in tasks]) // self.page_size + len(tasks)

    @property
    def open_pages(self) -> int:
        """Pages on which a task may enter: neither promised, nor soon needed by the decodes, one each.

        0 in an iteration that preempts: a task that was just preempted would enter again at once.
        """
        return 0 if self.preempted else self.free_pages - self.promised_pages - self.load.decodes

    def enter(self, task: Task) -> None:
        """Promise `task` the pages for all its tokens."""
        self.promised_pages += self.pages(task, task.num_tokens)

    def room(self, task: Task) -> int:
        """Return the tokens that `task`, which has entered, could compute in this iteration."""
        return min(task.num_tokens, self.tokens_left, task.capacity - task.context + self.free_pages * self.page_size)

    def load_beside(self, task: Task) -> Load:
        """Return the bin's load with `task` beside it, before any token of it: its adapter may be one more."""
        load = self.load
        if task.adapter in self._adapters:
            return load
        return Load(
            load.prefill_tokens, load.decodes, load.finetune_tokens, load.context, load.pairs, load.adapters + 1
        )

    def take(self, task: Task, num_tokens: int) -> None:
        """Count `num_tokens` of `task`, which has entered, into the bin."""
        pages = task.pages_for(num_tokens, self.page_size)
        self.free_pages -= pages
        self.promised_pages -= pages
        self.plan.pages += pages
        self.tokens_left -= num_tokens
        self.load.add_chunk(num_tokens, task.context, task.kind is FINETUNE)
        if task.adapter not in self._adapters:
            self._adapters.add(task.adapter)
            self.load.adapters += 1

    def grant(self, task: Task, num_tokens: int) -> None:
        """Let a task, which has entered, compute `num_tokens` of its prompt or its pairs."""
        self.take(task, num_tokens)
        self.plan.grants.append(Grant(task, num_tokens))

    def pause(self, tasks: Collection[ServingTask], now: float) -> None:
        """Have decodes stand still in this iteration, before prompts get chunks: they keep their pages."""
        self._grant_decodes([grant for grant in self.decodes if grant.task not in tasks], now)

    def preempt(self, tasks: Collection[ServingTask], now: float) -> None:
        """Take the pages of decodes, before prompts get chunks: others may enter on them in this iteration."""
        if tasks:
            self.plan.preempt += tasks
            self.preempted.update(tasks)
            self.free_pages += sum([task.held_pages for task in tasks])
            self.sequences_left += len(tasks)
            self.pause(tasks, now)

    def make_room(self, task: Task) -> None:
        """Preempt until all of `task`'s tokens find pages: other steps first, then the latest arrivals."""
        self._preempt(self.pages(task, task.num_tokens), self._victims(task, self._holders()))

    def rescue(self) -> None:
        """Preempt, when nothing could be granted, for the oldest task that waits for pages, and grant it.

        Without this, tasks that each hold a part of the pages could wait for each other for ever.
        """
        queues = self._queues
        if self.plan.grants or self.preempted:
            return
        # Where nobody overtakes, the next prompt is the first that waits.
        waiting = queues.first(1) if queues.order.strict else queues.any_order
        stuck: Task | None = min((*queues.started, *waiting), key=by_arrival, default=None)
        if stuck is None and not queues.throttled:
            stuck = next((task for task in queues.finetunes if task.context and task.num_tokens), None)
        if stuck is None or self.pages(stuck, stuck.num_tokens) > self.total_pages:
            return
        self.make_room(stuck)
        num_tokens = self.room(stuck)
        if num_tokens > 0:
            self.grant(stuck, num_tokens)

    def _add_decodes(self, now: float) -> None:
        """Grant the decodes that pages and tokens suffice for, those that are due first before the others."""
        decodes, started, reserved = self._queues.decodes, self._queues.started, 0
        if started and len(decodes) >= self.free_pages:
            oldest = min(started, key=by_arrival)
            if not (decodes and by_arrival(decodes[0].task) < by_arrival(oldest)):
                # A prefill is older than every other sequence in memory: its next page comes before the others'.
                reserved = min(1, self.pages(oldest, oldest.num_tokens))
        if reserved + len(decodes) > self.free_pages:
            growing = {task for grant in decodes if (task := grant.task).context >= task.capacity}
            need = reserved + sum([self.pages(task, 1) for task in growing])
            if need > self.free_pages:
                # The oldest sequence keeps its pages whatever happens, so it ends, and then the next one is the oldest.
                holders = self._holders()
                kept = holders[0] if holders else None
                self._preempt(need, self._victims(kept, holders), growing)
                decodes = [grant for grant in decodes if grant.task not in self.preempted]
        self._grant_decodes(decodes, now)
        if len(decodes) > (most := self.tokens_left + len(self.plan.grants)):
            self._grant_decodes(sorted(decodes, key=lambda grant: grant.task.deadline_s)[:most], now)

    def _grant_decodes(self, chosen: list[Grant[ServingTask]], now: float) -> None:
        """Grant the `chosen` decodes that find a page, instead of those granted before."""
        plan, load = self.plan, self.load
        all_pages = free_pages = self.free_pages + plan.pages
        lacking: set[ServingTask] = set()
        adapters, context, earliest_s = {0}, 0, math.inf
        self.candidates = 0
        for grant in chosen:
            task = grant.task
            held = task.context
            if held >= task.capacity:
                pages = self.pages(task, 1)
                if pages > free_pages:
                    lacking.add(task)
                    continue
                free_pages -= pages
            context += held - task.pruned
            self.candidates += task.candidate
            if task.adapter not in adapters:
                adapters.add(task.adapter)
            if task.deadline_s < earliest_s:
                earliest_s = task.deadline_s
        self.decodes = grants = [grant for grant in chosen if grant.task not in lacking] if lacking else chosen
        self.tokens_left += len(plan.grants) - len(grants)
        plan.grants, plan.pages, self.free_pages = [*grants], all_pages - free_pages, free_pages
        self.slack_s = earliest_s - now
        load.decodes, load.context, load.adapters = len(grants), context, len(adapters) - 1
        self._adapters = adapters

    def _victims(self, spared: Task | None, holders: list[ServingTask]) -> Iterator[Task]:
        """Yield the tasks that hold pages in the order of preemption: candidates, fine-tuning, the other `holders`."""
        yield from (task for task in reversed(holders) if task.candidate and task is not spared)
        holders = [task for task in holders if not task.candidate]
        steps = [task for task in self._queues.finetunes if task.held_pages and task is not spared]
        yield from sorted(steps, key=lambda task: (task.next_unit - len(task.units), task.context))
        yield from (task for task in self._victim_order(holders) if task is not spared)

    def _holders(self) -> list[ServingTask]:
        """Return the sequences that hold pages, in the order of their arrival."""
        queues = self._queues
        holders = [task for grant in queues.decodes if (task := grant.task).held_pages]
        for task in chain(queues.started, queues.any_order):
            if task.held_pages:
                insort(holders, task, key=by_arrival)
        return holders

    def _preempt(self, need: int, victims: Iterable[Task], growing: Collection[Task] = ()) -> None:
        """Preempt until `need` pages are free; those for the next tokens of `growing` are part of it, and fall away
        with a victim."""
        for victim in victims:
            if need <= self.free_pages:
                break
            self.plan.preempt.append(victim)
            self.preempted.add(victim)
            self.free_pages += victim.held_pages
            if victim in growing:
                need -= self.pages(victim, 1)


def grant_finetune(
    builder: BinBuilder,
    task: FinetuneTask,
    cost: CostModel,
    limit_s: float,
    at_least: int,
    max_units: float = math.inf,
    cuts: bool = False,
) -> None:
    """Grant forward tokens, then units, while the bin is predicted to take no longer than `limit_s`.

    With `at_least` the task gets as many tokens, as far as it has them and there is room, or one unit in any case.
    Where it `cuts`, the first unit that does not fit gets the rows that do (FlexLLM Algorithm 2, line 15).
    """
    plan = builder.plan
    ahead = _grant_ahead(builder, task, cost, limit_s) if task.ahead and not task.num_tokens else 0
    num_tokens = units = window = 0
    most = builder.room(task)
    if most > 0:
        left_s = limit_s - plan.predicted_units_s
        num_tokens = cost.chunk(builder.load_beside(task), task.context, most, left_s, finetune=True)
        num_tokens = max(num_tokens, min(most, at_least))
        if num_tokens > 0:
            builder.take(task, num_tokens)
    if num_tokens == task.num_tokens:
        left_s, priced, unit_s = limit_s - cost.forward_s(builder.load), None, 0.0
        for unit in task.units[task.next_unit :]:
            # A model's layers are alike.
            if unit is not priced and unit != priced:
                priced, unit_s = unit, cost.unit_s(unit)
            if units >= max_units:
                break
            if plan.predicted_units_s + unit_s > left_s:
                least = not (units or num_tokens)
                window = cost.rows(unit, left_s - plan.predicted_units_s, least) if cuts else 0
                if not window and (units or num_tokens or not at_least):
                    break
                unit_s = cost.unit_s(replace(unit, num_tokens=window or unit.num_tokens))
            plan.predicted_units_s += unit_s
            units += 1
            if window:
                break
    if num_tokens or units or ahead:
        plan.grants.append(Grant(task, num_tokens or ahead, units, window))


def _grant_ahead(builder: BinBuilder, task: FinetuneTask, cost: CostModel, limit_s: float) -> int:
    """Take tokens of the next group's forward into what the bin reads the weights for anyway; returns how many.

    None while its pages are not open: they are promised to nobody, so that nobody waits for them.
    """
    most = min(task.ahead, builder.tokens_left, cost.free_tokens(builder.load))
    if most <= 0 or builder.pages(task, task.ahead) > builder.open_pages:
        return 0
    num_tokens = cost.chunk(builder.load_beside(task), task.context, most, limit_s, finetune=True)
    builder.promised_pages += builder.pages(task, num_tokens)
    builder.take(task, num_tokens)
    return num_tokens
