"""The settings as TOML.

`edged.settings.load` owns the settings themselves.
"""

import json
import re
from typing import Any

from edged.settings.load import SECRET_SETTINGS, Settings


def to_toml(settings: Settings, defaults: Settings | None = None) -> str:
    """Return all settings as TOML, each under its description.

    With `defaults`: one line per setting without descriptions, and a mark where it differs from them.
    """
    lines: list[str] = []
    usual = defaults.model_dump() if defaults else {}
    for name, section in settings:
        title = (section.__doc__ or "").partition("\n")[0]
        lines.append(f"\n[{name}]" if defaults else f"\n[{name}]  # {title}")
        for key, value in section.model_dump().items():
            entry = f"{key} = {to_toml_value(value)}"
            if not defaults:
                lines.append(f"# {type(section).model_fields[key].description}")
            elif value != usual[name][key]:
                entry += f"  # default: {to_toml_value(usual[name][key])}"
            lines.append(entry)
    return "\n".join(lines) + "\n"


def to_toml_value(value: Any) -> str:
    """Return a value in TOML: JSON's notation for strings, numbers, booleans and lists of them, but not for tables."""
    if isinstance(value, dict):
        items = [f"{_key(key)} = {to_toml_value(item)}" for key, item in value.items()]
        return "{ " + ", ".join(items) + " }" if items else "{}"
    if isinstance(value, list):
        return "[" + ", ".join(map(to_toml_value, value)) + "]"
    return json.dumps(value, ensure_ascii=False)


def _key(name: str) -> str:
    """Return a key of a table, in quotes where TOML wants them."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else json.dumps(name)


def without_secrets(settings: Settings) -> Settings:
    """Return the settings with every token at its default."""
    clean = {}
    for dotted in SECRET_SETTINGS:
        name, key = dotted.split(".")
        section = getattr(settings, name)
        clean[name] = section.model_copy(update={key: type(section).model_fields[key].default})
    return settings.model_copy(update=clean)
