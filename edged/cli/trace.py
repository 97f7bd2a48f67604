"""The command `edged trace`, which writes the engine's recent iterations as a trace for ui.perfetto.dev."""

import json
import os
import time
from pathlib import Path
from typing import Any

import click

from edged.cli.options import asks_daemon, explain_os_errors
from edged.cli.output import number, show_progress
from edged.client.client import Client, DaemonError

_SAY_EVERY = 20_000
"""Lines between two progress reports."""


@click.command()
@click.option(
    "--seconds", "-s", type=click.FloatRange(0.0, 600.0, min_open=True), default=10.0, help="How long a time."
)
@click.option("--output", "-o", default="edged-trace.json", type=click.Path(path_type=Path))
@click.option("--record", is_flag=True, help="The next SECONDS instead of the last ones.")
@asks_daemon
def trace(client: Client, seconds: float, output: Path, record: bool) -> Any:
    """Write what the engine did in the last SECONDS as a trace.

    Iterations with their bins, decisions, forwards, units, tasks and preemptions, and how pages, queue and latency
    went. Open the file in https://ui.perfetto.dev (it stays on your machine) or chrome://tracing.
    """
    if record:
        _wait(seconds)
    facts, events = _download(client, f"/v1/trace?seconds={seconds:g}", output)
    text = f"{output}: {number(facts['iterations'])} iterations of {seconds:g} s, {number(events)} events"
    if not facts["iterations"]:
        text = f"{output}: nothing was served or learned within {seconds:g} s, so there are no iterations"
    data = {"file": str(output), "events": events, **facts}
    return data, f"{text}; open it in https://ui.perfetto.dev"


def _wait(seconds: float) -> None:
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0.0:
        show_progress(f"recording: {left:.0f} s left")
        time.sleep(min(1.0, left))


def _download(client: Client, path: str, output: Path) -> tuple[dict[str, Any], int]:
    """Write the trace at `path` to `output`, whole or not at all; returns its `otherData` and its number of events."""
    count, head, line = 0, b"", b""
    with explain_os_errors(f"{output} cannot be written"):
        draft = output.with_name(f".{output.name}.{os.getpid()}")
        try:
            with draft.open("wb") as file:
                for count, line in enumerate(client.lines(path), 1):
                    file.write(line + b"\n")
                    head = head or line
                    if count % _SAY_EVERY == 0:
                        show_progress(f"{count:,} events")
            # The first line opens the list of events, the last one closes it.
            if line != b"]}":
                raise DaemonError(f"the daemon at {client.address} ended the trace before it was complete")
            draft.replace(output)
        finally:
            draft.unlink(missing_ok=True)
    return json.loads(head + b"]}")["otherData"], count - 2
