"""The table of SECURITY.md that says which test shows each defence."""

from __future__ import annotations

import re
from pathlib import Path

TEXT = (Path(__file__).parents[1] / "SECURITY.md").read_text()


def defences() -> dict[str, list[str]]:
    """The tests that each row of the table names: a file's path, or PATH::TEST."""
    table = TEXT.partition("**What is defended, and which test shows it**")[2].partition("**What is not")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ") and not line.startswith(("| threat", "| ---"))]
    found: dict[str, list[str]] = {}
    for row in rows:
        file = ""
        found[row] = []
        for path, test in re.findall(r"`([\w/.]*?)(?:::(\w+))?`", row.rstrip(" |").rpartition("| ")[2]):
            file = path or file
            found[row].append(f"{file}::{test}" if test else file)
    return found
