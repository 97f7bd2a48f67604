"""Bursts of long prompts, and steady loads, on a simulated device whose times vary: one row a policy and rate.

    python -m benchmarks.bursts [--policy mace,mace-paper,fcfs] [--rate 0.25,0.5] [--seeds 4] [--trace T] [--json]

Arrivals are gamma-distributed with a coefficient of variation of 3 unless `--steady`; every second request comes with a
preference pair. Each forward and unit takes 10 % longer than the device's file says, times a jitter of 15 %, and a
decode behind a chunk 25 % more: the cost model has to learn that.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from statistics import mean
from typing import Any

from benchmarks.support.command import finish, flag, option, parse
from edged.bench.arrivals import Arrivals
from edged.bench.traces import read_trace
from edged.scheduler.task import Unit
from edged.settings.load import Settings
from edged.simulator.hardware import SimulatedHardware
from edged.simulator.roofline import Device, Pass
from edged.simulator.simulation import Simulation, SimulationPlan

SLOW, JITTER, AFTER_CHUNK = 1.1, 0.15, 1.25
LONG = "lognormal:2200:26"
FIGURES = ("in_time", "ttft_p50_ms", "ttft_p99_ms", "tbt_mean_ms", "tbt_p50_ms", "tbt_p99_ms", "pairs")


def noisy(device: Device, seed: int) -> Device:
    """Return the device with times that vary."""
    chance, behind_chunk = random.Random(f"noise {seed}"), False

    def factor() -> float:
        return SLOW * max(0.5, chance.gauss(1.0, JITTER))

    def forward_s(load: Pass) -> float:
        nonlocal behind_chunk
        seconds = device.forward_s(load) * factor()
        if load.decodes and behind_chunk:
            seconds *= AFTER_CHUNK
        behind_chunk = load.prefill_tokens > 0
        return seconds

    def unit_s(unit: Unit) -> float:
        return device.unit_s(unit) * factor()

    return replace(device, forward_s=forward_s, unit_s=unit_s)


class NoisySimulation(Simulation):
    """A simulation on a noisy device, whose targets are those of the device's file."""

    def __init__(self, plan: SimulationPlan) -> None:
        clean = SimulatedHardware.of(plan)
        super().__init__(plan, replace(clean, device=noisy(clean.device, plan.seed)), lambda _line: None)
        self._clean = Simulation(plan, clean, lambda _line: None)

    def _lone_ttft(self, trace: Any) -> Callable[[float], float]:
        return self._clean._lone_ttft(trace)


def run(plan: SimulationPlan) -> dict[str, float]:
    """Return the figures of one simulation."""
    report = NoisySimulation(plan).play(read_trace(plan.trace, plan.seed))
    ttft, tbt = report["ttft_ms"], report["tbt_ms"]
    pairs = report["finetune"]["pairs_trained"]
    share = report["slo"]["ttft_within_factor_share"]
    return dict(
        zip(FIGURES, (share, ttft["p50"], ttft["p99"], tbt["mean"], tbt["p50"], tbt["p99"], pairs), strict=True)
    )


def main() -> None:
    """Simulate and print."""
    options = parse(
        __doc__,
        option("--policy", "names, with commas", "fcfs,mace-paper,mace"),
        option("--rate", "requests per second, with commas", "0.25,0.5"),
        option("--seeds", "seeds from 1", 4),
        option("--trace", "as for edged bench simulate", LONG),
        option("--epochs", "align.epochs", 1),
        flag("--steady", "the trace's own arrivals"),
    )
    rows = []
    for rate in map(float, options.rate.split(",")):
        for policy in options.policy.split(","):
            settings = Settings.model_validate({"scheduler": {"policy": policy}, "align": {"epochs": options.epochs}})
            plan = SimulationPlan(
                trace=options.trace,
                arrivals=None if options.steady else Arrivals.parse("gamma:3"),
                device="agx-orin-32gb-maxn",
                model="mistral-3b",
                settings=settings,
                rate_per_s=rate,
                retrain_rate=0.5,
                seconds=300.0,
            )
            found = [run(replace(plan, seed=seed)) for seed in range(1, options.seeds + 1)]
            means = {name: mean(each[name] for each in found) for name in FIGURES}
            shares = [each["in_time"] for each in found]
            rows.append({"rate": rate, "policy": policy, **means, "least": min(shares), "most": max(shares)})
    finish(options, {"rows": rows}, table(rows))


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a table of Markdown."""
    lines = [
        "| rate | policy | first tokens in time (seeds) | TTFT p50, p99 ms | TBT mean, p50, p99 ms | pairs |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        lines.append(
            f"| {row['rate']:g} | `{row['policy']}` | {row['in_time']:.3f} ({row['least']:.2f} to {row['most']:.2f}) | "
            f"{row['ttft_p50_ms']:,.0f}, {row['ttft_p99_ms']:,.0f} | {row['tbt_mean_ms']:.0f}, "
            f"{row['tbt_p50_ms']:.0f}, {row['tbt_p99_ms']:.0f} | {row['pairs']:.1f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
