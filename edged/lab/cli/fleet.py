"""The commands `edged bench fleet`: fleets of boxes, and LeMix' nodes of pipeline stages, in virtual time."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import click

from edged.cli.options import seed_option, shown
from edged.cli.output import Renderable, make_table, number, show_progress
from edged.cli.settings import load_settings
from edged.lab.cli.load_options import ABOVE_ZERO, SHARE, Values, demand_known, readers_option

_SEEDS = click.option("--seeds", type=Values(click.IntRange(0)), default="0,1,2", metavar="NUMBERS")
_JOBS = click.option("--jobs", type=click.IntRange(1), default=1, help="Simulations at once.")
_POLICIES = click.option(
    "--policies", type=Values(click.STRING), default="all", metavar="NAMES", help="Rows of docs/policies.md."
)
_LINE_EVERY_S = 5.0


@click.group()
def fleet() -> None:
    """Simulate several boxes as one service, or LeMix' own setting."""


def _chosen(policies: tuple[str, ...], known: Iterable[str]) -> tuple[str, ...]:
    """Return the rows' names, or all; refuse unknown ones."""
    known = tuple(known)
    if policies == ("all",):
        return known
    demand_known("row", policies, known)
    return policies


def _refuse_one_box(policies: tuple[str, ...], speeds: tuple[float, ...]) -> None:
    if "separate" in policies and len(speeds) < 2:
        raise click.UsageError("separate needs two boxes, one that serves and one that learns: give --speeds 1,1")


def _played(play: Callable[[Any], dict[str, Any]], cases: Sequence[Any], jobs: int) -> Iterator[dict[str, Any]]:
    """Yield the cases' results in order, with progress."""
    next_line_s = time.monotonic()
    with ProcessPoolExecutor(jobs) as pool:
        for count, result in enumerate(map(play, cases) if jobs == 1 else pool.map(play, cases), 1):
            if time.monotonic() >= next_line_s:
                next_line_s = time.monotonic() + _LINE_EVERY_S
                show_progress(f"{count} of {len(cases)} simulations")
            yield result
    show_progress("")


def _mean(runs: Sequence[dict[str, Any]], figure: str) -> float | None:
    """Return the mean of a figure; None where a run has none, as what it would tell never happened."""
    values = [run[figure] for run in runs]
    return None if None in values else fmean(values)


def _table(runs: Sequence[dict[str, Any]], columns: dict[str, tuple[str, int]], title: str) -> Renderable:
    """Return a table of means by policy; `columns` has heading and digits of each figure."""
    table = make_table("policy", *(f">{heading}" for heading, _ in columns.values()), title=title)
    for policy in dict.fromkeys(run["policy"] for run in runs):
        own = [run for run in runs if run["policy"] == policy]
        table.add_row(policy, *(number(_mean(own, figure), digits) for figure, (_, digits) in columns.items()))
    return table


_AXES = {"rates": "rate_per_s", "loads": "load", "training-shares": "training_share", "conditions": "condition",
         "sigmas": "sigma", "models": "model"}  # fmt: skip
_STAGES = {
    "in_time_share": ("in time", 2),
    "throughput_per_s": ("tasks/s", 2),
    "response_s": ("first token, s", 2),
    "training_s": ("training, s", 1),
    "utilization_share": ("busy", 2),
    "nodes_used": ("nodes used", 1),
    "updates_seen_share": ("updates seen", 2),
    "ended_s": ("end to end, s", 1),
    "decision_ms_p50": ("decision, ms", 4),
}


@fleet.command()
@_POLICIES
@click.option("--models", type=Values(click.STRING), default="llama-70b", metavar="NAMES", help="Of LeMix' Table II.")
@click.option("--training-shares", type=Values(SHARE), default="0.1,0.3,0.5,0.75", metavar="SHARES",
              help="Share of tasks that train: LeMix' alpha.")  # fmt: skip
@click.option("--loads", type=Values(ABOVE_ZERO), metavar="SHARES", help="Of what the nodes can do; default: 0.5 to 1.")
@click.option("--rates", type=Values(ABOVE_ZERO), metavar="RATES", help="Tasks a second, instead of loads.")
@click.option("--conditions", type=Values(click.STRING), default="steady", metavar="NAMES",
              help="steady, bursts, wrong-eta, unequal.")  # fmt: skip
@click.option("--sigmas", type=Values(click.FloatRange(0.0, 2.0)), default="0.6", metavar="NUMBERS",
              help="Deviation of the logarithm of lengths.")  # fmt: skip
