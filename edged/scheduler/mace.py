"""The MACE policy: serving and fine-tuning share each iteration, by priority, memory and latency budget.

Owns the decision. Who enters memory is Algorithm 1's choice (`edged.scheduler.packing`) in the order of MACE's
priorities; how long each works is the latency budget's (MACE 4.2, FlexLLM 6.2). Must not know how tasks are executed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from edged.config import SchedulerSettings
from edged.scheduler import pacing
from edged.scheduler.cost import CostModel
from edged.scheduler.draft import Draft
from edged.scheduler.packing import Bin, Item, Packing
from edged.scheduler.priority import Priorities
from edged.scheduler.queues import Queues, by_deadline
from edged.scheduler.task import Grant, Kind, Plan, Resources, Task

SMALLEST_CHUNK = 32
"""Tokens that prompts together, or an overdue pair's forward, get at least: whatever the budget, they go on."""
LOOK_AHEAD = 32
"""Waiting prompts, the next ones due, whose deadlines an iteration heeds."""


@dataclass(slots=True)
class _Turn:
    """Fine-tuning's part in one iteration: which task may run, and what it gets whatever the budget."""

    due: bool
    """It outranks serving, and is owed a share of the time that it waited."""
    task: Task | None = None
    in_the_way: bool = False
    """It holds pages without which a prompt cannot enter: the sooner it ends, the better."""
    owed_s: float = 0.0


