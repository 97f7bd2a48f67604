"""The order of users by the virtual token counters of what they were served, over the order of any policy."""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Hashable, Mapping
from itertools import islice
from typing import Any

from edged.scheduler.fairness.justitia import JustitiaOrder
from edged.scheduler.fairness.order import MAX_SHOWN, FairOrder
from edged.scheduler.fairness.training import TrainingTurns
from edged.scheduler.fairness.virtual_counters import VirtualCounters
from edged.scheduler.policies.base import Order
from edged.scheduler.task import DECODE, PREFILL, IterationResult, Kind, Plan, ServingTask, Task
from edged.settings.load import FairnessSettings

ANSWER_TOKEN = 2.0
"""Service that an answer's token counts for, where a prompt's computed one counts for 1 (VTC, section 4)."""


def fair_order(settings: FairnessSettings, row_order: Order, present: Order) -> Order:
    """Return the order by these settings over that of a policy's row: `present`, with its state, where it is that."""
    if settings.policy == "off":
        return row_order
    if isinstance(present, FairOrder) and present.follows(settings):
        present.fairness = settings
        return present
    return TurnOrder(settings, row_order) if settings.policy == "vtc" else JustitiaOrder(settings, row_order)


class TurnOrder(FairOrder):
    """The user with the least counter enters next, with the first of the user's prompts in the order of the row.

    A prompt is charged as it enters, of which the cache gives back what it had; an answer's tokens as they come. A
    prompt that is computed again after a preemption is not charged again.
    """

    entry_only = True

    def __init__(self, fairness: FairnessSettings, row_order: Order) -> None:
        super().__init__(fairness, row_order)
        self.counters = VirtualCounters(self.weight)
        self.training = TrainingTurns(VirtualCounters(self.weight))
        self._waiting: set[int] = set()
        """Ids of prompts that never entered."""
        self._entered: dict[int, int] = {}
        """Tokens that were charged, by the id of a prompt that entered and of which nothing is computed yet."""

    def flow(self, task: ServingTask) -> str:
        """Return the user."""
        return task.tenant

    def flow_key(self, flow: Hashable) -> float:
        """Return the user's counter."""
        return self.counters.counter(str(flow))

    def first(self, flows: Mapping[Any, list[ServingTask]], most: int) -> list[ServingTask]:
        """Return the prompts that enter next, each as if those before it had been charged."""
        weights, waiting = self.fairness.weights, self._waiting
        firsts = zip(self.counters.of(flows), flows.values(), strict=True)
        places = sorted([(counter, tasks[0].queue_key, tasks, 1) for counter, tasks in firsts])
        chosen: list[ServingTask] = []
        # Those before are chosen; a user's next prompt is put among those after.
        for counted, _, tasks, count in islice(places, most):
            task = tasks[count - 1]
            chosen.append(task)
            if count < len(tasks):
                if task.task_id in waiting:
                    counted += task.num_tokens / (self.weight(task.tenant) if weights else 1.0)
                insort(places, (counted, tasks[count].queue_key, tasks, count + 1), len(chosen))
        return chosen

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
        elif num_tokens := self._entered.pop(task.task_id, 0):
            self.counters.refund(task.tenant, num_tokens)

    def begun(self, plan: Plan, now: float) -> None:
        """Charge the prompts that enter."""
        entering: list[ServingTask] = []
        # Decodes, which wait no more, are granted first.
        for grant in reversed(plan.grants):
            if grant.task.kind is DECODE:
                break
            if grant.task.kind is PREFILL and grant.task.task_id in self._waiting:
                entering.append(grant.task)
        for task in reversed(entering):
            self._waiting.remove(task.task_id)
            self._entered[task.task_id] = task.num_tokens
            self.counters.left(task.tenant)
            self.counters.charge(task.tenant, task.num_tokens)

    def completed(self, plan: Plan, result: IterationResult, finetune_s: float, now: float) -> None:
        """Charge the tokens of answers, and steps for their share of the time; give back what the cache had."""
        answered: Counter[str] = Counter()
        for outcome in result.outcomes:
            task = outcome.task
            if task.kind is Kind.FINETUNE:
                continue
            if (charged := self._entered.pop(task.task_id, None)) is not None and charged > task.num_tokens:
                self.counters.refund(task.tenant, charged - task.num_tokens)
            if outcome.next_kind is not Kind.PREFILL:
                answered[task.tenant] += outcome.num_tokens if task.kind is Kind.DECODE else 1
        for user, num_tokens in answered.items():
            self.counters.charge(user, ANSWER_TOKEN * num_tokens)
        self.training.completed(result, finetune_s, self.cost.token_s)

    def report(self) -> dict[str, Any]:
        """Return the counters of users, and how many of their prompts wait."""
        counters = self.counters
        users = {
            user: {"counter": counter, "waiting": counters.backlog(user), "weight": self.weight(user)}
            for user, counter in counters.latest(MAX_SHOWN)
        }
        return {"policy": "vtc", "virtual_time": 0.0, "open": 0, "runs": [], "users": users}