@click.option("--weights", type=Values(click.FLOAT, 2), metavar="TAU,LAMBDA2", help="Of Eq. 1 and 3, for lemix rows.")
@click.option("--tasks", type=click.IntRange(10), default=600)
@click.option("--by", type=click.Choice(list(_AXES)), help="A column for each value of this axis.")
@click.option("--figure", type=click.Choice(list(_STAGES)), default="in_time_share", help="What --by shows.")
@_SEEDS
@_JOBS
@shown
def stages(
    policies: tuple[str, ...],
    models: tuple[str, ...],
    training_shares: tuple[float, ...],
    loads: tuple[float, ...] | None,
    rates: tuple[float, ...] | None,
    conditions: tuple[str, ...],
    sigmas: tuple[float, ...],
    weights: tuple[float, float] | None,
    tasks: int,
    by: str | None,
    figure: str,
    seeds: tuple[int, ...],
    jobs: int,
) -> Any:
    """Simulate LeMix' setting: four nodes of two pipeline stages that serve and train, in the times of its Table II.

    Shows means over all points and seeds, or one figure by the values of an axis; --json has every run.
    """
    from edged.lab.simulator.stages import CONDITIONS, MODELS, POLICIES, StagedLoad, play_stages

    demand_known("model", models, MODELS)
    demand_known("condition", conditions, CONDITIONS)
    policies = _chosen(policies, POLICIES)
    amounts = [(None, rate) for rate in rates] if rates else [(load, None) for load in loads or (0.5, 0.75, 0.9, 1.0)]
    cases = [
        (
            StagedLoad(
                model=model, training_share=share, load=load, rate_per_s=rate, condition=condition, sigma=sigma,
                tasks=tasks, seed=seed,
            ),
            policy,
            weights,
        )
        for model, share, (load, rate), condition, sigma, seed, policy in product(
            models, training_shares, amounts, conditions, sigmas, seeds, policies
        )
    ]  # fmt: skip
    runs = list(_played(play_stages, cases, jobs))
    points = f"{len(cases) // len(policies) // len(seeds)} points, {len(seeds)} seeds, {tasks} tasks"
    if by is None:
        return {"runs": runs}, lambda: _table(runs, _STAGES, f"means of {points}")
    axis, digits = _AXES[by], _STAGES[figure][1]
    values = list(dict.fromkeys(run[axis] for run in runs))
    wide = [
        {"policy": policy}
        | {
            str(value): _mean([run for run in runs if run["policy"] == policy and run[axis] == value], figure)
            for value in values
        }
        for policy in policies
    ]
    return {"runs": runs}, lambda: _table(
        wide, {str(value): (str(value), digits) for value in values}, f"{_STAGES[figure][0]} by {by}; {points}"
    )


def _boxes(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of a simulation of boxes."""
    for option in reversed(
        (
            click.option("--device", "-d", default="agx-orin-32gb-maxn", metavar="NAME|FILE", help="As for simulate."),
            click.option("--model", "-m", default="mistral-3b", metavar="NAME|FILE", help="As for simulate."),
            click.option("--config", "-c", type=click.Path(path_type=Path), help="TOML file with further settings."),
            click.option("--speeds", type=Values(ABOVE_ZERO, distinct=False), default="1,1,1,1", metavar="FACTORS",
                         help="A box for each, of so many times the device's speed."),
            click.option("--misjudged", type=click.FloatRange(1.0), default=1.0,
                         help="Factor by which boxes report their prices too high and too low, in turns."),
            click.option("--pairs", type=SHARE, default=0.2, help="Share of answers that give a preference pair."),
            click.option("--zipf", type=click.FloatRange(0.0), default=1.1, help="How uneven the 40 users are."),
            readers_option,
            click.option("--seconds", type=click.FloatRange(1.0), default=120.0, help="Virtual time to send."),
        )
    ):  # fmt: skip
        command = option(command)
    return command


_BOXES = {
    "in_time_share": ("in time", 3),
    "good_share": ("good", 3),
    "ttft_p50_s": ("first token p50, s", 3),
    "learned_p50_s": ("learned p50, s", 1),
    "learned_p95_s": ("learned p95, s", 1),
    "hit_share": ("prefix hits", 2),
    "writers_moved": ("writers moved", 0),
    "forecast_error_p50": ("forecast error p50", 2),
}


@fleet.command()
@click.option("--policy", default="fleet", metavar="NAME", help="A row of docs/policies.md.")
@click.option("--load", type=ABOVE_ZERO, default=0.9, help="Share of what the boxes answer of a burst.")
@_boxes
@seed_option
@shown
def simulate(policy: str, config: Path | None, **load: Any) -> Any:
    """Simulate boxes that run the engine's own loop behind one placement policy, and people who talk and teach.

    In time: the first token within 5 times the prompt alone, or 0.3 s. Good: that, and at most 100 ms a token.
    """
    from edged.lab.simulator.fleet_runs import ROWS, FleetCase, run_fleet

    demand_known("row", (policy,), ROWS)
    _refuse_one_box((policy,), load["speeds"])
    report = run_fleet(FleetCase(settings=load_settings(config), policy=policy, **load))

    def text() -> list[Renderable]:
        nodes = make_table("node", ">requests", ">pairs")
        for name, counts in report["nodes"].items():
            nodes.add_row(name, str(counts["requests"]), str(counts["pairs"]))
        title = f"{report['requests']} requests and {report['pairs']} pairs at {report['rate_per_s']:.2f} a second"
        return [_table([report], _BOXES, title), nodes]

    return report, text


@fleet.command()
@_POLICIES
@click.option(
    "--loads", type=Values(ABOVE_ZERO), default="0.9", metavar="SHARES", help="Of what the boxes answer of a burst."
)
@_boxes
@_SEEDS
@_JOBS
@shown
def compare(
    policies: tuple[str, ...],
    loads: tuple[float, ...],
    seeds: tuple[int, ...],
    jobs: int,
    config: Path | None,
    **load: Any,
) -> Any:
    """Simulate the boxes once for each policy, load and seed, and compare the means.

    A dash stands where a seed had more than a twentieth of its pairs unlearned two minutes after the end.
    """
    from edged.lab.simulator.fleet_runs import ROWS, FleetCase, run_fleet

    settings, policies = load_settings(config), _chosen(policies, ROWS)
    _refuse_one_box(policies, load["speeds"])
    cases = [
        FleetCase(settings=settings, policy=policy, load=share, seed=seed, **load)
        for share, seed, policy in product(loads, seeds, policies)
    ]
    runs = list(_played(run_fleet, cases, jobs))
    return {"runs": runs}, lambda: [
        _table([run for run in runs if run["load"] == share], _BOXES, f"load {share:g}, means of {len(seeds)} seeds")
        for share in loads
    ]
