"""The house of docs/architecture.md: imports point downwards only."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROOF = {"bench/soak": 6}
"""The soak tries a whole daemon from outside."""


def floors() -> dict[str, int]:
    """Floor of each room, as the document's table has it."""
    table = (ROOT / "docs/architecture.md").read_text().split("## The house")[1].split("\n\n`edged/models/`")[0]
    found = {}
    for floor, rooms in re.findall(r"^\| (\d) \| (.+?) \|", table, re.MULTILINE):
        for room in re.findall(r"`(?:edged/)?([a-z_]+)(?:\.py|/)`", rooms):
            found[room] = int(floor)
    return found


def imports(path: Path) -> set[str]:
    """Rooms of edged that a file imports, also inside functions."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return {name.split(".")[1] for name in names if name.startswith("edged.")}


def test_imports_point_downwards_only() -> None:
    floor = floors()
    assert len(floor) > 20
    wrong = []
    for path in sorted((ROOT / "edged").rglob("*.py")):
        inside = path.relative_to(ROOT / "edged")
        room = inside.parts[0].removesuffix(".py")
        own = ROOF.get("/".join(inside.parts[:2]), floor.get(room))
        if own is not None:
            wrong += [f"{inside} imports {other}" for other in imports(path) if floor.get(other, 0) > own]
    assert not wrong
