"""`edged token`: bearer tokens for callers over TCP.

Needs no running daemon.
"""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

import click

from edged.cli.options import config_option, shown
from edged.cli.output import make_table
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
@shown
def new(name: str, roles: str, users: str) -> Any:
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
    toml = f"[access]\ntokens = [\n  {line},\n]"
    told = f"The token, which is shown this once:\n\n  {secret}\n\nIts line for the settings file:\n\n{toml}"
    return {"token": secret, "toml": toml, **entry}, told


@token.command("list")
@config_option
@shown
def list_(config: Path | None) -> Any:
    """The tokens that the settings know, without the tokens themselves."""
    tokens = settings_of(config).access.tokens
    known = [{"name": item.name, "roles": item.roles, "users": item.users} for item in tokens]
    whom = ("everybody" if "admin" in item.roles else ", ".join(item.users) or "nobody" for item in tokens)
    rows = ((item.name, ", ".join(item.roles), speaks_for) for item, speaks_for in zip(tokens, whom, strict=True))
    none = "no token yet: edged token new NAME"
    return {"tokens": known}, lambda: make_table("token", "roles", "speaks for", rows=rows) if known else none


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]
