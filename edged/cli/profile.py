"""`edged profile`: measure this device for the scheduler. The engine runs inside the command; no daemon is asked."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edged.cli.options import config_option, shown
from edged.cli.output import make_table, number, progress_bar
from edged.cli.settings import settings_of
from edged.client.client import DaemonError

if TYPE_CHECKING:
    from rich.console import RenderableType


@click.command()
@click.option("--model", "-m", metavar="DIR", help="As for edged serve.")
@config_option
@click.option("--data-dir", metavar="DIR", help="Folder in which the daemon will look for the profile.")
@click.option("--output", "-o", type=click.Path(path_type=Path), metavar="FILE", help="Write the profile here instead.")
@click.option("--quick", is_flag=True, help="Fewer shapes, fewer times.")
@shown
def profile(model: str | None, config: Path | None, data_dir: str | None, output: Path | None, quick: bool) -> Any:
    """Measure how long forwards and fine-tune units take here, and what memory they need.

    The daemon starts with these prices instead of a guess, when it serves the same model on the same device. Takes a
    few minutes for a model of some hundred million weights on a CPU; nothing else should run meanwhile.
    """
    settings = settings_of(config, {"model.path": model, "store.data_dir": data_dir})
    from edged.runtime.process import prepare

    prepare(settings.model.keep_freed_memory)
    from transformers.utils import logging as transformers_logging

    from edged.models.source import find_model
    from edged.profiler.profile import profile_device
    from edged.store.data_dir import data_folder

    transformers_logging.disable_progress_bar()
    try:
        model_dir, name = find_model(settings.model)
        named = settings.model_copy(update={"model": settings.model.model_copy(update={"name": name})})
        folder = data_folder(settings.store.data_dir, os.environ)
        with progress_bar("loading") as progress:
            measured, path = profile_device(named, model_dir, folder, output, quick, progress)
    except OSError as error:
        raise DaemonError(str(error)) from None
    data = {"path": str(path), **measured.model_dump(mode="json")}
    return data, lambda: screen(measured.model_dump(), str(path))


def screen(profile: dict[str, Any], path: str) -> RenderableType:
    """Prices, errors and memory."""
    from rich.console import Group
    from rich.text import Text

    from edged.scheduler.cost.model import FORWARD_PRICES

    subject, prices = profile["subject"], profile["prices"]
    kind = f", {subject['quantization']}" if subject["quantization"] else ""
    head = Text(f"{subject['model']} ({subject['dtype']}{kind}) on {subject['device']}: {path}", style="bold")
    forward = make_table("price", ">us", title="a forward")
    for name, price in zip(FORWARD_PRICES, prices["forward"], strict=True):
        forward.add_row(name.replace("knee", f"knee ({prices['knee_tokens']})"), number(price * 1e6, 3))
    forward.add_row("between two iterations", number(profile["overhead_s"] * 1e6, 3))
    forward.add_row("after a rest", number(profile["rest_s"] * 1e6, 3))
    units = make_table("kind", ">us", ">us/token", title="a fine-tune unit")
    for name, (once, token) in prices["units"].items():
        units.add_row(name, number(once * 1e6, 1), number(token * 1e6, 2))
    errors = ", ".join(f"{name} {number(value, 0)} %" for name, value in profile["error_percent"].items())
    memory = make_table("work", ">modelled MiB", ">measured MiB", title="memory at the peak")
    for name, peak in profile["memory"].items():
        memory.add_row(name, *(number(peak[key] / 2**20, 1) for key in ("modelled_bytes", "measured_bytes")))
    off = Text(f"mean error of measurements that were kept out of the fit: {errors}")
    return Group(head, forward, units, off, *([memory] if profile["memory"] else []))
