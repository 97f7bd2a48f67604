"""`edged ask`: one question, one answer."""

from __future__ import annotations

import sys
from typing import Any

import click

from edged.cli.options import json_option, user_option, with_client
from edged.cli.output import print_json
from edged.cli.session import Options, Session
from edged.client.client import Client, DaemonError


@click.command()
@click.argument("prompt")
@user_option
@click.option("--system", default="", metavar="TEXT", help="A system message before the prompt.")
@click.option("--max-tokens", type=click.IntRange(1), help="Longest answer.")
@click.option("--temperature", type=click.FloatRange(0.0, 2.0), help="0 always gives the likeliest answer.")
@click.option("--seed", type=int, help="The same seed gives the same answer.")
@json_option
@with_client
def ask(client: Client, prompt: str, as_json: bool, **options: Any) -> None:
    """Print the answer to PROMPT as it is generated.

    PROMPT "-" reads standard input. With --json: the API's chat.completion object, whose id feedback can name.
    """
    text = sys.stdin.read() if prompt == "-" else prompt
    if not text.strip():
        raise DaemonError("the prompt is empty")
    session = Session(client, Options(**options))
    session.say(text)
    if as_json:
        return print_json(session.candidates(1))
    for piece in session.stream():
        click.echo(piece, nl=False)
    return click.echo()
