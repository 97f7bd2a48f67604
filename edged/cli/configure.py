"""`edged config`: what the settings are, and a file to start from."""

from __future__ import annotations

from pathlib import Path

import click

from edged.cli.options import json_option
from edged.cli.output import print_json
from edged.cli.settings import settings_of
from edged.client.client import DaemonError

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
    """The settings that a daemon with this file uses: defaults, then the file, then the environment.

    Without --config they are the installed daemon's; where none is installed, what `edged serve` would use.
    """
    from edged.settings.load import Settings
    from edged.settings.toml import to_toml

    settings = settings_of(path)
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
    from edged.settings.load import Settings
    from edged.settings.toml import to_toml

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
