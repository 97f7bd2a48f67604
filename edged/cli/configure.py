"""`edged config`: what the settings are, and a file to start from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from edged.cli.options import config_option, shown
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
    return settings.model_dump(), to_toml(settings, Settings()).strip()


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
