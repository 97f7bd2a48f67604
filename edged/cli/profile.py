"""The command `edged profile`, which measures the scheduler's prices. The engine runs inside the command."""

import os
from pathlib import Path
from typing import Any

import click

from edged.cli.options import config_option, explain_os_errors, shown
from edged.cli.output import Renderable, make_table, number, percent, progress_bar
from edged.cli.settings import settings_of


def prepare_engine() -> None:
    """Prepare the process before torch is imported, and keep progress bars of libraries off stderr."""
    from edged.runtime.process import prepare

    prepare()
    from transformers.utils import logging

    logging.disable_progress_bar()


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
    prepare_engine()
    from edged.models import find_model
    from edged.profiler.profile import profile_device
    from edged.store.data_dir import data_folder

    with explain_os_errors():
        model_dir, name = find_model(settings.model)
        named = settings.model_copy(update={"model": settings.model.model_copy(update={"name": name})})
        folder = data_folder(settings.store.data_dir, os.environ)
        with progress_bar("loading") as progress:
            measured, path = profile_device(named, model_dir, folder, output, quick, progress)
    data = {"path": str(path), **measured.model_dump(mode="json")}
    return data, lambda: profile_screen(measured.model_dump(), str(path))


def profile_screen(profile: dict[str, Any], path: str) -> Renderable:
    """Return a device profile as tables of prices, prediction errors and peak memory."""
    from rich.console import Group
    from rich.text import Text

    from edged.scheduler.cost.prices import FORWARD_PRICES

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
    peaks = make_table("work", ">modelled MiB", ">measured MiB", title="memory at the peak")
    for name, peak in profile["memory"].items():
        peaks.add_row(name, *(number(peak[key] / 2**20, 1) for key in ("modelled_bytes", "measured_bytes")))
    jitter, later = (percent(profile["noise"][name]) for name in ("jitter", "decode_after_chunk"))
    noise = f"single forwards scatter by {jitter} around their prices, decodes right after a chunk take {later} longer"
    off = Text(f"mean error of measurements that were kept out of the fit: {errors}\n{noise}")
    return Group(head, forward, units, off, *([peaks] if profile["memory"] else []))
