"""`edged config`, `edged reload` and `edged token`: what the settings are, a file to start from, how a daemon reads it
again, and who may call over TCP."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

import click

from edged.cli.options import asks_daemon, config_option, explain_os_errors, shown
from edged.cli.output import make_table
from edged.cli.settings import settings_of
from edged.client.client import Client, DaemonError

HEAD = """\
# edged's settings, each with its default. What is left out keeps its default; environment variables
# (EDGED_SECTION__KEY) and flags of `edged serve` win over this file. Start with: edged serve --config FILE
"""
HIDDEN = "(set, not shown)"
_TOKEN_BYTES = 32
"""256 random bits: nobody guesses them, with or without their hash."""


@click.group()
def config() -> None:
    """Settings of `edged serve`."""


@config.command()
@config_option
@shown
def show(config: Path | None) -> Any:
    """The settings that a daemon with this file uses: defaults, then the file, then the environment.

    Without --config they are the installed daemon's; where none is installed, what `edged serve` would use.
    """
    from edged.settings.load import Settings
    from edged.settings.toml import to_toml

    settings = settings_of(config)
    if settings.api.token:
        # What is shown ends in bug reports and logs.
        settings = settings.model_copy(update={"api": settings.api.model_copy(update={"token": HIDDEN})})
    return settings.model_dump(), to_toml(settings, Settings()).removesuffix("\n")


@config.command()
@click.option("--output", "-o", default="edged.toml", type=click.Path(path_type=Path), help='"-" is stdout.')
@click.option("--force", is_flag=True, help="Replace an existing file.")
def init(output: Path, force: bool) -> None:
    """Write an annotated file with every setting at its default."""
    from edged.settings.load import Settings
    from edged.settings.toml import to_toml

    text = HEAD + to_toml(Settings())
    if str(output) == "-":
        return click.echo(text, nl=False)
    if output.exists() and not force:
        raise DaemonError(f"{output} exists: choose another --output, or --force")
    with explain_os_errors(f"{output} cannot be written"):
        output.write_text(text)
    return click.echo(f"{output} written: start with `edged serve --config {output}`")


@click.command()
@asks_daemon
def reload(client: Client) -> Any:
    """Apply changes of the settings file.

    The daemon reads the file that it was started with again (environment and flags still win over it), applies what
    can change while it runs, and names what needs a restart. A file with a mistake changes nothing.
    """
    data = client.post("/v1/reload", {})
    changes = [
        f"{outcome}: {change['setting']}: {change['old']} -> {change['new']}"
        for outcome, key in (("applied", "applied"), ("needs a restart", "needs_restart"))
        for change in data[key]
    ]
    return data, changes or "nothing has changed"


@click.group()
def token() -> None:
    """Tokens for callers over TCP."""


@token.command()
@click.argument("name")
@click.option("--roles", default="use,train", metavar="LIST", help="Of use, train, metrics and admin.")
@click.option("--users", metavar="LIST", help='For whom it speaks: names, beginnings with "*", or "*".')
@shown
def new(name: str, roles: str, users: str | None) -> Any:
    """Make a token, show it this once, and print the line for the settings.

    The settings keep its hash alone: whoever reads them cannot use it.
    """
    from edged.api.tokens import token_hash
    from edged.settings.load import ConfigError, load_settings
    from edged.settings.toml import to_toml_value

    secret = f"edged_{secrets.token_urlsafe(_TOKEN_BYTES)}"
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
    known = [token.model_dump(include={"name", "roles", "users"}) for token in settings_of(config).access.tokens]
    if not known:
        return {"tokens": known}, "no token yet: edged token new NAME"
    whom = ("everybody" if "admin" in item["roles"] else ", ".join(item["users"]) or "nobody" for item in known)
    rows = ((item["name"], ", ".join(item["roles"]), users) for item, users in zip(known, whom, strict=True))
    return {"tokens": known}, lambda: make_table("token", "roles", "speaks for", rows=rows)


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]
