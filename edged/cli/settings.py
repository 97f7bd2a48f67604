"""The settings of commands that work on a daemon's files without asking the daemon."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edged.client.client import Client, DaemonError

if TYPE_CHECKING:
    from edged.settings.load import Settings

INSTALLED_FILE = Path("/etc/edged/edged.toml")
"""What `tools/install` writes and `edged.service` reads."""
INSTALLED_DATA_DIR = "/var/lib/edged"
"""The unit's StateDirectory: where the installed daemon's data are unless its settings say otherwise."""
INSTALLED_MODELS = "/var/cache/edged/huggingface"
"""The unit's HF_HOME: where the installed daemon's downloaded models are."""


class NotReadable(DaemonError):
    """The installed daemon's settings are there, and this user may not read them."""


def settings_file(named: Path | None) -> Path | None:
    """The file that was named (--config, EDGED_CONFIG), else the installed daemon's; None where edged is not installed.

    Raises NotReadable.
    """
    if named is not None:
        return named
    try:
        INSTALLED_FILE.open().close()
    except FileNotFoundError:
        return None
    except PermissionError:
        raise NotReadable(
            f"the installed daemon's settings, {INSTALLED_FILE}, may be read by its user alone: run this with sudo, or "
            "name another daemon's with --config FILE (/dev/null: the defaults)"
        ) from None
    return INSTALLED_FILE


def load_settings(
    path: str | Path | None = None, environ: dict[str, str] | None = None, overrides: dict[str, Any] | None = None
) -> Settings:
    """`edged.settings.load.load_settings` with the policies that there are. Raises ConfigError."""
    from edged.scheduler.policies.registry import ROWS
    from edged.settings import load

    return load.load_settings(path, environ, overrides, ROWS)


def settings_of(named: Path | None, overrides: dict[str, Any] | None = None) -> Settings:
    """The settings of the daemon that is meant, with its data folder. Raises DaemonError."""
    from edged.settings.load import ConfigError

    file = settings_file(named)
    try:
        settings = load_settings(file, overrides=overrides)
    except ConfigError as error:
        raise DaemonError(str(error)) from None
    return as_installed(settings) if file == INSTALLED_FILE else settings


def served_settings(client: Client, overrides: dict[str, Any] | None = None) -> Settings | None:
    """The settings that the daemon which answers has in use, under `overrides`; None where it tells this user none."""
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
    """Whether the installed daemon is the one that is meant. Raises NotReadable."""
    return settings_file(named) == INSTALLED_FILE


def as_installed(settings: Settings) -> Settings:
    """The same with the data folder that systemd gives the installed daemon, unless they name one.

    Models are looked for where the unit has them, too, unless HF_HOME says otherwise. Call it before huggingface_hub is
    imported, which reads that then.
    """
    os.environ.setdefault("HF_HOME", INSTALLED_MODELS)
    if settings.store.data_dir:
        return settings
    return settings.model_copy(update={"store": settings.store.model_copy(update={"data_dir": INSTALLED_DATA_DIR})})
