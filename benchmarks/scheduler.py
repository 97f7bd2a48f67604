"""How long one scheduling decision takes with 64 live tasks: median and spread, for the mixes that a box sees.

    python -m benchmarks.scheduler [--tasks 64] [--queued 4096] [--rounds 2000] [--policy mace|all]
                                   [--fairness off|vtc|justitia] [--json]

Each round plans one iteration and completes it, as the engine does, in virtual time; `Scheduler.plan` is the decision,
`Scheduler.complete` (bookkeeping and calibration) and `Scheduler.foresee` (the next plan, made while the device is
busy) are told beside it. With all policies each has one row, as in MACE's Table 1.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
import tracemalloc
from collections.abc import Sequence
from itertools import count
from typing import Any, Literal

from benchmarks.support.command import finish, option, parse
from edged.scheduler.cost.model import CostModel, roofline
from edged.scheduler.policies.registry import ROWS
from edged.scheduler.reader import Reader
from edged.scheduler.scheduler import Scheduler
from edged.scheduler.task import (
    FinetuneTask,
    Grant,
    IterationResult,
    Kind,
    Plan,
    Resources,
    ServingTask,
    Task,
    TaskOutcome,
    Unit,
)
from edged.settings.load import FairnessSettings, SchedulerSettings

MIXES = {
    "decodes": (1.0, 0.0, 0.0),
    "mixed": (0.75, 0.19, 0.06),
    "prompts": (0.25, 0.72, 0.03),
    "fine-tuning": (0.5, 0.25, 0.25),
}
"""Shares of decodes, waiting prompts and fine-tune tasks."""
PAGE_SIZE = 16
USERS = 32
ITERATION_S = 0.03
UNITS = tuple([Unit("head", 256)] * 4 + [Unit("layer", 256)] * 120 + [Unit("step", 0)])


class Mix:
    """A scheduler that is kept at the same mix of live tasks, and `queued` more prompts, over many iterations."""

    def __init__(
        self,
        policy: str,
        tasks: int,
        shares: tuple[float, float, float],
        free_pages: int,
        queued: int = 0,
        fairness: str = "off",
        reading: bool = False,
    ) -> None:
        cost = CostModel(roofline(parameters=3_000_000_000, flops_per_s=3e13, bytes_per_s=2e11, layers=28))
        self.scheduler = Scheduler(
            SchedulerSettings(policy=policy), cost, fairness=FairnessSettings.model_validate({"policy": fairness})
        )
        self.resources = Resources(free_pages, 8192, PAGE_SIZE, 1024, 128)
        self.now = 0.0
        self._random = random.Random(0)
        self._ids = count(1)
        self._shares = shares
        self._tasks, self._queued = tasks, queued
        self._reading = reading
        self.refill()

    def plan(self) -> Plan:
        """Return one plan."""
        return self.scheduler.plan(self.now, self.resources)

    def foresee(self, plan: Plan) -> None:
        """Make the plan after `plan` ahead, as the engine does while an iteration runs."""
        self.scheduler.foresee(plan, self.now, self.resources)

    def run(self, plan: Plan) -> IterationResult:
        """Return the plan's outcomes: prompts end after their last chunk, decodes go on, steps start again."""
        for task in plan.preempt:
            tokens = task.context + task.num_tokens
            self.scheduler.restart(task, tokens, self.now)
        outcomes = []
        for grant in plan.grants:
            task = grant.task
            pages = -(-max(0, task.context + grant.num_tokens - task.capacity) // PAGE_SIZE)
            task.held_pages += pages
            task.capacity += pages * PAGE_SIZE
            outcomes.append(TaskOutcome(task, grant.num_tokens, grant.units, self._next(grant)))
        steps = [(grant.task, grant.units) for grant in plan.grants if grant.task.kind is Kind.FINETUNE]
        units = [(unit, 0.001) for step, most in steps for unit in step.units[:most]]
        self.now += ITERATION_S
        return IterationResult(outcomes, ITERATION_S, units)

    def complete(self, result: IterationResult) -> None:
        """Report a plan's outcomes to the scheduler."""
        self.scheduler.complete(result, self.now)

    def _next(self, grant: Grant[Task]) -> Kind | None:
        task = grant.task
        if task.kind is Kind.PREFILL:
            return None if grant.num_tokens == task.num_tokens else Kind.PREFILL
        if task.kind is Kind.FINETUNE:
            done = grant.num_tokens == task.num_tokens and task.next_unit + grant.units == len(task.units)
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
            tokens = self._random.randint(200, 1500)
            self.scheduler.add(FinetuneTask(next(self._ids), self.now, tokens, units=UNITS, loss=0.69), self.now)

    def _add(self, kind: Literal[Kind.PREFILL, Kind.DECODE], tokens: int, **fields: Any) -> None:
        number = next(self._ids)
        task = ServingTask(number, kind, self.now, num_tokens=tokens, tenant=f"user-{number % USERS}", **fields)
        if self._reading:
            ahead_s = 0.0 if kind is Kind.PREFILL else self._random.uniform(0.0, 20.0)
            task.reader = Reader(self._random.uniform(3.0, 9.0), self.now + ahead_s)
        self.scheduler.add(task, self.now)


def all_mixes(policy: str, tasks: int, queued: int = 0, fairness: str = "off") -> dict[str, Mix]:
    """Return every mix by name; two more are short of memory; with `queued`, if that is not 0, one has as many more
    prompts, and one as many prompts as decodes, all of them read, in too little memory."""
    mixes = {name: Mix(policy, tasks, shares, 4096, fairness=fairness) for name, shares in MIXES.items()}
    mixes["full memory"] = Mix(policy, tasks, MIXES["mixed"], 40, fairness=fairness)
    mixes["preempting"] = Mix(policy, tasks, MIXES["mixed"], 1, fairness=fairness)
    if queued:
        mixes["queued"] = Mix(policy, tasks, MIXES["mixed"], 4096, queued, fairness)
        mixes["readers"] = Mix(policy, 2 * tasks, (0.5, 0.5, 0.0), 40, 0, fairness, reading=True)
    return mixes


# -- the command -------------------------------------------------------------------------------------------------------

_WARM_ROUNDS = 20


def timed_round(mix: Mix) -> tuple[float, float, float]:
    """Return the seconds of one plan, of its completion and of the plan made ahead."""
    started = time.perf_counter()
    plan = mix.plan()
    planned = time.perf_counter()
    mix.foresee(plan)
    foreseen = time.perf_counter()
    result = mix.run(plan)
    resumed = time.perf_counter()
    mix.complete(result)
    completed = time.perf_counter()
    mix.refill()
    return planned - started, completed - resumed, foreseen - planned


def measure(policy: str, tasks: int, rounds: int, queued: int, fairness: str = "off") -> dict[str, dict[str, float]]:
    """Return milliseconds of a decision by mix; the mixes take turns, so that slow phases of the machine meet all of
    them."""
    mixes = all_mixes(policy, tasks, queued, fairness)
    times: dict[str, list[tuple[float, float, float]]] = {name: [] for name in mixes}
    for index in range(rounds + _WARM_ROUNDS):
        for name, mix in mixes.items():
            measured = timed_round(mix)
            if index >= _WARM_ROUNDS:
                times[name].append(measured)
    rows = {}
    for name, samples in times.items():
        plans, completions, ahead = ([seconds * 1e3 for seconds in column] for column in zip(*samples, strict=True))
        rows[name] = {
            "plan_ms_p50": statistics.median(plans),
            "plan_ms_p95": statistics.quantiles(plans, n=20)[-1],
            "complete_ms_p50": statistics.median(completions),
            "foresee_ms_p50": statistics.median(ahead),
        }
    return rows


def memory_mb(policy: str, tasks: int, queued: int) -> float:
    """Return the peak MB that a scheduler with its tasks allocates over a hundred iterations."""
    gc.collect()  # collected now, so that garbage of earlier schedulers is not collected during the measurement
    tracemalloc.start()
    mix = Mix(policy, tasks, MIXES["mixed"], 4096, queued)
    for _ in range(100):
        timed_round(mix)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak / 1e6


def overhead(policy: str, tasks: int, rounds: int, queued: int, fairness: str) -> dict[str, Any]:
    """Return the time and memory of one policy."""
    return {
        "policy": policy,
        "fairness": fairness,
        "tasks": tasks,
        "queued": queued,
        "rounds": rounds,
        "memory_mb": memory_mb(policy, tasks, 0),
        "memory_queued_mb": memory_mb(policy, tasks, queued),
        "mixes": measure(policy, tasks, rounds, queued, fairness),
    }


def one_policy(cost: dict[str, Any]) -> str:
    """Return one policy's costs as lines, mix by mix."""
    lines = [
        f"{cost['policy']}, {cost['tasks']} live tasks, peak {cost['memory_mb']:.2f} MB, "
        f"{cost['memory_queued_mb']:.2f} MB with {cost['queued']:,} queued",
        f"{'mix':<14}{'decision p50':>14}{'p95':>10}{'completion p50':>18}{'ahead p50':>12}   (ms)",
    ]
    for name, row in cost["mixes"].items():
        plan, ahead = f"{row['plan_ms_p50']:>14.4f}{row['plan_ms_p95']:>10.4f}", f"{row['foresee_ms_p50']:>12.4f}"
        lines.append(f"{name:<14}{plan}{row['complete_ms_p50']:>18.4f}{ahead}")
    return "\n".join(lines)


def all_policies(costs: Sequence[dict[str, Any]]) -> str:
    """Return a row for each policy."""
    lines = [f"{'policy':<16}{'decision p50':>14}{'queued p50':>12}{'memory':>10}{'queued':>10}   (ms, MB)"]
    for cost in costs:
        mixed, queued = (cost["mixes"][name]["plan_ms_p50"] for name in ("mixed", "queued"))
        memory = f"{cost['memory_mb']:>10.2f}{cost['memory_queued_mb']:>10.2f}"
        lines.append(f"{cost['policy']:<16}{mixed:>14.4f}{queued:>12.4f}{memory}")
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    options = parse(
        __doc__,
        option("--tasks", "live tasks", 64),
        option("--queued", "prompts that wait besides, in one more mix", 4096),
        option("--rounds", "decisions per mix", 2000, least=2),
        option("--policy", "or all of them", "mace", choices=[*ROWS, "all"]),
        option("--fairness", "whose turn it is, among 32 users", "off", choices=["off", "vtc", "justitia"]),
    )
    fair = options.fairness
    chosen = list(ROWS) if options.policy == "all" else [options.policy]
    costs = [overhead(name, options.tasks, options.rounds, options.queued, fair) for name in chosen]
    if options.policy == "all":
        finish(options, costs, all_policies(costs))
    else:
        finish(options, costs[0], one_policy(costs[0]))


if __name__ == "__main__":
    main()
