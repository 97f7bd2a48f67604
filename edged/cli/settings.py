"""The settings of commands that work on a daemon's files without the daemon, and the commands `edged config` (show and
write settings), `edged reload` (make a daemon read them again) and `edged token` (tokens of callers over TCP)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edged.cli.options import asks_daemon, config_option, explain_os_errors, shown
from edged.cli.output import echo, make_table
from edged.client.client import Client, DaemonError

if TYPE_CHECKING:
    from edged.settings.load import Settings

INSTALLED_FILE = Path("/etc/edged/edged.toml")
"""The settings file that `tools/install` writes and `edged.service` reads."""
INSTALLED_DATA_DIR = "/var/lib/edged"
"""The unit's StateDirectory: the installed daemon's data folder unless its settings name another."""
INSTALLED_MODELS = "/var/cache/edged/huggingface"
"""The unit's HF_HOME: the folder of the installed daemon's downloaded models."""
HEAD = """\
# edged's settings, each with its default. What is left out keeps its default; environment variables
# (EDGED_SECTION__KEY) and flags of `edged serve` win over this file. Start with: edged serve --config FILE
"""
HIDDEN = "(set, not shown)"
_TOKEN_BYTES = 32
"""Length of a token: 256 random bits cannot be guessed, with or without their hash."""


class NotReadable(DaemonError):
    """The error that the installed daemon's settings exist, but this user may not read them."""


def settings_file(named: Path | None) -> Path | None:
    """Return `named` (--config, EDGED_CONFIG), else the installed daemon's file; None where edged is not installed.

    Raises NotReadable.
    """
    if named is not None:
        return named
    try:
        INSTALLED_FILE.open().close()
    except FileNotFoundError:
        return None
    except PermissionError:
        way_out = "run this with sudo, or name another daemon's with --config FILE (/dev/null: the defaults)"
        closed = f"the installed daemon's settings, {INSTALLED_FILE}, may be read by its user alone"
        raise NotReadable(f"{closed}: {way_out}") from None
    return INSTALLED_FILE


def load_settings(path: str | Path | None = None, overrides: dict[str, Any] | None = None) -> Settings:
    """Call `edged.settings.load.load_settings` with the registered policies. Raises ConfigError."""
    from edged.scheduler.policies.registry import ROWS
    from edged.settings import load

    return load.load_settings(path, None, overrides, ROWS)


def settings_of(named: Path | None, overrides: dict[str, Any] | None = None) -> Settings:
    """Return the settings of `settings_file(named)`; the installed daemon's include its data folder.

    Raises NotReadable and ConfigError.
    """
    file = settings_file(named)
    settings = load_settings(file, overrides=overrides)
    return as_installed(settings) if file == INSTALLED_FILE else settings


def served_settings(client: Client, overrides: dict[str, Any] | None = None) -> Settings | None:
    """Return the running daemon's settings with `overrides`; None if no daemon gives them to this user."""
    from pydantic import ValidationError

    from edged.settings.load import Settings

    try:
        values = client.get("/v1/settings")
        for dotted, value in (overrides or {}).items():
            section, key = dotted.split(".", 1)
            values[section][key] = value or values[section][key]
        return Settings.model_validate(values)
    except (DaemonError, ValidationError):
        return None


def means_installed(named: Path | None) -> bool:
    """Whether `named` (or None) stands for the installed daemon. Raises NotReadable."""
    return settings_file(named) == INSTALLED_FILE


def as_installed(settings: Settings) -> Settings:
    """Return the settings with the data folder that systemd gives the installed daemon, unless they name one.

    HF_HOME is set to the unit's unless it is set. Call this before huggingface_hub is imported, which reads it then.
    """
    os.environ.setdefault("HF_HOME", INSTALLED_MODELS)
    if settings.store.data_dir:
        return settings
    return settings.model_copy(update={"store": settings.store.model_copy(update={"data_dir": INSTALLED_DATA_DIR})})


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
        # Users paste this output into bug reports and logs.
        settings = settings.model_copy(update={"api": settings.api.model_copy(update={"token": HIDDEN})})
    return settings.model_dump(), to_toml(settings, Settings()).strip()


@config.command()
@click.option("--output", "-o", default="edged.toml", type=click.Path(path_type=Path), help='"-" is stdout.')
@click.option("--force", is_flag=True, help="Replace an existing file.")
def init(output: Path, force: bool) -> None:
    """Write an annotated file with every setting at its default."""
    from edged.settings.load import Settings
    from edged.settings.toml import to_toml

    text = HEAD + to_toml(Settings())
    if str(output) == "-":
        return echo(text, nl=False)
    with explain_os_errors(f"{output} cannot be written"):
        try:
            file = output.open("w" if force else "x", encoding="utf-8")
        except FileExistsError:
            raise DaemonError(f"{output} exists: choose another --output, or --force") from None
        with file:
            file.write(text)
    return echo(f"{output} written: start with `edged serve --config {output}`")


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
@click.option(
    "--identity",
    metavar="WHERE",
    help="Who asks: field (of the request, the default), header:NAME, name:USER, or name for the only one of --users.",
)
@shown
def new(name: str, roles: str, users: str | None, identity: str | None) -> Any:
    """Make a token, show it this once, and print the line for the settings.

    The settings keep its hash alone: whoever reads them cannot use it.
    """
    import secrets

    from edged.settings.access import token_hash
    from edged.settings.load import ConfigError, load_settings
    from edged.settings.toml import to_toml_value

    secret = f"edged_{secrets.token_urlsafe(_TOKEN_BYTES)}"
    entry: dict[str, Any] = {"name": name, "sha256": token_hash(secret), "roles": _listed(roles)}
    if users:
        entry["users"] = _listed(users)
    if identity == "name":
        if len(entry.get("users", ())) != 1:
            raise DaemonError("--identity name takes the user from --users: name one there, or write name:USER")
        identity = f"name:{entry['users'][0]}"
    if identity:
        entry["identity"] = identity
    try:
        load_settings(environ={}, overrides={"access.tokens": [entry]})
    except ConfigError as error:
        raise DaemonError(str(error).removeprefix("settings: ")) from None
    line = to_toml_value(entry)
    toml = f"[access]\ntokens = [\n  {line},\n]"
    text = f"The token, which is shown this once:\n\n  {secret}\n\nIts line for the settings file:\n\n{toml}"
    return {"token": secret, "toml": toml, **entry}, text


@token.command("list")
@config_option
@shown
def list_(config: Path | None) -> Any:
    """The tokens that the settings know, without the tokens themselves."""
    known = [
        token.model_dump(include={"name", "roles", "users", "identity"}) for token in settings_of(config).access.tokens
    ]
    if not known:
        return {"tokens": known}, "no token yet: edged token new NAME"
    whom = ("everybody" if "admin" in item["roles"] else ", ".join(item["users"]) or "nobody" for item in known)
    rows = (
        (item["name"], ", ".join(item["roles"]), users, item["identity"])
        for item, users in zip(known, whom, strict=True)
    )
    return {"tokens": known}, lambda: make_table("token", "roles", "speaks for", "user from", rows=rows)


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]
