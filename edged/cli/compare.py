"""`edged bench compare`: many replays or simulations, side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edged.cli.options import pair_format_option, shown
from edged.cli.output import make_table, percent, show_progress
from edged.cli.settings import load_settings
from edged.client.client import DaemonError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from edged.bench.compare import Workload

Floats = tuple[float, ...]
_ABOVE_ZERO = click.FloatRange(0.0, min_open=True)


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
@pair_format_option
@click.option("--model", "-m", default="demo", show_default=True, metavar="DIR", help="As for edged serve.")
@click.option("--config", "-c", type=click.Path(exists=True, dir_okay=False), help="TOML file with further settings.")
@click.option("--device", metavar="NAME", help="Simulate this device (edged bench simulate) instead of measuring.")
@click.option(
    "--policies", type=Values(click.STRING), default="fcfs,mace", show_default=True, metavar="NAMES", help="Policies."
)
@click.option(
    "--retrain-rates", type=Values(click.FloatRange(0.0, 1.0)), default="0.1", show_default=True, metavar="SHARES",
    help="Pairs per request.",
)  # fmt: skip
@click.option("--rates", type=Values(_ABOVE_ZERO), default=(), metavar="RATES", help="Requests per second.")
@click.option(
    "--loads", type=Values(_ABOVE_ZERO), default=(), metavar="SHARES",
    help="Rates as shares of the requests per second of a burst, which is measured once; default: 0.7.",
)  # fmt: skip
@click.option("--seeds", type=Values(click.IntRange(0)), default="0,1,2", show_default=True, metavar="NUMBERS")
@click.option("--seconds", type=click.FloatRange(1.0), default=60.0, show_default=True, help="How long each sends.")
@click.option("--jobs", type=click.IntRange(1), default=1, show_default=True, help="Simulations at once.")
@shown
def compare(
    folder: Path,
    policies: tuple[str, ...],
    retrain_rates: Floats,
    rates: Floats,
    loads: Floats,
    seeds: tuple[int, ...],
    jobs: int,
    kind: type[Workload] | None = None,
    **load: Any,
) -> Any:
    """Run every policy at every retrain rate, request rate and seed, and compare their figures.

    Lists are separated by commas. Each run is a process of its own; policies take turns. FOLDER gets one JSON per run:
    called again, the command does only what is missing or failed.
    """
    from edged.bench.compare import Axes, Workload
    from edged.bench.compare import compare as run
    from edged.bench.summary import Runs, summarise

    if bool(load["pairs"]) == bool(load["device"]):
        raise DaemonError("give --pairs to measure this machine, or --device to simulate one, which learns nothing")
    if jobs > 1 and not load["device"]:
        raise DaemonError("--jobs is for simulations (--device): runs that are measured at once disturb each other")
    workload = (kind or Workload)(**load)
    axes = Axes(policies, retrain_rates, seeds, rates, loads or (() if rates else (0.7,)))
    for policy in policies:
        load_settings(workload.config and Path(workload.config), overrides={"scheduler.policy": policy})
    try:
        manifest = run(workload, axes, folder, show_progress, jobs)
        runs = Runs.read(folder)
    except OSError as error:
        raise DaemonError(str(error)) from None
    rows, capacity = summarise(runs), manifest["capacity_per_s"]

    def text() -> RenderableType:
        for name, reason in runs.failed.items():
            click.echo(f"{name} failed: {reason}", err=True)
        return table(rows)

    return {"folder": str(folder), "capacity_per_s": capacity, "rows": rows, "failed": runs.failed}, text


def table(rows: list[dict[str, Any]]) -> RenderableType:
    """Medians with their range over seeds, and under them the ratios to adainf's and to fcfs'."""
    from edged.bench.summary import BASELINES, METRICS

    def cell(values: dict[str, Any], digits: int) -> str:
        ratios = ("–" if not (ratio := values[f"to_{name}"]) else f"{ratio['median']:.2f}x" for name in BASELINES)
        return f"{middle(values['value'], digits)}\n{' '.join(ratios)}"

    made = make_table(
        *("requests/s", "retrain", "policy", *(f">{metric.title}" for metric in METRICS)),
        caption=f"median (range) over seeds; below: ratios to {' and '.join(BASELINES)} at the same seeds",
    )
    for row in rows:
        share = "" if row["load"] is None else f" ({percent(row['load'])})"
        cells = (cell(row["metrics"][metric.path], metric.digits) for metric in METRICS)
        made.add_row(f"{row['rate_per_s']:.2f}{share}", percent(row["retrain_rate"]), row["policy"], *cells)
    return made


def middle(value: dict[str, float] | None, digits: int) -> str:
    """A median with its range."""
    if value is None:
        return "–"
    median, low, high = (f"{value[key]:,.{digits}f}" for key in ("median", "low", "high"))
    return median if low == high else f"{median} ({low}–{high})"
