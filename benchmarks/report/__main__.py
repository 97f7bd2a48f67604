"""`python -m benchmarks.report`: the paper's figures from comparisons."""

from __future__ import annotations

from pathlib import Path

import click

from benchmarks.report.canvas import NoMatplotlib
from benchmarks.report.page import Sources, write_report
from edged.cli.main import Failure
from edged.lab.bench.compare import CompareError

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.argument(
    "folders", nargs=-1, required=True, metavar="FOLDER...", type=click.Path(file_okay=False, path_type=Path)
)
@click.option("--output", "-o", required=True, type=click.Path(file_okay=False, path_type=Path), help="Folder to fill.")
@click.option("--pruning", type=_FILE, help="JSON of python -m benchmarks.pruning, for Figure 8b.")
@click.option("--scheduler", multiple=True, type=_FILE, help="JSON of python -m benchmarks.scheduler, one per policy.")
def report(folders: tuple[Path, ...], output: Path, pruning: Path | None, scheduler: tuple[Path, ...]) -> None:
    """Draw the MACE paper's figures from the runs in FOLDERs, each number beside the paper's.

    FOLDERs are those of edged bench compare: one for each machine, measured or simulated. Needs matplotlib.
    """
    try:
        page = write_report(Sources(folders, pruning, scheduler), output)
    except (CompareError, NoMatplotlib, OSError) as error:
        raise Failure(str(error)) from None
    click.echo(page)


if __name__ == "__main__":
    report(prog_name="python -m benchmarks.report")
