#!/usr/bin/env python3
"""How long one scheduling decision takes with 64 live tasks: median and spread, for the mixes that a box sees.

    python tools/bench_scheduler.py [--tasks 64] [--rounds 2000] [--policy mace] [--json]

Each round plans one iteration and completes it, as the engine does, in virtual time; `Scheduler.plan` is the decision,
`Scheduler.complete` (bookkeeping and calibration) is told beside it.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
import tracemalloc
from typing import Any

from edged.config import SchedulerSettings
from edged.scheduler.cost import CostModel
from edged.scheduler.scheduler import Scheduler
from edged.scheduler.task import Grant, Kind, Outcome, Plan, Resources, Result, Task, Unit

MIXES = {
    "decodes": (1.0, 0.0, 0.0),
    "mixed": (0.75, 0.19, 0.06),
    "prompts": (0.25, 0.72, 0.03),
    "fine-tuning": (0.5, 0.25, 0.25),
}
"""Shares of decodes, waiting prompts and fine-tune tasks."""
PAGE_SIZE = 16
UNITS = tuple([Unit("head", 256)] * 4 + [Unit("layer", 256)] * 120 + [Unit("step", 0)])


class Mix:
    """A scheduler that is kept at the same mix of live tasks while iterations pass."""

    def __init__(self, policy: str, tasks: int, shares: tuple[float, float, float], free_pages: int) -> None:
        cost = CostModel.guess(parameters=3_000_000_000, flops_per_s=3e13, bytes_per_s=2e11, layers=28)
        self.scheduler = Scheduler(SchedulerSettings(policy=policy), cost)
        self.resources = Resources(free_pages, 8192, PAGE_SIZE, 1024, 128)
        self.now = 0.0
        self._random = random.Random(0)
        self._next_id = 0
        self._shares = shares
        self._tasks = tasks
        self._refill()

    def round(self) -> tuple[float, float]:
        """Seconds of one plan and of its completion."""
        started = time.perf_counter()
        plan = self.scheduler.plan(self.now, self.resources)
        planned = time.perf_counter()
        result = self._run(plan)
        self.now += 0.03
        resumed = time.perf_counter()
        self.scheduler.complete(result, self.now)
        completed = time.perf_counter()
        self._refill()
        return planned - started, completed - resumed

    def _run(self, plan: Plan) -> Result:
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
            outcomes.append(Outcome(task, grant.tokens, grant.units, self._next(grant)))
        units = [(unit, 0.001) for grant in plan.grants for unit in grant.task.units[: grant.units]]
        return Result(outcomes, 0.03, units)

    def _next(self, grant: Grant) -> Kind | None:
        task = grant.task
        if task.kind is Kind.PREFILL:
            return None if grant.tokens == task.tokens else Kind.PREFILL
        if task.kind is Kind.FINETUNE:
            done = grant.tokens == task.tokens and task.next_unit + grant.units == len(task.units)
            return None if done else Kind.FINETUNE
        return Kind.DECODE

    def _refill(self) -> None:
        decodes, prompts, tuning = (round(share * self._tasks) for share in self._shares)
        live = self.scheduler.counts()
        for _ in range(decodes - live[Kind.DECODE]):
            context = self._random.randint(50, 2000)
            pages = -(-(context + 1) // PAGE_SIZE)
            self._add(Kind.DECODE, 1, context=context, held_pages=pages, capacity=pages * PAGE_SIZE)
        for _ in range(prompts - live[Kind.PREFILL]):
            self._add(Kind.PREFILL, self._random.randint(50, 2000))
        for _ in range(tuning - live[Kind.FINETUNE]):
            self._add(Kind.FINETUNE, self._random.randint(200, 1500), units=UNITS, loss=0.69)

    def _add(self, kind: Kind, tokens: int, **fields: Any) -> None:
        self._next_id += 1
        self.scheduler.add(Task(self._next_id, kind, self.now, tokens=tokens, **fields), self.now)


def measure(policy: str, tasks: int, rounds: int) -> dict[str, dict[str, float]]:
    """Milliseconds of a decision by mix; the mixes take turns, so that the machine's moods meet all of them."""
    mixes = {name: Mix(policy, tasks, shares, 4096) for name, shares in MIXES.items()}
    mixes["full memory"] = Mix(policy, tasks, MIXES["mixed"], 40)
    mixes["preempting"] = Mix(policy, tasks, MIXES["mixed"], 1)
    plans: dict[str, list[float]] = {name: [] for name in mixes}
    completions: dict[str, list[float]] = {name: [] for name in mixes}
    for index in range(rounds + 20):
        for name, mix in mixes.items():
            planned_s, completed_s = mix.round()
            if index >= 20:
                plans[name].append(planned_s * 1e3)
                completions[name].append(completed_s * 1e3)
    return {
        name: {
            "plan_ms_p50": statistics.median(values),
            "plan_ms_p95": statistics.quantiles(values, n=20)[-1],
            "complete_ms_p50": statistics.median(completions[name]),
        }
        for name, values in plans.items()
    }


def memory_mb(policy: str, tasks: int) -> float:
    """Peak MB that a scheduler with its tasks and a hundred iterations allocates."""
    tracemalloc.start()
    mix = Mix(policy, tasks, MIXES["mixed"], 4096)
    for _ in range(100):
        mix.round()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak / 1e6


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tasks", type=int, default=64, help="live tasks")
    parser.add_argument("--rounds", type=int, default=2000, help="decisions per mix")
    parser.add_argument("--policy", default="mace")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    mixes = measure(options.policy, options.tasks, options.rounds)
    peak_mb = memory_mb(options.policy, options.tasks)
    if options.json:
        print(json.dumps({"policy": options.policy, "tasks": options.tasks, "memory_mb": peak_mb, "mixes": mixes}))
        return
    print(f"{options.policy}, {options.tasks} live tasks, {options.rounds} decisions each, peak {peak_mb:.2f} MB")
    print(f"{'mix':<14}{'decision p50':>14}{'p95':>10}{'completion p50':>18}   (ms)")
    for name, row in mixes.items():
        print(f"{name:<14}{row['plan_ms_p50']:>14.4f}{row['plan_ms_p95']:>10.4f}{row['complete_ms_p50']:>18.4f}")


if __name__ == "__main__":
    main()
