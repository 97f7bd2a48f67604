"""FlexLLM's Figures 10 and 11 on a simulated device: requests in time and tokens trained, by strategy and load.

    python -m benchmarks.simulated.flexllm DEVICE MODEL --trace FILE --rates 1,2,3 --slo-ms 50 --output FILE.json

All there is to learn, PAIRS pairs, is there from the first second on and is trained again without end. `separate-3:1`
is four boxes of which three only serve (`fcfs`, at 4/3 of the rate) and one only learns; its figures are those of all
four, by four. Called again with the same file, the command runs what is missing in it. Each run has Figure 12's tokens
by time, in spans of 5 s.
"""

from __future__ import annotations

import json
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import click

from edged.lab.bench.arrivals import Arrivals
from edged.lab.bench.figures import COUNTED
from edged.lab.bench.traces import read_trace
from edged.lab.simulator.hardware import SimulatedHardware
from edged.lab.simulator.plan import SimulationPlan
from edged.lab.simulator.runner import START_S, SimulatedEngine
from edged.lab.simulator.simulation import Simulation, pairs_of
from edged.settings.load import Settings

TEMPORAL = {"temporal-64": 64, "temporal-128": 128, "temporal-512": 512}
SEPARATE = {"separate-3:1": 3, "separate-2:2": 2, "separate-1:3": 1}
"""Boxes of four that only serve; the others only learn."""
STRATEGIES = (
    *("fcfs", "flexllm", "flexllm-behind", "flexllm-whole", "flexllm-static", *SEPARATE, *TEMPORAL),
    *("temporal-dynamic", "spatial", "mace", "mace-paper"),
)
IDLE_POLICY = "sync"
"""Policy of a box that only learns: each step to its end."""
PAIRS = 32
TTFT_MS = 5000.0
"""The paper's: a request is in time whose mean time per token and time to the first token are."""
SPAN_S = 5
FIGURES = {
    "in_time": ("slo", "requests_in_time_share"),
    "output_tokens_per_s": ("throughput", "output_tokens_per_s"),
    "trained_tokens_per_s": ("finetune", "trained_tokens_per_s"),
}


@dataclass(frozen=True, slots=True)
class Run:
    """One simulation."""

    strategy: str
    rate_per_s: float
    seed: int


def simulated(
    run: Run, device: str, model: str, trace: str, arrivals: str, slo_ms: float, seconds: float, step_pairs: int
) -> Any:
    """Return the run with its figures."""
    serving = SEPARATE.get(run.strategy)
    policy = "fcfs" if serving else "temporal" if run.strategy in TEMPORAL else run.strategy
    scheduler = {
        "policy": policy,
        "tbt_floor_ms": slo_ms,
        "tbt_factor": 1.0,
        "ttft_floor_ms": TTFT_MS,
        "options": {"slo_ms": slo_ms, "temporal_every": TEMPORAL.get(run.strategy, 128)},
    }
    align = {"epochs": 100_000, "micro_batch_pairs": step_pairs}
    settings = Settings.model_validate({"align": align, "scheduler": scheduler})
    rate_per_s = run.rate_per_s * 4 / serving if serving else run.rate_per_s
    load = {"rate_per_s": rate_per_s, "retrain_rate": 0.0, "seconds": seconds, "seed": run.seed}
    process = Arrivals.parse(arrivals)
    plan = SimulationPlan(device=device, model=model, trace=trace, arrivals=process, settings=settings, **load)  # type: ignore[arg-type]
    simulation = Simulation(plan, SimulatedHardware.of(plan), lambda _line: None)
    teach(simulation.engine, plan)
    report = simulation.play(read_trace(trace, run.seed))
    figures = {name: report[part][key] for name, (part, key) in FIGURES.items()}
    if serving:
        figures["output_tokens_per_s"] *= serving / 4
        figures["trained_tokens_per_s"] = (4 - serving) / 4 * learning_tokens_per_s(plan)
    return asdict(run) | figures | {"tpot_target_ms": report["slo"]["tpot_target_ms"], "spans": spans(report)}