class Mace:
    """MACE 4.1 and 4.2 with a latency budget.

    Every decode runs in every iteration. Prompts come in the order of their deadlines, in chunks that keep the decodes
    on time, or longer ones where a prompt would be late otherwise. Fine-tuning gets what is left of the budget; when
    it has waited so long that it outranks serving, it comes first, with `finetune_min_share` of the time it waited.
    A step keeps memory from its first token to its last unit. So beside serving none begins of itself unless it leaves
    as many pages as it takes, and one that keeps prompts out gets the quantum in every iteration until it ends, which
    the waits after it pay for.
    """

    name = "mace"
    trains = True
    shares_prefixes = True
    prunes = True
    order = staticmethod(by_deadline)

    def __init__(self, settings: SchedulerSettings, cost: CostModel) -> None:
        self._cost = cost
        self._priorities = Priorities.derive(settings)
        self._packing = Packing(
            settings.lambda_memory, settings.lambda_latency, settings.tau_memory, settings.tau_tasks
        )
        self._quantum_s = settings.idle_quantum_ms / 1000.0

    def plan(self, queues: Queues, now: float, resources: Resources) -> Plan:
        """The next bin within `resources`; empty only if no task can run."""
        draft = Draft(queues, now, resources)
        plan = draft.plan
        prompts = queues.started + queues.waiting[:LOOK_AHEAD]
        if queues.started:
            prompts.sort(key=self.order)
        tuning = self._ranked(queues, draft, now) if queues.finetunes and not queues.throttled else []
        wait_s = queues.arrears.wait_s(now)
        turn = _Turn(due=bool(tuning) and self._outranks_serving(queues, prompts, tuning[0], wait_s, now))
        runnable = self._admit(draft, queues, tuning, turn, now)
        if turn.task is not None and (turn.due or turn.in_the_way):
            turn.owed_s = self._owed_s(draft, runnable, turn, wait_s, queues.arrears.share)
            plan.prepaid = turn.in_the_way
        self._add_chunks(draft, prompts, runnable, turn, now)
        plan.budget_s = self._budget_s(draft, queues, prompts, resources, now)
        if turn.task is not None:
            self._tune(draft, turn.task, turn)
        if not plan.grants:
            draft.rescue()
        plan.predicted_forward_s = self._cost.forward_s(draft.load)
        return plan

    # -- who

    def _ranked(self, queues: Queues, draft: Draft, now: float) -> list[Task]:
        """Fine-tune tasks with work to do: one in the middle of a step first, since what it keeps holds memory and half
        a step serves nobody; then by priority."""
        rank = self._priorities.finetune
        able = [
            task
            for task in queues.finetunes
            if (task.tokens or task.next_unit < len(task.units)) and task not in draft.preempted
        ]
        return sorted(able, key=lambda task: (not task.begun, -rank(now - task.arrival_s, task.loss)))

    def _outranks_serving(
        self, queues: Queues, prompts: Sequence[Task], first: Task, wait_s: float, now: float
    ) -> bool:
        """Whether fine-tuning, all of which waited for `wait_s`, stands at or above every serving task."""
        priorities = self._priorities
        own = priorities.finetune(wait_s, first.loss)
        if queues.decodes and own < priorities.decode(now - queues.decodes[0].task.arrival_s):
            return False
        if prompts and own < priorities.prefill(now - min([task.arrival_s for task in prompts])):
            return False
        return bool(queues.decodes or prompts)

    def _admit(self, draft: Draft, queues: Queues, tuning: list[Task], turn: _Turn, now: float) -> list[Task]:
        """Algorithm 1 over all who ask for memory. Returns the prompts that may run; `turn` gets its task.

        One step at a time is begun: a second one would hold memory and delay the first.
        """
        runnable = [task for task in queues.started if task not in draft.preempted]
        begun = tuning[0] if tuning and tuning[0].begun else None
        asking = [] if begun else [task for task in tuning if draft.pages(task, task.tokens) <= draft.total_pages]
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

    def _asking(self, draft: Draft, tuning: list[Task], waiting: list[Task], due: bool, now: float) -> Iterator[Item]:
        """Who asks for memory, by priority; a prompt that is late already is not to be overtaken."""
        token_s, most = self._cost.token_s, draft.tokens_left
        steps = [Item(task, draft.pages(task, task.tokens), min(task.tokens, most) * token_s) for task in tuning]
        if due:
            yield from steps
        for task in waiting:
            yield Item(task, draft.pages(task, task.tokens), min(task.tokens, most) * token_s, task.deadline_s > now)
        if not due:
            yield from steps

    # -- for how long

    def _owed_s(self, draft: Draft, runnable: list[Task], turn: _Turn, wait_s: float, share: float) -> float:
        """Seconds of work that fine-tuning gets now, whatever the budget.

        Its share of the time it waited: at most the quantum, or twice the share of this iteration's own length where
        that is more, so that what is owed can shrink. The quantum, when it is in the way.
        """
        if turn.in_the_way:
            return self._quantum_s
        tokens = min(draft.tokens_left, sum(task.tokens for task in runnable))
        serving_s = self._cost.forward_s(draft.load) + tokens * self._cost.token_s
        most_s = 2.0 * serving_s * share / (1.0 - share) if share < 1.0 else math.inf
        return min(share * wait_s, max(self._quantum_s, most_s))

    def _add_chunks(self, draft: Draft, prompts: list[Task], runnable: list[Task], turn: _Turn, now: float) -> None:
        """Chunks of the runnable prompts: as much as keeps the decodes on time, or keeps all `prompts` on time.

        Fine-tuning that is due is left the tokens that it is owed.
        """
        cost, load = self._cost, draft.load
        base_s = cost.forward_s(load)
        kept = 0
        if turn.owed_s and turn.task is not None and turn.task.tokens:
            most = draft.room(turn.task)
            kept = cost.chunk(load, turn.task.context, most, base_s + turn.owed_s, finetune=True)
            kept = max(kept, min(most, SMALLEST_CHUNK))
        draft.tokens_left -= kept
        limit_s = draft.slack_s * (1.0 - cost.headroom) - turn.owed_s
        needed = draft.tokens_left
        if load.decodes:
            needed = max(SMALLEST_CHUNK, pacing.needed_tokens(prompts, now, base_s, cost.token_s, needed))
        for task in sorted(runnable, key=self.order):
            most = draft.room(task)
            if most <= 0:
                continue
            wanted = min(most, needed - load.prefill_tokens)
            tokens = most if wanted >= most else max(wanted, cost.chunk(load, task.context, most, limit_s, False))
            if tokens > 0:
                draft.grant(task, tokens)
        draft.tokens_left += kept

    def _budget_s(self, draft: Draft, queues: Queues, prompts: list[Task], resources: Resources, now: float) -> float:
        """The iteration's latency budget: the least slack of its members and of the prompts behind them.

        Fine-tuning takes of it what serving allows (`tbt_slowdown`), and the share that slots and pages are free. Where
        serving is dense, a longer iteration keeps more sequences in memory until those that arrive find none; so
        training thins out before.
        """
        if not (draft.load.decodes or draft.load.prefill_tokens):
            return self._quantum_s
        granted = {grant.task: grant.tokens for grant in draft.plan.grants[draft.load.decodes :]}
        slack_s = min(draft.slack_s, pacing.slack_s(prompts, granted, now, self._cost.token_s))
        forward_s = self._cost.forward_s(draft.load)
        spare_s = min(
            slack_s * (1.0 - self._cost.headroom) - forward_s, self._quantum_s, max(0.0, queues.allowance.left_s)
        )
        free = min(draft.sequences_left / resources.max_sequences, draft.open_pages / resources.total_pages)
        return max(0.0, forward_s + spare_s * max(0.0, free))

    def _tune(self, draft: Draft, task: Task, turn: _Turn) -> None:
        """Forward tokens, then units, while the bin is predicted to keep its budget, or gives what is owed.

        A chunk or one unit is granted in any case to fine-tuning that is due, in the way, or alone.
        """
        cost, plan = self._cost, draft.plan
        served = draft.load.decodes or draft.load.prefill_tokens
        at_least = SMALLEST_CHUNK if turn.due or turn.in_the_way or not served else 0
        limit_s = max(plan.budget_s, cost.forward_s(draft.load) + turn.owed_s)
        tokens = count = 0
        if task.tokens:
            most = draft.room(task)
            if most > 0:
                tokens = cost.chunk(draft.load, task.context, most, limit_s, finetune=True)
                tokens = max(tokens, min(most, at_least))
                draft.take(task, tokens, finetune=True)
        if tokens == task.tokens:
            left_s = limit_s - cost.forward_s(draft.load)
            for unit in task.units[task.next_unit :]:
                unit_s = cost.unit_s(unit)
                if plan.predicted_units_s + unit_s > left_s and (count or tokens or not at_least):
                    break
                plan.predicted_units_s += unit_s
                count += 1
        if tokens or count:
            plan.grants.append(Grant(task, tokens, count))
