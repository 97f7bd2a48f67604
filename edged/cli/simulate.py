"""`edged bench simulate`: a load on a device that is not here, in virtual time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from edged.cli.options import (
    policy_option,
    rate_option,
    retrain_rate_option,
    seed_option,
    shown,
    trace_option,
)
from edged.cli.output import show_progress
from edged.cli.settings import load_settings


class Lengths(click.ParamType):
    """PROMPT,CHOSEN,REJECTED: three numbers of tokens."""

    name = "PROMPT,CHOSEN,REJECTED"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        parts = str(value).split(",")
        if len(parts) != 3 or not all(part.strip().isdigit() and int(part) > 0 for part in parts):
            self.fail(f"{value!r} is not three numbers of tokens above 0, as 100,60,60", param, ctx)
        return tuple(map(int, parts))


@click.command()
@trace_option
@click.option("--device", "-d", required=True, metavar="NAME|FILE", help="From configs/devices, or such a file.")
@click.option(
    "--model", "-m", required=True, metavar="NAME|FILE", help="From configs/models, or a directory or config.json."
)
@click.option("--quantize", metavar="KIND", help="As model.quantize: nf4, llm-int8, int8 or int4.")
@click.option("--config", "-c", type=click.Path(path_type=Path), help="TOML file with further settings.")
@policy_option
@rate_option
@retrain_rate_option
@click.option(
    "--pair-tokens", type=Lengths(), default="100,60,60", show_default=True, help="Mean lengths of a preference pair."
)
@click.option("--seconds", type=click.FloatRange(1.0), default=60.0, show_default=True, help="Virtual time to send.")
@seed_option
@shown
def simulate(quantize: str | None, config: Path | None, policy: str | None, **load: Any) -> Any:
    """Simulate a load with learning on a device that is not here, with edged's own scheduler and caches.

    The device's times come from a roofline over its file. Nothing is loaded or downloaded; answers and pairs have
    lengths and no contents, so nothing is said about alignment.
    """
    from edged.runtime.process import prepare

    prepare()
    from edged.cli.bench import screen
    from edged.simulator.simulation import SimulationPlan
    from edged.simulator.simulation import simulate as run

    settings = load_settings(config, overrides={"scheduler.policy": policy, "model.quantize": quantize})
    report = run(SimulationPlan(settings=settings, **load), show_progress)
    return report, lambda: screen(report)
