#!/usr/bin/env python3
"""How long one scheduling decision takes with 64 live tasks: median and spread, for the mixes that a box sees.

    python tools/bench_scheduler.py [--tasks 64] [--rounds 2000] [--policy mace] [--json]

Each round plans one iteration and completes it, as the engine does, in virtual time; `Scheduler.plan` is the decision,
`Scheduler.complete` (bookkeeping and calibration) is told beside it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import tracemalloc

from edged.bench.mixes import MIXES, Mix, all_mixes


def timed_round(mix: Mix) -> tuple[float, float]:
    """Seconds of one plan and of its completion."""
    started = time.perf_counter()
    plan = mix.plan()
    planned = time.perf_counter()
    result = mix.run(plan)
    resumed = time.perf_counter()
    mix.complete(result)
    completed = time.perf_counter()
    mix.refill()
    return planned - started, completed - resumed


def measure(policy: str, tasks: int, rounds: int) -> dict[str, dict[str, float]]:
    """Milliseconds of a decision by mix; the mixes take turns, so that the machine's moods meet all of them."""
    mixes = all_mixes(policy, tasks)
    plans: dict[str, list[float]] = {name: [] for name in mixes}
    completions: dict[str, list[float]] = {name: [] for name in mixes}
    for index in range(rounds + 20):
        for name, mix in mixes.items():
            planned_s, completed_s = timed_round(mix)
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
        timed_round(mix)
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