def spans(report: dict[str, Any]) -> list[list[float]]:
    """Return [end in seconds, requests, output tokens and trained tokens per second] of each `SPAN_S` seconds."""
    seconds = report["timeline"]
    parts = [seconds[first : first + SPAN_S] for first in range(0, len(seconds), SPAN_S)]
    return [
        [
            round(part[-1]["at_s"]),
            *(round(sum(row[f"{name}_per_s"] for row in part) / len(part), 1) for name in COUNTED),
        ]
        for part in parts
    ]


def learning_tokens_per_s(plan: SimulationPlan) -> float:
    """Return the tokens a second that a box learns which answers nobody."""
    scheduler = plan.settings.scheduler.model_copy(update={"policy": IDLE_POLICY})
    settings = plan.settings.model_copy(update={"scheduler": scheduler})
    engine = SimulatedEngine(settings, SimulatedHardware.of(replace(plan, settings=settings)), plan.seed)
    teach(engine, plan)
    engine.run(START_S + plan.seconds)
    return engine.learning.trained_tokens / plan.seconds


def teach(engine: SimulatedEngine, plan: SimulationPlan) -> None:
    """Give an engine its pairs."""
    for pair in islice(pairs_of(plan), PAIRS):
        engine.learning.submit(pair, engine.now)


def table(
    rows: list[dict[str, Any]], strategies: list[str], rates: list[float], name: str, scale: float, digits: int
) -> str:
    """Return a table of medians over seeds, in brackets their range where there is one: strategies by rate."""
    lines = [f"| strategy | {' | '.join(f'{rate:g}/s' for rate in rates)} |", f"| --- |{' --- |' * len(rates)}"]
    for strategy in strategies:
        cells = []
        for rate in rates:
            values = [scale * row[name] for row in rows if (row["strategy"], row["rate_per_s"]) == (strategy, rate)]
            low, high = f"{min(values):.{digits}f}", f"{max(values):.{digits}f}"
            cells.append(f"{median(values):.{digits}f}" + (f" ({low}–{high})" if low != high else ""))
        lines.append(f"| `{strategy}` | {' | '.join(cells)} |")
    return "\n".join(lines)


@click.command()
@click.argument("device")
@click.argument("model")
@click.option("--trace", required=True)
@click.option("--arrivals", default="poisson")
@click.option("--rates", required=True)
@click.option("--seeds", default="0,1,2")
@click.option("--slo-ms", type=float, required=True)
@click.option("--seconds", type=float, default=60.0)
@click.option("--step-pairs", type=int, default=4, help="Pairs of an optimizer step.")
@click.option("--strategies", default="", help="By comma; all by default.")
@click.option("--jobs", type=int, default=2)
@click.option("--output", type=click.Path(path_type=Path), required=True)
def main(
    device: str, model: str, rates: str, seeds: str, strategies: str, jobs: int, output: Path, **load: Any
) -> None:
    """Simulate the strategies at every rate and seed; print tables, and write the figures to a file."""
    sides = strategies.split(",") if strategies else list(STRATEGIES)
    if unknown := set(sides) - set(STRATEGIES):
        raise click.BadParameter(f"{', '.join(sorted(unknown))} is none of {', '.join(STRATEGIES)}")
    points = [float(rate) for rate in rates.split(",")]
    report = {"device": device, "model": model, **load, "trace": Path(load["trace"]).name}
    known = json.loads(output.read_text()) if output.exists() else report | {"runs": []}
    rows = known.pop("runs")
    if known != report:
        raise click.ClickException(f'"{output}" has runs of another load: give another file')
    runs = [Run(name, rate, int(seed)) for seed in seeds.split(",") for rate in points for name in sides]
    there = {(row["strategy"], row["rate_per_s"], row["seed"]) for row in rows}
    missing = [run for run in runs if (run.strategy, run.rate_per_s, run.seed) not in there]
    with ProcessPoolExecutor(jobs) as pool:
        for row in pool.map(partial(simulated, device=device, model=model, **load), missing):
            rows.append(row)
            output.write_text(json.dumps(report | {"runs": rows}, indent=1) + "\n")
    for name, title, scale, digits in (
        ("in_time", "Requests in time, %", 100.0, 1),
        ("trained_tokens_per_s", "Tokens trained/s", 1.0, 0),
        ("output_tokens_per_s", "Output tokens/s", 1.0, 0),
    ):
        print(f"\n{title}\n\n{table(rows, sides, points, name, scale, digits)}")


if __name__ == "__main__":
    main()
