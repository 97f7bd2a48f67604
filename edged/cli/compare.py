"""`edged bench compare`: many replays or simulations, side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edged.cli.options import json_option
from edged.cli.output import make_console, percent, print_json, show_progress
from edged.cli.settings import load_settings
from edged.client.client import DaemonError

if TYPE_CHECKING:
    from rich.console import RenderableType

Floats = tuple[float, ...]


class Values(click.ParamType):
    """Several values in one option, separated by commas."""

    name = "list"

    def __init__(self, each: click.ParamType) -> None:
        self._each = each

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, tuple):
            return value
        parts = [part.strip() for part in value.split(",") if part.strip()]
        if not parts:
            self.fail("give at least one value", param, ctx)
        return tuple(dict.fromkeys(self._each.convert(part, param, ctx) for part in parts))


@click.command()
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option("--trace", required=True, metavar="FILE", help="As for edged bench replay.")
@click.option(
    "--pairs", type=click.Path(exists=True, dir_okay=False), help="As for edged bench replay; not for simulations."
)
@click.option("--format", "pair_format", type=click.Choice(["hh", "trl", "edged"]), default="hh", show_default=True)
@click.option("--model", "-m", default="demo", show_default=True, metavar="DIR", help="As for edged serve.")
@click.option("--config", "-c", type=click.Path(exists=True, dir_okay=False), help="TOML file with further settings.")
@click.option("--device", metavar="NAME", help="Simulate this device (edged bench simulate) instead of measuring.")
@click.option(
    "--policies", type=Values(click.STRING), default="fcfs,mace", show_default=True, metavar="NAMES", help="Policies."
)
@click.option(
    "--retrain-rates",
    type=Values(click.FloatRange(0.0, 1.0)),
    default="0.1",
    show_default=True,
    metavar="SHARES",
    help="Pairs per request.",
)
@click.option(
    "--rates",
    type=Values(click.FloatRange(0.0, min_open=True)),
    default=(),
    metavar="RATES",
    help="Requests per second.",
)
@click.option(
    "--loads",
    type=Values(click.FloatRange(0.0, min_open=True)),
    default=(),
    metavar="SHARES",
    help="Rates as shares of the requests per second of a burst, which is measured once; default: 0.7.",
)
@click.option("--seeds", type=Values(click.IntRange(0)), default="0,1,2", show_default=True, metavar="NUMBERS")
@click.option("--seconds", type=click.FloatRange(1.0), default=60.0, show_default=True, help="How long each sends.")
@click.option("--score-arrivals", is_flag=True, help="As for edged bench replay.")
@click.option("--jobs", type=click.IntRange(1), default=1, show_default=True, help="Simulations at once.")
@json_option
def compare(
    folder: Path,
    trace: str,
    pairs: str | None,
    pair_format: str,
    model: str,
    config: str | None,
    device: str | None,
    policies: tuple[str, ...],
    retrain_rates: Floats,
    rates: Floats,
    loads: Floats,
    seeds: tuple[int, ...],
    seconds: float,
    score_arrivals: bool,
    jobs: int,
    as_json: bool,
) -> None:
    """Run every policy at every retrain rate, request rate and seed, and compare their figures.

    Lists are separated by commas. Each run is a process of its own; policies take turns. FOLDER gets one JSON per run:
    called again, the command does only what is missing or failed.
    """
    from edged.bench.compare import Axes, CompareError, Workload
    from edged.bench.compare import compare as run
    from edged.bench.summary import Runs, summarise
    from edged.settings.load import ConfigError

    if bool(pairs) == bool(device):
        raise DaemonError("give --pairs to measure this machine, or --device to simulate one, which learns nothing")
    if score_arrivals and device:
        raise DaemonError("--score-arrivals needs real pairs: not with --device")
    if jobs > 1 and not device:
        raise DaemonError("--jobs is for simulations (--device): runs that are measured at once disturb each other")
    workload = Workload(trace, model, seconds, pairs, pair_format, config, device, score_arrivals)
    axes = Axes(policies, retrain_rates, seeds, rates, loads or (() if rates else (0.7,)))
    try:
        for policy in policies:
            load_settings(Path(config) if config else None, overrides={"scheduler.policy": policy})
        manifest = run(workload, axes, folder, show_progress, jobs)
        runs = Runs.read(folder)
    except (CompareError, ConfigError, OSError) as error:
        raise DaemonError(str(error)) from None
    rows = summarise(runs)
    if as_json:
        capacity = manifest["capacity_per_s"]
        print_json({"folder": str(folder), "capacity_per_s": capacity, "rows": rows, "failed": runs.failed})
    else:
        make_console().print(table(rows))
        for name, reason in runs.failed.items():
            click.echo(f"{name} failed: {reason}", err=True)


def table(rows: list[dict[str, Any]]) -> RenderableType:
    """Medians with their range over seeds, and under them the ratios to adainf's and to fcfs'."""
    from rich.table import Table

    from edged.bench.summary import BASELINES, METRICS

    shown = Table(
        caption=f"median (range) over seeds; below: ratios to {' and '.join(BASELINES)} at the same seeds",
        caption_justify="left",
    )
    shown.add_column("requests/s")
    shown.add_column("retrain")
    shown.add_column("policy")
    for metric in METRICS:
        shown.add_column(metric.title, justify="right")
    for row in rows:
        load = "" if row["load"] is None else f" ({percent(row['load'])})"
        cells = []
        for metric in METRICS:
            values = row["metrics"][metric.path]
            ratios = " ".join("–" if not (ratio := values[f"to_{b}"]) else f"{ratio['median']:.2f}x" for b in BASELINES)
            cells.append(f"{middle(values['value'], metric.digits)}\n{ratios}")
        shown.add_row(f"{row['rate_per_s']:.2f}{load}", percent(row["retrain_rate"]), row["policy"], *cells)
    return shown


def middle(value: dict[str, float] | None, digits: int) -> str:
    """A median with its range."""
    if value is None:
        return "–"
    median, low, high = (f"{value[key]:,.{digits}f}" for key in ("median", "low", "high"))
    return median if low == high else f"{median} ({low}–{high})"
