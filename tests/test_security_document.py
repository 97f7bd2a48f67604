"""SECURITY.md points to tests that are there, and every defence points to one."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "SECURITY.md").read_text()


def test_every_defence_names_a_test_that_is_there() -> None:
    table = TEXT.partition("**What is defended, and which test shows it**")[2].partition("**What is not")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ") and not line.startswith(("| threat", "| ---"))]
    assert len(rows) > 10
    for row in rows:
        named = re.findall(r"`([\w/.]*?)(?:::(\w+))?`", row.rstrip(" |").rpartition("| ")[2])
        assert named, row
        file = ""
        for path, test in named:
            file = path or file
            text = (ROOT / file).read_text()
            assert not test or re.search(rf"def {test}\(", text), f"{file} has no {test}: {row}"


def test_relative_links_of_the_security_documents_lead_somewhere() -> None:
    for document in (ROOT / "SECURITY.md", ROOT / "docs" / "security.md"):
        for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name}: {target}"
