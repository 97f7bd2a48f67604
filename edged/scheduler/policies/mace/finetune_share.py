"""The time that fine-tuning may have in an iteration of MACE: the rest of the latency budget."""

import math

from edged.scheduler.cost.model import CostModel
from edged.scheduler.planning import slo
from edged.scheduler.planning.bin_builder import BinBuilder
from edged.scheduler.planning.finetune_budget import FinetuneDeficit, SlowdownBudget
from edged.scheduler.policies.base import Entry, FinetuneShare
from edged.scheduler.policies.options import QuantumOptions
from edged.scheduler.task import FinetuneTask, IterationResult, Kind, Plan, Task
from edged.settings.load import SchedulerSettings


class MaceFinetuneShare(FinetuneShare):
    """The rest of the latency budget for fine-tuning; once that outranks serving, its share of the time it waited.

    A step keeps memory from its first token to its last unit. So one that keeps prompts out gets the quantum in every
    iteration until it ends; fine-tuning waits longer afterwards.
    """

    def __init__(self) -> None:
        self._deficit = FinetuneDeficit()
        self._budget = SlowdownBudget()
        self._tasks: set[FinetuneTask] = set()

    def configure(self, settings: SchedulerSettings, cost: CostModel) -> None:
        """Take share, longest wait, slow-down and quantum; what was owed and spent still is."""
        super().configure(settings, cost)
        self._quantum_s = QuantumOptions.of(settings).idle_quantum_ms / 1000.0
        self._deficit.configure(settings)
        self._budget.configure(settings.tbt_slowdown)

    def arrived(self, task: Task, now: float) -> None:
        """Start the wait of fine-tuning at its first task that is not of a job or a pass."""
        if task.kind is Kind.FINETUNE and not task.bulk:
            if not self._tasks:
                self._deficit.start(now)
            self._tasks.add(task)

    def left(self, task: Task, now: float) -> None:
        """Stop the wait at the last task's end."""
        if task.kind is Kind.FINETUNE and task in self._tasks:
            self._tasks.remove(task)
            if not self._tasks:
                self._deficit.stop(now)

    def completed(self, plan: Plan, result: IterationResult, finetune_s: float, now: float) -> None:
        """Settle both accounts; work on a step moves its arrival towards `now`."""
        steps = [outcome.task for outcome in result.outcomes if outcome.task.kind is Kind.FINETUNE]
        if len(steps) < len(result.outcomes):
            spent_s = result.forward_s + sum([seconds for _, seconds in result.units])
            self.settle(spent_s - finetune_s, finetune_s, now)
        for task in steps:
            if task in self._tasks:
                self._deficit.pay(task, finetune_s, now, plan.prepaid)

    def settle(self, serving_s: float, finetune_s: float, now: float) -> None:
        """Account for the seconds of an iteration that served."""
        self._budget.settle(serving_s, serving_s, finetune_s, now)

    def waited_s(self, now: float) -> float:
        """Return the wait of all fine-tuning, less what its work has paid for; jobs and passes do not count."""
        return self._deficit.wait_s(now) if self._tasks else 0.0

    def owed_s(self, builder: BinBuilder, entry: Entry, now: float) -> float:
        """Return fine-tuning's share of the time that it waited; the quantum, when it is in the way.

        At most the quantum, or twice the share of this iteration's own length where that is more, so that what is owed
        can shrink.
        """
        if entry.in_the_way:
            return self._quantum_s
        share = self._deficit.share
        num_tokens = min(builder.tokens_left, sum(task.num_tokens for task in entry.runnable))
        serving_s = self.cost.priced_s(builder.load) + num_tokens * self.cost.token_s
        max_s = 2.0 * serving_s * share / (1.0 - share) if share < 1.0 else math.inf
        return min(share * self._deficit.wait_s(now), max(self._quantum_s, max_s))

    def limit_s(self, builder: BinBuilder, now: float) -> float:
        """Return the latency budget: within the least slack of the iteration's members and the prompts behind them.

        Fine-tuning takes of it what serving allows (`tbt_slowdown`), and the share that slots and pages are free. Where
        serving is dense, a longer iteration keeps more sequences in memory until those that arrive find none; so
        training thins out before.
        """
        if not (builder.load.decodes or builder.load.prefill_tokens):
            return self._quantum_s
        forward_s = builder.plan.predicted_forward_s
        slots = builder.sequences_left + builder.candidates
        free = min(slots / builder.max_sequences, builder.open_pages / builder.total_pages)
        if free <= 0.0:
            return forward_s
        granted = {grant.task: grant.num_tokens for grant in builder.plan.grants[builder.load.decodes :]}
        # Below it less than nothing is left of the budget: `headroom` is a half at most.
        floor_s = -2.0 * forward_s / free
        slack_s = min(builder.slack_s, slo.slack_s(builder.prompts, granted, now, self.cost.token_s, floor_s))
        spare_s = min(slack_s * (1.0 - self.cost.headroom) - forward_s, self._quantum_s, self._max_s(builder.plan))
        return max(0.0, forward_s + spare_s * free)

    def _max_s(self, plan: Plan) -> float:
        """Return the most seconds of fine-tuning beside what `plan` serves."""
        return max(0.0, self._budget.left_s)
