"""The parts of documents that the code says: `python -m tests.tree.documents` writes them, and tests hold them to it.

They are the annotated settings, the tables of settings and of metrics, the OpenAPI document and the index of decisions.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from edged.api.openapi import document
from edged.api.routes import ROUTES
from edged.cli.settings import HEAD
from edged.observe.catalogue import CATALOGUE
from edged.scheduler.policies.registry import ROWS
from edged.settings.load import Settings
from edged.settings.toml import to_toml

ROOT = Path(__file__).parents[2]


def table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = (titles, ["---"] * len(titles), *rows)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def section_table(section: str) -> str:
    """The table of one section of the settings."""
    model: Any = Settings.model_fields[section].annotation
    return table(("setting", "default", "allowed", "meaning"), list(settings_of(model)))


def settings_of(model: type[BaseModel], before: str = "") -> Iterator[tuple[str, str, str, str]]:
    """The rows of a model's settings, and of those in its tables."""
    schema = model.model_json_schema()["properties"]
    for key, field in model.model_fields.items():
        if isinstance(field.default, BaseModel):
            yield from settings_of(type(field.default), f"{before}{key}.")
            continue
        default, meaning = json.dumps(field.default), (field.description or "").replace("|", "\\|")
        yield f"`{before}{key}`", f"`{default}`", allowed(schema[key]), meaning


def options_table() -> str:
    """The table of the options of policies, each with the policies that read it."""
    readers: dict[tuple[str, ...], list[str]] = {}
    for row in ROWS.values():
        for option in settings_of(row.options):
            readers.setdefault(option, []).append(f"`{row.name}`")
    rows = [(*option, ", ".join(names)) for option, names in readers.items()]
    return table(("option", "default", "allowed", "meaning", "policies"), rows)


def allowed(schema: dict[str, Any]) -> str:
    """A setting's type and bounds in words."""
    if "enum" in schema:
        return ", ".join(f"`{json.dumps(value)}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{json.dumps(schema['const'])}`"
    if "anyOf" in schema:
        return " or ".join(allowed(option) for option in schema["anyOf"])
    kind = {"integer": "integer", "number": "number", "string": "text", "boolean": "true, false", "array": "list"}
    text = (kind | {"object": "table"})[schema["type"]]
    if "maximum" in schema:
        return f"{text} from {schema['minimum']:g} to {schema['maximum']:g}"
    if "minimum" in schema:
        return f"{text}, at least {schema['minimum']:g}"
    return f"{text} over {schema['exclusiveMinimum']:g}" if "exclusiveMinimum" in schema else text


def metrics_table() -> str:
    """The table of all metrics."""
    rows = [(f"`{m.name}`", m.kind, ", ".join(f"`{label}`" for label in m.labels), m.help) for m in CATALOGUE]
    return table(("metric", "type", "labels", "meaning"), rows)


def slug(title: str) -> str:
    """The anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def decisions_index(text: str) -> str:
    """The list of a page's sections, each with the headings in it."""
    sections: list[list[str]] = []
    for mark, title in re.findall(r"^(##|###) (.+)$", text, re.MULTILINE):
        link = f"[{title}](#{slug(title)})"
        if mark == "##":
            sections.append([link])
        else:
            sections[-1].append(link)
    return "\n".join(f"- {section}: {' · '.join(titles)}" for section, *titles in sections)


def _configuration(text: str) -> str:
    for section in Settings.model_fields:
        before, heading, rest = text.partition(f"\n## `[{section}]`")
        text = before + heading + _with_table(rest, section_table(section))
    return text


def _with_table(text: str, wanted: str) -> str:
    """The text with its first table of the wanted one's columns replaced by it."""
    head = re.escape(wanted.partition("\n")[0])
    return re.sub(rf"^{head}\n(?:\|.*\n)*", lambda _: f"{wanted}\n", text, count=1, flags=re.MULTILINE)


def _decisions(text: str) -> str:
    return re.sub(r"(?:^- \[.* · .*\n)+", lambda _: f"{decisions_index(text)}\n", text, count=1, flags=re.MULTILINE)


WRITTEN: dict[str, Callable[[str], str]] = {
    "configs/edged.toml": lambda _: HEAD + to_toml(Settings()),
    "docs/configuration.md": _configuration,
    "docs/openapi.json": lambda _: json.dumps(document(ROUTES), indent=1, ensure_ascii=False) + "\n",
    "docs/metrics.md": lambda text: _with_table(text, metrics_table()),
    "docs/policies.md": lambda text: _with_table(text, options_table()),
    "docs/decisions.md": _decisions,
}
"""How the text of each document comes of the text that is there."""


if __name__ == "__main__":
    for name, make in WRITTEN.items():
        file = ROOT / name
        former = file.read_text()
        if (made := make(former)) != former:
            file.write_text(made)
            print(name)
