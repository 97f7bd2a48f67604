"""The settings as TOML.

`edged.settings.load` owns the settings themselves.
"""

from __future__ import annotations

import json
from typing import Any

from edged.settings.load import Settings


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
            value = section.model_dump()[key]
            entry = f"{key} = {to_toml_value(value)}"
            if defaults is None:
                lines += [f"# {field.description}"] if field.description else []
            elif value != (default := getattr(defaults, name).model_dump()[key]):
                entry += f"  # default: {to_toml_value(default)}"
            lines.append(entry)
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts) if defaults is not None else "".join(parts)


def to_toml_value(value: Any) -> str:
    """A TOML value; JSON's notation is TOML's for strings, numbers, booleans and lists of them, but not for tables."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {to_toml_value(item)}" for key, item in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(to_toml_value, value)) + "]"
    return json.dumps(value, ensure_ascii=False)


def without_secrets(settings: Settings) -> Settings:
    """The settings with every token at its default."""
    clean = {}
    for name in type(settings).model_fields:
        section = getattr(settings, name)
        secret = {
            key: field.get_default(call_default_factory=True)
            for key, field in type(section).model_fields.items()
            if {"token", "tokens"} & set(key.split("_")) and not isinstance(getattr(section, key), int)
        }
        clean[name] = section.model_copy(update=secret)
    return settings.model_copy(update=clean)
