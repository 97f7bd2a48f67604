"""`edged reload`: have the daemon read its settings again."""

from __future__ import annotations

from typing import Any

import click

from edged.cli.options import json_option, with_client
from edged.cli.output import print_json
from edged.client.client import Client


@click.command()
@json_option
@with_client
def reload(client: Client, as_json: bool) -> None:
    """Apply changes of the settings file.

    The daemon reads the file that it was started with again (environment and flags still win over it), applies what
    can change while it runs, and names what needs a restart. A file with a mistake changes nothing.
    """
    data = client.post("/v1/reload", {})
    if as_json:
        return print_json(data)
    for change in data["applied"]:
        click.echo(f"applied: {_change(change)}")
    for change in data["needs_restart"]:
        click.echo(f"needs a restart: {_change(change)}")
    if not data["applied"] and not data["needs_restart"]:
        click.echo("nothing has changed")
    return None


def _change(change: dict[str, Any]) -> str:
    return f"{change['setting']}: {change['old']} -> {change['new']}"
