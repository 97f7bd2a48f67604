#!/usr/bin/env python3
"""How long one scheduling decision takes with 64 live tasks: median and spread, for the mixes that a box sees.

    python tools/bench_scheduler.py [--tasks 64] [--queued 4096] [--rounds 2000] [--policy mace|all] [--json]

Each round plans one iteration and completes it, as the engine does, in virtual time; `Scheduler.plan` is the decision,
`Scheduler.complete` (bookkeeping and calibration) and `Scheduler.foresee` (the next plan, made while the device is
busy) are told beside it. With all policies each has one row, as in MACE's Table 1.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
import tracemalloc
from typing import Any

import checkout  # noqa: F401
from benchmarks.scheduler_loads import MIXES, Mix, all_mixes
from edged.scheduler.policies.registry import ROWS

_WARM_ROUNDS = 20


def timed_round(mix: Mix) -> tuple[float, float, float]:
    """Seconds of one plan, of its completion and of the plan made ahead."""
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


def measure(policy: str, tasks: int, rounds: int, queued: int) -> dict[str, dict[str, float]]:
    """Milliseconds of a decision by mix; the mixes take turns, so that the machine's moods meet all of them."""
    mixes = all_mixes(policy, tasks, queued)
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
    """Peak MB that a scheduler with its tasks and a hundred iterations allocates."""
    gc.collect()  # what earlier schedulers left is not collected in the middle of this one
    tracemalloc.start()
    mix = Mix(policy, tasks, MIXES["mixed"], 4096, queued)
    for _ in range(100):
        timed_round(mix)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak / 1e6


def overhead(policy: str, tasks: int, rounds: int, queued: int) -> dict[str, Any]:
    """What one policy costs."""
    return {
        "policy": policy,
        "tasks": tasks,
        "queued": queued,
        "rounds": rounds,
        "memory_mb": memory_mb(policy, tasks, 0),
        "memory_queued_mb": memory_mb(policy, tasks, queued),
        "mixes": measure(policy, tasks, rounds, queued),
    }


def show(cost: dict[str, Any]) -> None:
    """One policy, mix by mix."""
    print(f"{cost['policy']}, {cost['tasks']} live tasks, peak {cost['memory_mb']:.2f} MB,", end=" ")
    print(f"{cost['memory_queued_mb']:.2f} MB with {cost['queued']:,} queued")
    print(f"{'mix':<14}{'decision p50':>14}{'p95':>10}{'completion p50':>18}{'ahead p50':>12}   (ms)")
    for name, row in cost["mixes"].items():
        print(
            f"{name:<14}{row['plan_ms_p50']:>14.4f}{row['plan_ms_p95']:>10.4f}{row['complete_ms_p50']:>18.4f}"
            f"{row['foresee_ms_p50']:>12.4f}"
        )


def show_all(costs: list[dict[str, Any]]) -> None:
    """A row for each policy."""
    print(f"{'policy':<16}{'decision p50':>14}{'queued p50':>12}{'memory':>10}{'queued':>10}   (ms, MB)")
    for cost in costs:
        mixes = cost["mixes"]
        print(
            f"{cost['policy']:<16}{mixes['mixed']['plan_ms_p50']:>14.4f}"
            f"{mixes['queued']['plan_ms_p50']:>12.4f}"
            f"{cost['memory_mb']:>10.2f}{cost['memory_queued_mb']:>10.2f}"
        )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tasks", type=int, default=64, help="live tasks")
    parser.add_argument("--queued", type=int, default=4096, help="prompts that wait besides, in one more mix")
    parser.add_argument("--rounds", type=int, default=2000, help="decisions per mix")
    parser.add_argument("--policy", choices=[*ROWS, "all"], default="mace")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    if options.queued < 1:
        parser.error(f"--queued {options.queued}: give at least 1")
    names = list(ROWS) if options.policy == "all" else [options.policy]
    costs = [overhead(name, options.tasks, options.rounds, options.queued) for name in names]
    if options.json:
        print(json.dumps(costs if options.policy == "all" else costs[0]))
    elif options.policy == "all":
        show_all(costs)
    else:
        show(costs[0])


if __name__ == "__main__":
    main()
