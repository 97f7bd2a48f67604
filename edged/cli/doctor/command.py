"""`edged doctor`: the command."""

from __future__ import annotations

import os
import time
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edged.cli.options import config_option, shown
from edged.cli.output import make_table
from edged.cli.settings import (
    INSTALLED_FILE,
    NotReadable,
    as_installed,
    means_installed,
    settings_file,
    settings_of,
)
from edged.client.client import DaemonError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from edged.cli.doctor.finding import Finding
    from edged.settings.load import Settings

WITHIN_S = 8.0
_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


@click.command()
@config_option
@click.option("--socket", metavar="PATH", help="Where the daemon listens [EDGED_SOCKET].")
@click.option(
    "--least-free", "least_free_mb", type=click.IntRange(0), default=2048, show_default=True,
    help="Disk space that should be free / 2^20.",
)  # fmt: skip
@click.option(
    "--within", "within_s", type=click.FloatRange(1.0), default=WITHIN_S, show_default=True,
    help="Most seconds that all checks may take.",
)  # fmt: skip
@shown
def doctor(config: Path | None, socket: str | None, least_free_mb: int, within_s: float) -> Any:
    """Look for what stands in edged's way on this box.

    Device, torch, power, memory, disk, permissions, units, model, database, adapters, daemon: what was seen of each,
    and the way out. It works with and without a running daemon, and changes nothing: one that systemd's
    socket would start stays asleep. Run it as the user that edged runs as, or as root: then the rights of the
    installed service's user are looked at, not root's own.

    Exit code: 0 when all is well, 1 with warnings (edged works, but not as well as it could), 2 with failures.
    """
    from edged.cli.doctor.finding import EXIT_CODES, worst

    begun = time.monotonic()
    findings = _examine(config, socket, least_free_mb << 20, within_s)
    state = worst(findings)
    took_s = time.monotonic() - begun
    data = {"state": state, "took_s": round(took_s, 3), "findings": [asdict(item) for item in findings]}
    counts = Counter(item.state for item in findings)
    told = f"{counts['ok']} fine, {counts['warn']} warnings, {counts['fail']} failures in {took_s:.1f} s"
    return data, lambda: [_table(findings), told], EXIT_CODES[state]


def _examine(path: Path | None, socket: str | None, least_free_bytes: int, within_s: float) -> list[Finding]:
    """All findings. Unless a file is named, the settings of the daemon that answers are looked at, else those that one
    would start with; where these cannot be read, that is a finding, and the defaults are looked at."""
    from edged.cli.doctor import service
    from edged.cli.doctor.examine import examine
    from edged.cli.doctor.finding import Examination, fine
    from edged.cli.doctor.installed import service_account
    from edged.settings.addresses import socket_paths
    from edged.store.data_dir import data_folder

    settings, first = settings_to_look_with(path)
    examination = Examination(
        settings=settings,
        data_dir=data_folder(settings.store.data_dir, os.environ),
        sockets=socket_paths(socket or settings.api.socket, os.environ),
        least_free_bytes=least_free_bytes,
        within_s=within_s,
        account=service_account(Path("/")) if os.geteuid() == 0 and means_installed(path) else None,
    )
    state, running, served = service.daemon(examination)
    if served is not None and path is None:
        seen = f"those of the running daemon: model {served.model.path}, data in {served.store.data_dir}"
        first = fine(seen) if first.state != "fail" else first
        examination = replace(examination, settings=served, data_dir=Path(served.store.data_dir))
    about = [replace(first, name="settings"), replace(state, name="daemon")]
    return about + examine(replace(examination, running=running))


def settings_to_look_with(named: Path | None) -> tuple[Settings, Finding]:
    """The settings to look with, and what there is to say of them."""
    from edged.cli.doctor.finding import broken, doubtful, fine
    from edged.settings.load import Settings

    try:
        settings, file = settings_of(named), settings_file(named)
        return settings, fine(str(file) if file else "the defaults and the environment")
    except NotReadable:
        seen = f"{INSTALLED_FILE} may be read by its user alone; the defaults were looked at instead"
        return as_installed(Settings()), doubtful(seen, "`sudo edged doctor`")
    except DaemonError as error:
        instead = as_installed(Settings()) if means_installed(named) else Settings()
        return instead, broken(str(error), "correct it; the defaults were looked at instead")


def _table(findings: list[Finding]) -> RenderableType:
    from rich.box import SIMPLE_HEAD
    from rich.text import Text

    rows = ((Text(it.state, _STYLES[it.state]), it.name, Text(it.seen), Text(it.way_out)) for it in findings)
    return make_table("", "", "seen", "way out", rows=rows, fold=True, box=SIMPLE_HEAD, pad_edge=False)
