"""`edged reload`: have the daemon read its settings again."""

from __future__ import annotations

from typing import Any

import click

from edged.cli.options import shown, with_client
from edged.client.client import Client


@click.command()
@shown
@with_client
def reload(client: Client) -> Any:
    """Apply changes of the settings file.

    The daemon reads the file that it was started with again (environment and flags still win over it), applies what
    can change while it runs, and names what needs a restart. A file with a mistake changes nothing.
    """
    data = client.post("/v1/reload", {})
    applied = [f"applied: {_change(change)}" for change in data["applied"]]
    restart = [f"needs a restart: {_change(change)}" for change in data["needs_restart"]]
    return data, applied + restart or "nothing has changed"


def _change(change: dict[str, Any]) -> str:
    return f"{change['setting']}: {change['old']} -> {change['new']}"
