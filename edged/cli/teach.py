"""The command `edged teach`: what a user wants of all answers, in words."""

from typing import Any
from urllib.parse import quote

import click

from edged.cli.options import asks_daemon
from edged.client.client import Client


def path_of(user: str) -> str:
    """The route of a user's written preference."""
    return f"/v1/adapters/{quote(user, safe='')}/preference"


def told(preference: dict[str, Any]) -> str:
    """Return a written preference as one line; "" where there is none."""
    return f'always: "{preference["text"]}" ({preference["note"]})' if preference["text"] else ""


@click.command()
@click.argument("user")
@click.argument("text", required=False)
@click.option("--clear", is_flag=True, help="Delete what is written.")
@asks_daemon
def teach(client: Client, user: str, text: str | None, clear: bool) -> Any:
    """Tell once, as TEXT, what USER wants of all answers; without TEXT, show it.

    It is in the system prompt of USER's chats from the next answer on.
    """
    if clear and text is not None:
        raise click.UsageError("give TEXT or --clear, not both")
    change = ("DELETE",) if clear else ("GET",) if text is None else ("PUT", {"text": text})
    data = client.call(change[0], path_of(user), *change[1:])
    return data, f"{user}: {told(data) or data['note']}"
