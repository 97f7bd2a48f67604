"""Typed settings of edged: a TOML file, the environment and flags, in rising order of precedence.

What can be set is in `edged.settings.sections` and `edged.settings.access`, whose names everybody else imports from
here.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError

from edged.settings.access import USER_NAME as USER_NAME
from edged.settings.access import AccessSettings as AccessSettings
from edged.settings.access import LimitSettings as LimitSettings
from edged.settings.sections import AlignSettings as AlignSettings
from edged.settings.sections import ApiSettings as ApiSettings
from edged.settings.sections import CacheSettings as CacheSettings
from edged.settings.sections import FeedbackSettings as FeedbackSettings
from edged.settings.sections import GovernorSettings as GovernorSettings
from edged.settings.sections import GuardSettings as GuardSettings
from edged.settings.sections import LogSettings as LogSettings
from edged.settings.sections import MetricsSettings as MetricsSettings
from edged.settings.sections import ModelSettings as ModelSettings
from edged.settings.sections import SchedulerSettings as SchedulerSettings
from edged.settings.sections import Section
from edged.settings.sections import ServingSettings as ServingSettings
from edged.settings.sections import StoreSettings as StoreSettings
from edged.settings.sections import minutes_of as minutes_of

_SECRET_SETTINGS = ("api.token", "access.tokens")


class ConfigError(ValueError):
    """A setting is unknown, of the wrong type or out of bounds; the message names it and the way out."""


class Settings(Section):
    """All settings of one daemon."""

    model: ModelSettings = ModelSettings()
    serving: ServingSettings = ServingSettings()
    cache: CacheSettings = CacheSettings()
    scheduler: SchedulerSettings = SchedulerSettings()
    align: AlignSettings = AlignSettings()
    feedback: FeedbackSettings = FeedbackSettings()
    guard: GuardSettings = GuardSettings()
    governor: GovernorSettings = GovernorSettings()
    api: ApiSettings = ApiSettings()
    access: AccessSettings = AccessSettings()
    limits: LimitSettings = LimitSettings()
    store: StoreSettings = StoreSettings()
    log: LogSettings = LogSettings()
    metrics: MetricsSettings = MetricsSettings()


def load_settings(
    path: str | Path | None = None,
    environ: dict[str, str] | None = None,
    overrides: dict[str, Any] | None = None,
    policies: Collection[str] = (),
) -> Settings:
    """Settings from a TOML file, then `EDGED_SECTION__KEY` variables, then dotted `overrides`.

    `scheduler.policy` must be one of `policies`, where they are given: composition knows which there are.
    Raises ConfigError that names the file, the key and the nearest valid name.
    """
    values: dict[str, Any] = {}
    source = "settings"
    if path is not None:
        source = str(path)
        try:
            values = tomllib.loads(Path(path).read_text())
        except FileNotFoundError:
            raise ConfigError(f'config file "{path}" does not exist: `edged config init` writes one') from None
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(f'config file "{path}" cannot be read: {error}') from None
    for name, value in sorted((dict(os.environ) if environ is None else environ).items()):
        if name.startswith("EDGED_") and "__" in name:
            section, key = name[len("EDGED_") :].lower().split("__", 1)
            _override(values, section, key, value, source)
    for dotted, value in (overrides or {}).items():
        if value is not None:
            section, key = dotted.split(".", 1)
            _override(values, section, key, value, source)
    try:
        return Settings.model_validate(values, context={"policies": policies})
    except ValidationError as error:
        raise ConfigError(f"{source}: " + "; ".join(_explain(item) for item in error.errors())) from None


def _override(values: dict[str, Any], section: str, key: str, value: Any, source: str) -> None:
    known = values.setdefault(section, {})
    if not isinstance(known, dict):
        told = "" if _is_secret(section) else f" = {known!r}"
        raise ConfigError(f'{source}: "{section}"{told} is not a section: write [{section}] above its settings')
    known[key] = value


def _explain(item: Any) -> str:
    """One validation error as a sentence: the dotted name, the value, the way out."""
    where = [str(part) for part in item["loc"]]
    dotted = ".".join(where)
    if item["type"] == "extra_forbidden":
        return f'unknown setting "{dotted}": {_nearest(where[-1], _fields_at(where[:-1]))}'
    if item["type"] == "literal_error":
        choices = re.findall(r"'([^']*)'", item["ctx"]["expected"])
        return f'setting "{dotted}" = {item["input"]!r}: {_nearest(str(item["input"]), choices)}'
    if item["type"] == "edged" or _is_secret(dotted):
        # What was meant to be a token is nobody's to read.
        return f'setting "{dotted}": {item["msg"]}'
    return f'setting "{dotted}" = {item["input"]!r}: {item["msg"]}'


def _is_secret(dotted: str) -> bool:
    """Whether a secret is in this setting's value, or may be: it lies under the name, or the name under it."""
    return any(f"{dotted}.".startswith(f"{name}.") or f"{name}.".startswith(f"{dotted}.") for name in _SECRET_SETTINGS)


def _nearest(name: str, known: Iterable[str]) -> str:
    """What may have been meant by a name that is not one of `known`."""
    near = difflib.get_close_matches(name.lower(), known, n=1)
    return f'did you mean "{near[0]}"?' if near else "known: " + ", ".join(known)


def _fields_at(where: Iterable[str]) -> dict[str, Any]:
    """The settings of a section, or of a table in one of its lists."""
    model: Any = Settings
    for part in where:
        if not part.isdigit():
            model = model.model_fields[part].annotation
            model = get_args(model)[0] if get_args(model) else model
    return dict(model.model_fields)
