"""The frontier: pairs learned against first tokens in time and mean TBT, each policy swept over its own knob.

    python -m benchmarks.simulated.frontier TRACE --device NAME --model NAME [--policies mace,ekya,...] [--rate 0.72]
                                  [--retrain-rate 0.5] [--readers 6] [--seconds 300] [--seeds 2] [--picture FOLDER]
                                  [--output FILE]
    python -m benchmarks.simulated.frontier lognormal:2200:26 --arrivals gamma:3 --noisy --defaults    bursts

A policy is better where its curve is above another's, not where its default happens to train less. Simulated in
virtual time; with --noisy times vary by 15 %, and a decode behind a chunk takes 25 % more. The row "offline" is what
one server could have had in time with every arrival known before, computing prompts alone and nothing else: the optimum
lies between the two numbers (`benchmarks/simulated/offline.py`). Values are medians over the seeds, in brackets the
smallest and the largest.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.report.canvas import Canvas
from benchmarks.report.panels import Curve, Figure, Panel
from benchmarks.simulated.offline import Job, at_most, reachable
from benchmarks.support.command import (
    READERS,
    existing_file,
    finish,
    flag,
    markdown,
    names,
    option,
    pace_of,
    parse,
    say,
)
from edged.lab.bench.arrivals import Arrivals
from edged.lab.bench.figures import SLO_FACTOR
from edged.lab.bench.summary import ATTAINMENT, LEARNING, MEAN_TBT, PAIRS, REQUESTS_IN_TIME, Middle, ReportFigure
from edged.lab.bench.traces import Arrival, PromptIds, RequestTrace, read_trace, scale_trace
from edged.lab.simulator.fleet_runs import NOISE
from edged.lab.simulator.hardware import SimulatedHardware
from edged.lab.simulator.plan import SimulationPlan
from edged.lab.simulator.runner import SimulatedEngine
from edged.lab.simulator.simulation import Simulation, lone_ttft_s
from edged.scheduler.policies.registry import ROWS
from edged.settings.load import load_settings

_SHARES = ("scheduler.finetune_min_share", (0.0, 0.05, 0.1, 0.2, 0.3))
KNOBS: dict[str, tuple[str, tuple[float, ...]]] = {
    **dict.fromkeys(("mace", "mace-paper", "mace-prefix", "mace-prune", "mace-priority"), _SHARES),
    "flexllm": ("scheduler.options.slo_ms", (60.0, 90.0, 120.0, 180.0, 240.0)),
    "ekya": ("scheduler.options.retrain_window_s", (2.0, 5.0, 10.0, 15.0, 25.0)),
    "periodic-async": ("scheduler.options.retrain_every_s", (5.0, 15.0, 30.0, 60.0)),
}
"""The setting that makes a policy train more or less; policies without one are a single point."""
TTFT_P99, TBT_P99 = ReportFigure("ttft_ms.p99", "TTFT p99 ms", 0), ReportFigure("tbt_ms.p99", "TBT p99 ms", 0)
QOE = ReportFigure("readers.qoe_mean", "QoE", 3)
FIGURES = (PAIRS, ATTAINMENT, REQUESTS_IN_TIME, QOE, TTFT_P99, MEAN_TBT, TBT_P99, LEARNING)


def main() -> None:
    """Simulate, print, draw."""
    options = parse(
        __doc__,
        option("trace", "as for edged bench simulate"),
        option("--device", "as for edged bench simulate", "agx-orin-32gb-maxn"),
        option("--model", "as for edged bench simulate", "mistral-3b"),
        option("--config", "TOML file with further settings", type=existing_file),
        option("--policies", "by comma", ["fcfs", "mace", "flexllm", "ekya", "adainf"], type=names(ROWS)),
        flag("--defaults", "each policy at its default alone"),
        option("--rate", "requests per second", 0.72),
        option("--arrivals", "as for edged bench simulate; without it the trace's own", type=Arrivals.parse),
        flag("--noisy", "a device whose times vary"),
        option("--retrain-rate", "pairs per request", 0.5, least=0),
        READERS,
        option("--seconds", "of the load", 300.0, 60.0),
        option("--seeds", "loads, from seed 0 on", 2, 1),
        option("--picture", "a folder for the drawing, which needs matplotlib", type=Path),
        quick="a short load, one seed",
    )
    rows = []
    for policy in options.policies:
        knob, values = ("", (0.0,)) if options.defaults else KNOBS.get(policy, ("", (0.0,)))
        for value in values:
            say(f"{policy} {knob} {value:g}" if knob else policy)
            plans = [plan_of(options, seed, policy, {knob: value} if knob else {}) for seed in range(options.seeds)]
            reports = [played(plan, options.noisy) for plan in plans]
            rows.append({"policy": policy, "knob": knob, "value": value if knob else None, **summary(reports)})
    bounds = [bound(plan_of(options, seed, "fcfs", {})) for seed in range(options.seeds)]
    if options.picture:
        options.picture.mkdir(parents=True, exist_ok=True)
        say(str(Canvas(options.picture).draw(frontier(rows), "frontier")))
    finish(options, {"rows": rows, "offline": bounds}, "\n".join(table(rows, bounds)))


def plan_of(options: Namespace, seed: int, policy: str, knob: dict[str, float]) -> SimulationPlan:
    """Return the plan of one run."""
    return SimulationPlan(
        trace=options.trace,
        device=options.device,
        model=options.model,
        settings=load_settings(options.config, overrides={"scheduler.policy": policy, **knob}),
        rate_per_s=options.rate,
        arrivals=options.arrivals,
        retrain_rate=options.retrain_rate,
        seconds=options.seconds,
        seed=seed,
        pace=pace_of(options),
    )


def played(
    plan: SimulationPlan, noisy: bool, simulation: type[Simulation] = Simulation, trace: RequestTrace | None = None
) -> dict[str, Any]:
    """Return the report of one run, of `trace` where the plan's is no file."""
    hardware = SimulatedHardware.of(plan)
    if noisy:
        hardware = replace(hardware, device=replace(hardware.device, noise=NOISE))
    return simulation(plan, hardware, lambda _line: None).play(trace or read_trace(plan.trace, plan.seed))


