"""`edged token`: bearer tokens for callers over TCP.

Owns making them and showing which there are. Must not know how the daemon checks them. Needs no running daemon.
"""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

import click

from edged.cli.options import json_option
from edged.cli.output import make_console, print_json
from edged.cli.settings import settings_of
from edged.client.client import DaemonError

_BYTES = 32
"""256 random bits: nobody guesses them, with or without their hash."""


@click.group()
def token() -> None:
    """Tokens for callers over TCP."""


@token.command()
@click.argument("name")
@click.option(
    "--roles", default="use,train", show_default=True, metavar="LIST", help="Of use, train, metrics and admin."
)
@click.option("--users", default="", metavar="LIST", help='For whom it speaks: names, beginnings with "*", or "*".')
@json_option
def new(name: str, roles: str, users: str, as_json: bool) -> None:
    """Make a token, show it this once, and print the line for the settings.

    The settings keep its hash alone: whoever reads them cannot use it.
    """
    from edged.api.tokens import token_hash
    from edged.settings.load import ConfigError, load_settings
    from edged.settings.toml import to_toml_value

    secret = f"edged_{secrets.token_urlsafe(_BYTES)}"
    entry: dict[str, Any] = {"name": name, "sha256": token_hash(secret), "roles": _listed(roles)}
    if users:
        entry["users"] = _listed(users)
    try:
        load_settings(environ={}, overrides={"access.tokens": [entry]})
    except ConfigError as error:
        raise DaemonError(str(error).removeprefix("settings: ")) from None
    line = to_toml_value(entry)
    if as_json:
        return print_json({"token": secret, "toml": f"[access]\ntokens = [\n  {line},\n]", **entry})
    click.echo(f"The token, which is shown this once:\n\n  {secret}\n\nIts line for the settings file:\n")
    click.echo(f"[access]\ntokens = [\n  {line},\n]")
    return None


@token.command("list")
@click.option(
    "--config", "-c", "path", envvar="EDGED_CONFIG", type=click.Path(path_type=Path), help="TOML file [EDGED_CONFIG]."
)
@json_option
def list_(path: Path | None, as_json: bool) -> None:
    """The tokens that the settings know, without the tokens themselves."""
    tokens = settings_of(path).access.tokens
    known = [{"name": item.name, "roles": item.roles, "users": item.users} for item in tokens]
    if as_json:
        return print_json({"tokens": known})
    if not known:
        return click.echo("no token yet: edged token new NAME")
    from rich.table import Table

    table = Table("token", "roles", "speaks for")
    for item in tokens:
        speaks_for = "everybody" if "admin" in item.roles else ", ".join(item.users) or "nobody"
        table.add_row(item.name, ", ".join(item.roles), speaks_for)
    return make_console().print(table)


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]
