"""`edged bench report`: the paper's figures from comparisons."""

from __future__ import annotations

from pathlib import Path

import click

from edged.client.client import DaemonError

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command()
@click.argument(
    "folders", nargs=-1, required=True, metavar="FOLDER...", type=click.Path(file_okay=False, path_type=Path)
)
@click.option("--output", "-o", required=True, type=click.Path(file_okay=False, path_type=Path), help="Folder to fill.")
@click.option("--pruning", type=_FILE, help="JSON of tools/bench_pruning.py, for Figure 8b.")
@click.option("--scheduler", multiple=True, type=_FILE, help="JSON of tools/bench_scheduler.py, one per policy.")
def report(folders: tuple[Path, ...], output: Path, pruning: Path | None, scheduler: tuple[Path, ...]) -> None:
    """Draw the MACE paper's figures from the runs in FOLDERs, each number beside the paper's.

    FOLDERs are those of edged bench compare: one for each machine, measured or simulated. Needs matplotlib.
    """
    from edged.bench.compare import CompareError
    from edged.bench.report.canvas import NoMatplotlib
    from edged.bench.report.page import Sources, write_report

    try:
        page = write_report(Sources(folders, pruning, scheduler), output)
    except (CompareError, NoMatplotlib, OSError) as error:
        raise DaemonError(str(error)) from None
    click.echo(page)
