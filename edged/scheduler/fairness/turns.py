"""The order of users by the virtual token counters of what they were served, over the order of any policy."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Hashable, Mapping

from edged.scheduler.fairness.virtual_counters import VirtualCounters
from edged.scheduler.policies.base import Order
from edged.scheduler.task import IterationResult, Kind, Plan, Task
from edged.settings.load import FairnessSettings


def fair_order(settings: FairnessSettings, row_order: Order, present: Order) -> Order:
    """Return the order by these settings over that of a policy's row: `present`, with its state, where it is that."""
    if settings.policy == "off":
        return row_order
    if isinstance(present, TurnOrder) and present.follows(settings):
        present.fairness = settings
        return present
    return TurnOrder(settings, row_order)


class TrainingTurns:
    """The turns of adapters at fine-tuning, by the service that training gave them."""

    def __init__(self, counters: VirtualCounters) -> None:
        self.counters = counters
        self._ready: set[str] = set()
        self._trained: dict[int, float] = {}
        """Service of steps under way, by task: a step that is abandoned is not charged."""

    def next_steps(self, adapters: Collection[str], most: int) -> list[str]:
        """Return the ready adapters with the least counters."""
        for name in self._ready.difference(adapters):
            self.counters.left(name)
        for name in adapters:
            if name not in self._ready:
                self.counters.arrived(name)
        self._ready = set(adapters)
        return heapq.nsmallest(most, adapters, key=self.counters.counter)

    def worked(self, task: Task, service: float) -> None:
        """Count service of a step under way."""
        self._trained[task.task_id] = self._trained.get(task.task_id, 0.0) + service

    def ended(self, task: Task) -> None:
        """Charge a step to the adapters that it trained, in equal parts, if it is done."""
        service = self._trained.pop(task.task_id, 0.0)
        if not task.has_work:
            for name in task.trains:
                self.counters.charge(name, service / len(task.trains))


class TurnOrder(Order):
    """The user with the least counter enters next, with the first of the user's prompts in the order of the row.

    A prompt is charged as it enters, of which the cache gives back what it had; an answer's tokens as they come. A
    prompt that is computed again after a preemption is not charged again.
    """

    strict = entry_only = True

    def __init__(self, fairness: FairnessSettings, row_order: Order) -> None:
        self.fairness = fairness
        self.key = row_order.key
        self.counters = VirtualCounters(self._weight)
        shared = fairness.finetune_counter == "shared"
        self.training = TrainingTurns(self.counters if shared else VirtualCounters(self._weight))
        self._waiting: set[int] = set()
        """Ids of prompts that never entered."""
        self._entered: dict[int, int] = {}
        """Tokens that were charged, by the id of a prompt that entered and of which nothing is computed yet."""

    def follows(self, settings: FairnessSettings) -> bool:
        """Whether these settings want this order, with its state."""
        now = self.fairness
        return (now.policy, now.finetune_counter) == (settings.policy, settings.finetune_counter)

    def _weight(self, user: str) -> float:
        return self.fairness.weight(user)

    def flow(self, task: Task) -> str:
        """Return the user."""
        return task.tenant

    def flow_key(self, flow: Hashable) -> float:
        """Return the user's counter."""
        return self.counters.counter(str(flow))

    def first(self, flows: Mapping[Hashable, list[Task]], most: int) -> list[Task]:
        """Return the prompts that enter next, each as if those before it had been charged."""
        counter, key, price = self.counters.counter, self.key, self.fairness.input
        next_users = heapq.nsmallest(most, ((counter(str(user)), key(flows[user][0]), user) for user in flows))
        places: list[tuple[float, tuple[float, int], Hashable, int]] = [(*entry, 0) for entry in next_users]
        heapq.heapify(places)
        chosen: list[Task] = []
        while places and len(chosen) < most:
            counted, _, user, index = places[0]
            tasks = flows[user]
            task = tasks[index]
            chosen.append(task)
            if index + 1 == len(tasks):
                heapq.heappop(places)
                continue
            if task.task_id in self._waiting:
                counted += price * task.tokens / self._weight(str(user))
            heapq.heapreplace(places, (counted, key(tasks[index + 1]), user, index + 1))
        return chosen

    def next_steps(self, adapters: Collection[str], most: int) -> list[str]:
        """Return the ready adapters with the least counters."""
        return self.training.next_steps(adapters, most)

    def arrived(self, task: Task, now: float) -> None:
        """Count a prompt that waits."""
        if task.kind is Kind.PREFILL:
            self._waiting.add(task.task_id)
            self.counters.arrived(task.tenant)

    def left(self, task: Task, now: float) -> None:
        """Give back what was charged for a prompt of which nothing was computed; charge a step that is done."""
        if task.kind is Kind.FINETUNE:
            self.training.ended(task)
        elif task.task_id in self._waiting:
            self._waiting.remove(task.task_id)
            self.counters.left(task.tenant)
        elif tokens := self._entered.pop(task.task_id, 0):
            self.counters.refund(task.tenant, self.fairness.input * tokens)

    def begun(self, plan: Plan, now: float) -> None:
        """Charge the prompts that enter."""
        for grant in plan.grants:
            task = grant.task
            if task.task_id in self._waiting:
                self._waiting.remove(task.task_id)
                self._entered[task.task_id] = task.tokens
                self.counters.left(task.tenant)
                self.counters.charge(task.tenant, self.fairness.input * task.tokens)

    def completed(self, plan: Plan, result: IterationResult, finetune_s: float, now: float) -> None:
        """Charge the tokens of answers, and steps for their share of the time; give back what the cache had."""
        answered: Counter[str] = Counter()
        steps = []
        for outcome in result.outcomes:
            task = outcome.task
            if task.kind is Kind.FINETUNE:
                steps.append(outcome)
                continue
            if (charged := self._entered.pop(task.task_id, None)) is not None and charged > task.tokens:
                self.counters.refund(task.tenant, self.fairness.input * (charged - task.tokens))
            if outcome.next_kind is not Kind.PREFILL:
                answered[task.tenant] += 1
        for user, tokens in answered.items():
            self.counters.charge(user, self.fairness.output * tokens)
        for outcome in steps:
            price = self.fairness.finetune
            if price == "auto":
                service = self.fairness.input * finetune_s / len(steps) / self.cost.token_s
            else:
                service = price * outcome.tokens
            self.training.worked(outcome.task, service)
