"""`edged store`: the database's size and contents, and keeping it in order now."""

from __future__ import annotations

from typing import Any

import click

from edged.cli.options import shown, with_client
from edged.cli.output import make_table, number, size
from edged.client.client import Client


@click.group()
def store() -> None:
    """The database: what it holds, how large it is."""


@store.command()
@shown
@with_client
def status(client: Client) -> Any:
    """Size, rows by table, the oldest completion."""
    data = client.get("/v1/store")
    rows = ((name, number(count), number(data["deleted"].get(name, 0))) for name, count in data["rows"].items())
    about = f"{data['path']}: {describe(data)}"
    return data, lambda: [about, make_table("table", "rows", "deleted since the start", rows=rows)]


@store.command()
@shown
@with_client
def prune(client: Client) -> Any:
    """Delete now what the settings no longer keep.

    The daemon does this by itself every ten minutes.
    """
    data = client.post("/v1/store/prune", {})
    deleted = ", ".join(f"{number(count)} of {table}" for table, count in data["deleted"].items() if count)
    return data, f"deleted: {deleted or 'nothing'}; {size(data['store']['used_bytes'])} are in use"


@store.command()
@shown
@with_client
def vacuum(client: Client) -> Any:
    """Rewrite the database without free space.

    Answers go on; what is to be stored waits until it is done. It needs room for a second copy on the disk.
    """
    data = client.post("/v1/store/vacuum", {})
    return data, f"{size(data['bytes_before'])} before, {size(data['bytes_after'])} now"


def describe(data: dict[str, Any]) -> str:
    """The database in one line."""
    most = f" of at most {size(data['max_bytes'])}" if data["max_bytes"] else ""
    oldest = data["oldest_completion"]
    since = f" since {oldest[:10]}" if oldest else ""
    log = f", {size(data['log_bytes'])} of log" if data["log_bytes"] else ""
    return f"{size(data['used_bytes'])}{most}{log}, {number(data['rows']['completions'])} completions{since}"
