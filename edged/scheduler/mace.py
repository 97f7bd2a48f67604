"""The MACE policy: serving and fine-tuning share each iteration, by priority, memory and latency budget.

Owns the decision. Who enters memory is Algorithm 1's choice (`edged.scheduler.packing`) in the order of MACE's
priorities; how long each works is the latency budget's (MACE 4.2, FlexLLM 6.2). Must not know how tasks are executed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from edged.config import SchedulerSettings
from edged.scheduler.cost import CostModel
from edged.scheduler.draft import Draft
from edged.scheduler.packing import Bin, Item, Packing
from edged.scheduler.priority import Priorities
from edged.scheduler.queues import Queues
from edged.scheduler.task import Grant, Kind, Plan, Resources, Task

SMALLEST_CHUNK = 32
"""Tokens that a prompt or an overdue forward gets at least, whatever the budget: it must go on."""
LOOK_AHEAD = 32
"""Waiting prompts whose deadlines limit how long fine-tuning may take."""


class Mace:
    """MACE 4.1 and 4.2 with a latency budget.

    Every decode runs in every iteration. Prompts are cut into chunks that keep the decodes on time. Fine-tuning gets
    what is left of the budget; when it has waited so long that it outranks serving, it comes first and gets
    `finetune_min_share` of the time that it waited.
    """

    name = "mace"

    def __init__(self, settings: SchedulerSettings, cost: CostModel) -> None:
        self._cost = cost
        self._priorities = Priorities.derive(settings)
        self._packing = Packing(
            settings.lambda_memory, settings.lambda_latency, settings.tau_memory, settings.tau_tasks
        )
        self._quantum_s = settings.idle_quantum_ms / 1000.0
        self._share = settings.finetune_min_share

    def plan(self, queues: Queues, now: float, resources: Resources) -> Plan:
        """The next bin within `resources`; empty only if no task can run."""
        draft = Draft(queues, now, resources)
        cost, plan = self._cost, draft.plan
        tuning = self._ranked(queues, draft, now) if queues.finetunes else []
        wait_s = queues.arrears.wait_s(tuning, now) if tuning else 0.0
        due = bool(tuning) and self._outranks_serving(queues, tuning[0], wait_s, now)
        entering, tuned = self._admit(draft, queues, tuning, due, now)
        prompts = [task for task in queues.started if task not in draft.preempted]
        prompts += entering
        owed_s = self._owed_s(draft, prompts, wait_s, queues.arrears.share) if due and tuned is not None else 0.0
        self._add_chunks(draft, prompts, tuned if due else None, owed_s)
        served = draft.load.decodes or draft.load.prefill_tokens
        forward_s = cost.forward_s(draft.load)
        if served:
            slack_s = self._slack_s(draft, queues, now) * (1.0 - cost.headroom)
            plan.budget_s = min(slack_s, forward_s + self._quantum_s)
        else:
            plan.budget_s = self._quantum_s
        if tuned is not None:
            at_least = SMALLEST_CHUNK if due or not served else 0
            plan.predicted_units_s = self._tune(draft, tuned, max(plan.budget_s, forward_s + owed_s), at_least)
        if not plan.grants:
            draft.rescue()
        plan.predicted_forward_s = cost.forward_s(draft.load)
        return plan

    def _ranked(self, queues: Queues, draft: Draft, now: float) -> list[Task]:
        """Fine-tune tasks that have work: those in the middle of a step first (their kept inputs hold memory and nobody
        is served by half a step), then by priority."""
        rank = self._priorities.finetune
        return sorted(
            (
                task
                for task in queues.finetunes
                if (task.tokens or task.next_unit < len(task.units)) and task not in draft.preempted
            ),
            key=lambda task: (not _begun(task), -rank(now - task.arrival_s, task.loss)),
        )

    def _outranks_serving(self, queues: Queues, first: Task, wait_s: float, now: float) -> bool:
        """Whether fine-tuning's priority is at least that of every serving task."""
        own = self._priorities.finetune(wait_s, first.loss)
        if queues.decodes and own < self._priorities.decode(now - queues.decodes[0].task.arrival_s):
            return False
        return all(
            own >= self._priorities.prefill(now - queue[0].arrival_s)
            for queue in (queues.started, queues.waiting)
            if queue
        )

    def _admit(
        self, draft: Draft, queues: Queues, tuning: list[Task], due: bool, now: float
    ) -> tuple[list[Task], Task | None]:
        """Algorithm 1 over all who ask for memory: the prompts that enter now, and the fine-tune task that may run.

        One step at a time is begun: a second one would hold memory and delay the first.
        """
        tuned = tuning[0] if tuning and _begun(tuning[0]) else None
        asking = (
            [task for task in tuning if draft.pages(task, task.tokens) <= draft.total_pages] if tuned is None else []
        )
        waiting = queues.waiting if draft.sequences_left > 0 else []
        if not (asking or waiting) or draft.open_pages < 0 or draft.preempted:
            return [], tuned
        token_s = self._cost.token_s
        length_s = draft.tokens_left * token_s
        first = Bin(draft.open_pages, length_s - sum(task.tokens for task in queues.started) * token_s)
        items = self._items(draft, asking, waiting, due, now)
        bins = self._packing.best_fit(items, first, draft.total_pages, max(length_s, token_s), draft.total_pages)
        entering: list[Task] = []
        for item in first.items:
            if item.task.kind is Kind.PREFILL:
                entering.append(item.task)
            elif tuned is None:
                tuned = item.task
        busy = draft.load.decodes or queues.started
        if due and asking and tuned is None and busy:
            return [], None
        for room in bins[1:]:
            entering += [item.task for item in room.items if item.task.kind is Kind.PREFILL]
        return self._enter(draft, entering, tuned)

    def _items(self, draft: Draft, tuning: list[Task], waiting: list[Task], due: bool, now: float) -> Iterator[Item]:
        """Who asks for memory, by priority."""
        token_s = self._cost.token_s
        asking = [Item(task, draft.pages(task, task.tokens), task.tokens * token_s) for task in tuning]
        if due:
            yield from asking
        most = draft.tokens_left
        for task in waiting:
            yield Item(task, draft.pages(task, task.tokens), min(task.tokens, most) * token_s, task.deadline_s > now)
        if not due:
            yield from asking

    def _enter(self, draft: Draft, entering: list[Task], tuned: Task | None) -> tuple[list[Task], Task | None]:
        """Promise the chosen tasks their pages, as far as pages and sequences go."""
        entered: list[Task] = []
        if tuned is not None and not _begun(tuned):
            draft.enter(tuned)
        for task in entering:
            if draft.sequences_left <= 0:
                break
            if draft.pages(task, task.tokens) <= draft.open_pages:
                draft.sequences_left -= 1
                draft.enter(task)
                entered.append(task)
        return entered, tuned

    def _add_chunks(self, draft: Draft, prompts: list[Task], due: Task | None, owed_s: float) -> None:
        """Chunks of the prompts in their order, together as long as the decodes stay on time.

        The `due` fine-tune task is left the tokens for the `owed_s` of work that it comes first with.
        """
        cost = self._cost
        kept = 0
        if due is not None and due.tokens:
            most = draft.room(due)
            kept = cost.chunk(draft.load, due.context, most, cost.forward_s(draft.load) + owed_s, finetune=True)
            kept = max(kept, min(most, SMALLEST_CHUNK))
        draft.tokens_left -= kept
        limit_s = draft.slack_s * (1.0 - cost.headroom) - owed_s
        for task in prompts:
            most = draft.room(task)
            if most <= 0:
                continue
            tokens = most
            if draft.load.decodes:
                tokens = cost.chunk(draft.load, task.context, most, limit_s, finetune=False)
                tokens = max(tokens, min(most, SMALLEST_CHUNK - draft.load.prefill_tokens))
                if tokens <= 0:
                    break
            draft.grant(task, tokens)
        draft.tokens_left += kept

    def _slack_s(self, draft: Draft, queues: Queues, now: float) -> float:
        """Least slack of the decodes' next tokens, and of the prompts, in memory or waiting, after those before them."""
        least_s = draft.slack_s
        token_s = self._cost.token_s
        granted = {grant.task: grant.tokens for grant in draft.plan.grants[draft.load.decodes :]}
        ahead = 0
        for task in (*queues.started, *queues.waiting[:LOOK_AHEAD]):
            ahead += task.tokens - granted.get(task, 0)
            least_s = min(least_s, task.deadline_s - now - ahead * token_s)
        return least_s

    def _owed_s(self, draft: Draft, prompts: list[Task], wait_s: float, share: float) -> float:
        """Seconds of work that overdue fine-tuning is owed now: its share of the time it waited.

        One iteration gives at most the quantum, or the share of its own length where that is more.
        """
        tokens = min(draft.tokens_left, sum(task.tokens for task in prompts))
        serving_s = self._cost.forward_s(draft.load) + tokens * self._cost.token_s
        most_s = serving_s * share / (1.0 - share) if share < 1.0 else math.inf
        return min(share * wait_s, max(self._quantum_s, most_s))

    def _tune(self, draft: Draft, task: Task, limit_s: float, at_least: int) -> float:
        """Forward tokens, then units, of `task` while the bin is predicted to take at most `limit_s`.

        `at_least` tokens, or one unit, are granted in any case when it is above zero. Returns the units' seconds.
        """
        cost, units = self._cost, task.units
        tokens, count, units_s = 0, 0, 0.0
        if task.tokens:
            most = draft.room(task)
            if most > 0:
                tokens = cost.chunk(draft.load, task.context, most, limit_s, finetune=True)
                tokens = max(tokens, min(most, at_least))
                draft.take(task, tokens, finetune=True)
        if tokens == task.tokens:
            left_s = limit_s - cost.forward_s(draft.load)
            must = at_least > 0 and not tokens
            for unit in units[task.next_unit :]:
                unit_s = cost.unit_s(unit)
                if units_s + unit_s > left_s and not (must and not count):
                    break
                units_s += unit_s
                count += 1
        if tokens or count:
            draft.plan.grants.append(Grant(task, tokens, count))
        return units_s


def _begun(task: Task) -> bool:
    """Whether a fine-tune task is in the middle of a step."""
    return task.context > 0 or task.next_unit > 0
