"""The turns of adapters at fine-tuning: the one that was trained least goes next."""

import heapq
from collections.abc import Collection

from edged.scheduler.fairness.virtual_counters import VirtualCounters
from edged.scheduler.task import FinetuneTask, IterationResult, Kind


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

    def ended(self, task: FinetuneTask) -> None:
        """Charge a step to the adapters that it trained, in equal parts, if it is done."""
        service = self._trained.pop(task.task_id, 0.0)
        if not task.has_work:
            for name in task.trains:
                self.counters.charge(name, service / len(task.trains))

    def completed(self, result: IterationResult, finetune_s: float, token_s: float) -> None:
        """Count the work of an iteration, `finetune_s` of it for fine-tuning; a prompt's token takes `token_s`."""
        steps = [outcome for outcome in result.outcomes if outcome.task.kind is Kind.FINETUNE]
        for outcome in steps:
            number = outcome.task.task_id
            self._trained[number] = self._trained.get(number, 0.0) + finetune_s / len(steps) / token_s
