"""The commands `edged bench federated`: campaigns that share boxes, in virtual time, and what starts are worth."""

from pathlib import Path
from typing import Any

import click

from edged.cli.options import shown
from edged.cli.output import Renderable, make_table, number, progress_bar
from edged.lab.cli.learning import learning
from edged.lab.cli.load_options import Values, demand_known

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.group()
def federated() -> None:
    """Simulate federations, with the scheduler that real ones have, and measure what starts are worth."""


federated.add_command(learning)


@federated.command()
@click.option("--workload", default="even", metavar="NAME",
              help="even, small, large, low, high, general, compute, memory, resource, toy (Figure 4.3).")  # fmt: skip
@click.option("--jobs", "campaigns", type=click.IntRange(1), default=50, help="Federated jobs.")
@click.option("--boxes", type=click.IntRange(1), default=1500, help="Boxes to synthesise.")
@click.option("--seeds", type=click.IntRange(1), default=10, help="Seeds, from 0 on.")
@click.option("--policies", type=Values(click.STRING), default="random,fifo,srsf,venn", metavar="NAMES",
              help="venn, venn-queue, srsf, fifo, random.")  # fmt: skip
@click.option("--tiers", type=click.IntRange(1), default=2, help="Tiers of boxes, of venn; 1: no matching.")
@click.option("--declared", "declares_rounds", is_flag=True, help="The scheduler knows all rounds of a job.")
@click.option("--devices", type=_FILE, metavar="CSV", help="memory_mb,tokens_per_s of each box.")
@click.option("--trace", type=_FILE, metavar="CSV", help="box,start_s,end_s: when boxes are there; repeated.")
@shown
def schedule(policies: tuple[str, ...], **load: Any) -> Any:
    """Simulate the scheduling of boxes among jobs that share them, and compare policies by the time that jobs take.

    Figures are medians over the seeds. Boxes, their hours and jobs are stand-ins, unless files give them.
    """
    from edged.federated.policies import POLICIES
    from edged.lab.bench.federated.devices import FleetError
    from edged.lab.bench.federated.schedule import TOY, WORKLOADS, ScheduleLoad, run_schedule

    demand_known("policy", policies, POLICIES)
    demand_known("workload", (load["workload"],), (*WORKLOADS, TOY))
    runs = load["seeds"] * len(policies)
    try:
        with progress_bar("simulations") as advance:
            report = run_schedule(ScheduleLoad(**load), policies, lambda ended: advance(ended, runs, "simulations"))
    except FleetError as error:
        raise click.UsageError(str(error)) from None

    def text() -> list[Renderable]:
        table = make_table("policy", ">JCT, s", ">over random", ">delay, s", ">response, s", ">aborted rounds")
        for name, row in report["policies"].items():
            table.add_row(
                name, number(row["jct_s"], 1), number(row["over_random"]), number(row["delay_s"], 1),
                number(row["response_s"], 1), number(row["aborted"], 0),
            )  # fmt: skip
        return [table, report["stand_ins"]]

    return report, text
