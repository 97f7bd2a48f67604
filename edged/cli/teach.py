"""The command `edged teach`: what a user wants of all answers, in words."""

from typing import Any
from urllib.parse import quote

import click

from edged.cli.options import asks_daemon
from edged.client.client import Client, DaemonError


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
@click.option("--strike", metavar="LINE", help="Never believe LINE of USER again, as `edged adapters show` has it.")
@click.option("--unstrike", metavar="LINE", help="Let LINE be believed again.")
@asks_daemon
def teach(client: Client, user: str, text: str | None, clear: bool, strike: str | None, unstrike: str | None) -> Any:
    """Tell once, as TEXT, what USER wants of all answers; without TEXT, show it.

    It is in the system prompt of USER's chats from the next answer on.
    """
    if sum((clear, text is not None, strike is not None, unstrike is not None)) > 1:
        raise click.UsageError("give one of TEXT, --clear, --strike and --unstrike")
    if strike is not None or unstrike is not None:
        return _strike(client, user, strike or unstrike or "", unstrike is not None)
    change = ("DELETE",) if clear else ("GET",) if text is None else ("PUT", {"text": text})
    data = client.call(change[0], path_of(user), *change[1:])
    return data, f"{user}: {told(data) or data['note']}"


def _strike(client: Client, user: str, line: str, undo: bool) -> Any:
    """Strike a belief, by its words or its key, or undo that by its key. Raises DaemonError for a line unheard of."""
    path = path_of(user).removesuffix("/preference")
    found = client.get(path)
    # The first of two lines of the same words: what edits share comes before what the taste model has of it.
    keys = {each["text"]: each["key"] for each in reversed(found["beliefs"] or ())}
    known = found["struck"] or [] if undo else [*keys.values()]
    key = keys.get(line, line)
    if key not in known:
        lines = ", ".join(f'"{each}"' for each in (known if undo else keys)) or "none"
        raise DaemonError(f'"{line}" is no {"struck line" if undo else "line"} of {user}: there are {lines}')
    data = client.post(f"{path}/strike", {"key": key, "undo": undo})
    return data, f"{user}: struck are {', '.join(data['struck']) or 'no lines'}"
