"""The command `edged doctor`."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edged.cli.options import config_option, shown
from edged.cli.output import Renderable, make_table

if TYPE_CHECKING:
    from edged.cli.doctor.finding import Finding

_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


@click.command()
@config_option
@click.option("--socket", metavar="PATH", help="Where the daemon listens [EDGED_SOCKET].")
@click.option(
    "--least-free", "min_free_mb", type=click.IntRange(0), default=2048, help="Disk space that should be free / 2^20."
)
@click.option(
    "--within", "within_s", type=click.FloatRange(1.0), default=8.0, help="Most seconds that all checks may take."
)
@shown
def doctor(config: Path | None, socket: str | None, min_free_mb: int, within_s: float) -> Any:
    """Look for what stands in edged's way on this box.

    Device, torch, power, memory, disk, permissions, units, model, database, adapters, daemon: what was seen of each,
    and the way out. It works with and without a running daemon, and changes nothing: one that systemd's
    socket would start stays asleep. Run it as the user that edged runs as, or as root: then the rights of the
    installed service's user are looked at, not root's own.

    Exit code: 0 when all is well, 1 with warnings (edged works, but not as well as it could), 2 with failures.
    """
    begun = time.monotonic()
    from edged.cli.doctor.examine import examine
    from edged.cli.doctor.finding import EXIT_CODES, worst

    findings = examine(config, socket, min_free_mb << 20, within_s)
    state, took_s = worst(findings), time.monotonic() - begun
    data = {"state": state, "took_s": round(took_s, 3), "findings": [asdict(item) for item in findings]}
    counts = Counter(item.state for item in findings)
    summary = f"{counts['ok']} fine, {counts['warn']} warnings, {counts['fail']} failures in {took_s:.1f} s"
    return data, lambda: [findings_table(findings), summary], EXIT_CODES[state]


def findings_table(findings: Sequence[Finding]) -> Renderable:
    """Return a table of findings: state, name, what was seen, and the way out."""
    from rich.box import SIMPLE_HEAD
    from rich.text import Text

    rows = ((Text(it.state, _STYLES[it.state]), it.name, Text(it.seen), Text(it.way_out)) for it in findings)
    return make_table("", "", "seen", "way out", rows=rows, fold=True, box=SIMPLE_HEAD, pad_edge=False)
