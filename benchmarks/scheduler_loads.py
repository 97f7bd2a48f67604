"""A scheduler kept busy in virtual time, with the mixes of tasks that a box sees.

Owns the mixes and what becomes of a plan there. Must not know clocks or reports: others measure.
"""

from __future__ import annotations

import random
from typing import Any

from edged.scheduler.cost.model import CostModel
from edged.scheduler.scheduler import Scheduler
from edged.scheduler.task import Grant, IterationResult, Kind, Plan, Resources, Task, TaskOutcome, Unit
from edged.settings.load import SchedulerSettings

MIXES = {
    "decodes": (1.0, 0.0, 0.0),
    "mixed": (0.75, 0.19, 0.06),
    "prompts": (0.25, 0.72, 0.03),
    "fine-tuning": (0.5, 0.25, 0.25),
}
"""Shares of decodes, waiting prompts and fine-tune tasks."""
PAGE_SIZE = 16
ITERATION_S = 0.03
UNITS = tuple([Unit("head", 256)] * 4 + [Unit("layer", 256)] * 120 + [Unit("step", 0)])


class Mix:
    """A scheduler that is kept at the same mix of live tasks, and `queued` prompts more, while iterations pass."""

    def __init__(
        self, policy: str, tasks: int, shares: tuple[float, float, float], free_pages: int, queued: int = 0
    ) -> None:
        cost = CostModel.guess(parameters=3_000_000_000, flops_per_s=3e13, bytes_per_s=2e11, layers=28)
        self.scheduler = Scheduler(SchedulerSettings(policy=policy), cost)
        self.resources = Resources(free_pages, 8192, PAGE_SIZE, 1024, 128)
        self.now = 0.0
        self._random = random.Random(0)
        self._next_id = 0
        self._shares = shares
        self._tasks, self._queued = tasks, queued
        self.refill()

    def plan(self) -> Plan:
        """One decision."""
        return self.scheduler.plan(self.now, self.resources)

    def foresee(self, plan: Plan) -> None:
        """Make the plan after `plan` ahead, as while an iteration runs."""
        self.scheduler.foresee(plan, self.now, self.resources)

    def run(self, plan: Plan) -> IterationResult:
        """The plan's outcomes: prompts end after their last chunk, decodes go on, steps are taken up again."""
        for task in plan.preempt:
            tokens = task.context + task.tokens
            self.scheduler.restart(task, tokens, self.now)
        outcomes = []
        for grant in plan.grants:
            task = grant.task
            pages = -(-max(0, task.context + grant.tokens - task.capacity) // PAGE_SIZE)
            task.held_pages += pages
            task.capacity += pages * PAGE_SIZE
            outcomes.append(TaskOutcome(task, grant.tokens, grant.units, self._next(grant)))
        units = [(unit, 0.001) for grant in plan.grants for unit in grant.task.units[: grant.units]]
        self.now += ITERATION_S
        return IterationResult(outcomes, ITERATION_S, units)

    def complete(self, result: IterationResult) -> None:
        """Tell the scheduler what came of a plan."""
        self.scheduler.complete(result, self.now)

    def _next(self, grant: Grant) -> Kind | None:
        task = grant.task
        if task.kind is Kind.PREFILL:
            return None if grant.tokens == task.tokens else Kind.PREFILL
        if task.kind is Kind.FINETUNE:
            done = grant.tokens == task.tokens and task.next_unit + grant.units == len(task.units)
            return None if done else Kind.FINETUNE
        return Kind.DECODE

    def refill(self) -> None:
        """Bring the mix back to its shares with new tasks."""
        decodes, prompts, tuning = (round(share * self._tasks) for share in self._shares)
        live = self.scheduler.counts()
        for _ in range(decodes - live[Kind.DECODE]):
            context = self._random.randint(50, 2000)
            pages = -(-(context + 1) // PAGE_SIZE)
            self._add(Kind.DECODE, 1, context=context, held_pages=pages, capacity=pages * PAGE_SIZE)
        for _ in range(prompts + self._queued - live[Kind.PREFILL]):
            self._add(Kind.PREFILL, self._random.randint(50, 2000))
        for _ in range(tuning - live[Kind.FINETUNE]):
            self._add(Kind.FINETUNE, self._random.randint(200, 1500), units=UNITS, loss=0.69)

    def _add(self, kind: Kind, tokens: int, **fields: Any) -> None:
        self._next_id += 1
        self.scheduler.add(Task(self._next_id, kind, self.now, tokens=tokens, **fields), self.now)


def all_mixes(policy: str, tasks: int, queued: int = 0) -> dict[str, Mix]:
    """Every mix by name; two more are short of memory, and one has `queued` prompts more, if there are to be any."""
    mixes = {name: Mix(policy, tasks, shares, 4096) for name, shares in MIXES.items()}
    mixes["full memory"] = Mix(policy, tasks, MIXES["mixed"], 40)
    mixes["preempting"] = Mix(policy, tasks, MIXES["mixed"], 1)
    if queued:
        mixes["queued"] = Mix(policy, tasks, MIXES["mixed"], 4096, queued)
    return mixes
