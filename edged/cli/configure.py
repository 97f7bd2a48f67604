"""`edged config`: what the settings are, and a file to start from.

Owns the settings' text form. `edged.config` owns the settings themselves.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edged.cli.client import DaemonError
from edged.cli.options import json_option
from edged.cli.output import print_json

if TYPE_CHECKING:
    from edged.config import Settings

HEAD = """\
# edged's settings, each with its default. What is left out keeps its default; environment variables
# (EDGED_SECTION__KEY) and flags of `edged serve` win over this file. Start with: edged serve --config FILE
"""
HIDDEN = "(set, not shown)"


@click.group()
def config() -> None:
    """Settings of `edged serve`."""


@config.command()
@click.option("--config", "-c", "path", envvar="EDGED_CONFIG", type=click.Path(path_type=Path), help="TOML file.")
@json_option
def show(path: Path | None, as_json: bool) -> None:
    """The settings that `edged serve` would use: defaults, then the file, then the environment."""
    from edged.config import ConfigError, Settings, load_settings

    try:
        settings = load_settings(path)
    except ConfigError as error:
        raise DaemonError(str(error)) from None
    if settings.api.token:
        # What is shown ends in bug reports and logs.
        settings = settings.model_copy(update={"api": settings.api.model_copy(update={"token": HIDDEN})})
    if as_json:
        return print_json(settings.model_dump())
    return click.echo(to_toml(settings, Settings()), nl=False)


@config.command()
@click.option(
    "--output", "-o", default="edged.toml", show_default=True, type=click.Path(path_type=Path), help='"-" is stdout.'
)
@click.option("--force", is_flag=True, help="Replace an existing file.")
def init(output: Path, force: bool) -> None:
    """Write an annotated file with every setting at its default."""
    from edged.config import Settings

    text = HEAD + to_toml(Settings())
    if str(output) == "-":
        return click.echo(text, nl=False)
    try:
        with output.open("w" if force else "x") as file:
            file.write(text)
    except FileExistsError:
        raise DaemonError(f"{output} exists: choose another --output, or --force") from None
    except OSError as error:
        raise DaemonError(f"{output} cannot be written: {error.strerror}") from None
    return click.echo(f"{output} written: start with `edged serve --config {output}`")


def to_toml(settings: Settings, defaults: Settings | None = None) -> str:
    """All settings as TOML, each under its description.

    With `defaults`: one line per setting without descriptions, and a mark where it differs from them.
    """
    parts: list[str] = []
    for name in type(settings).model_fields:
        section = getattr(settings, name)
        lines = [f"\n[{name}]"] if defaults is None else [f"[{name}]"]
        if defaults is None and section.__doc__:
            lines[0] += f"  # {section.__doc__.strip().splitlines()[0]}"
        for key, field in type(section).model_fields.items():
            value = getattr(section, key)
            entry = f"{key} = {_literal(value)}"
            if defaults is None:
                lines += [f"# {field.description}"] if field.description else []
            elif value != (default := getattr(getattr(defaults, name), key)):
                entry += f"  # default: {_literal(default)}"
            lines.append(entry)
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts) if defaults is not None else "".join(parts)


def _literal(value: Any) -> str:
    """A TOML value; JSON's notation is TOML's for strings, numbers, booleans and lists of them."""
    return json.dumps(value, ensure_ascii=False)