def summary(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """Return each figure's median and range over the seeds."""
    return {figure.path: spread([figure.of(report) for report in reports]) for figure in FIGURES}


def spread(values: Sequence[float | None]) -> list[float] | None:
    """Return median, lowest and highest of the known values; None if there is none."""
    middle = Middle.of(values)
    return None if middle is None else [middle.median, middle.low, middle.high]


def cell(figure: ReportFigure, values: list[float] | None) -> str:
    """Return a table's cell of a figure's `spread`."""
    if values is None:
        return "–"
    middle, low, high = (f"{value:.{figure.digits}f}" for value in values)
    return middle if low == high else f"{middle} ({low}–{high})"


def bound(plan: SimulationPlan) -> dict[str, float]:
    """Return the shares of first tokens in time between which the offline optimum of the plan's load lies."""
    hardware = SimulatedHardware.of(plan)
    most = plan.settings.serving.max_batch_tokens
    jobs = []
    for arrival in load_of(plan, hardware, read_trace(plan.trace, plan.seed)):
        alone_s = lone_ttft_s(hardware.device, len(arrival.prompt_ids), most)
        jobs.append(Job(arrival.at_s, arrival.at_s + SLO_FACTOR * alone_s, alone_s))
    return {"reachable_share": reachable(jobs) / len(jobs), "at_most_share": at_most(jobs) / len(jobs)}


def load_of(plan: SimulationPlan, hardware: SimulatedHardware, trace: RequestTrace) -> list[Arrival]:
    """Return the requests that a run of the plan has, from `trace`."""
    longest, vocab = SimulatedEngine(plan.settings, hardware).max_context_tokens, hardware.model.shape.vocab_size
    prompts = PromptIds(longest, range(vocab), plan.seed)
    rate, seconds = plan.rate_per_s or 0.0, plan.seconds
    times_s = plan.arrivals.times_s(rate, seconds, plan.seed) if plan.arrivals else ()
    return scale_trace(trace, prompts, rate_per_s=rate, seconds=seconds, times_s=times_s)


def frontier(rows: list[dict[str, Any]]) -> Figure:
    """Return the figure: both measures of serving over the pairs learned."""
    panels = []
    for figure, label in ((ATTAINMENT, "share of first tokens in time"), (MEAN_TBT, "mean TBT, ms")):
        curves = {}
        for policy in dict.fromkeys(row["policy"] for row in rows):
            points = sorted((row[PAIRS.path][0], row[figure.path][0]) for row in rows if row["policy"] == policy)
            curves[policy] = Curve([x for x, _ in points], [y for _, y in points])
        panels.append(Panel(figure.title, "pairs learned", label, curves))
    return Figure("frontier", "The frontier", (), tuple(panels))


def table(rows: list[dict[str, Any]], bounds: list[dict[str, float]]) -> Iterator[str]:
    """Yield lines of a Markdown table, the offline optimum last."""
    lines = []
    for row in rows:
        knob = f"{row['knob']} = {row['value']:g}" if row["knob"] else ""
        lines.append([row["policy"], knob, *(cell(figure, row[figure.path]) for figure in FIGURES)])
    shares = "; ".join(f"{one['reachable_share']:.3f} to {one['at_most_share']:.3f}" for one in bounds)
    lines.append(["offline", "one server, prompts alone", "0", shares, *[""] * (len(FIGURES) - 2)])
    yield from markdown(["policy", "knob", *(figure.title for figure in FIGURES)], lines)


if __name__ == "__main__":
    main()
