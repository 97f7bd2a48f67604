"""SECURITY.md points to tests that are there, and every defence points to one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.defences import defences

ROOT = Path(__file__).parents[1]


def test_every_defence_names_a_test_that_is_there() -> None:
    rows = defences()
    assert len(rows) > 10
    for row, named in rows.items():
        assert named, row
        for file, _, test in (name.partition("::") for name in named):
            text = (ROOT / file).read_text()
            assert not test or re.search(rf"def {test}\(", text), f"{file} has no {test}: {row}"


@pytest.mark.parametrize(("ci", "outcome"), [("true", "1 error"), ("", "1 skipped")])
def test_a_skipped_test_of_a_defence_fails_in_continuous_integration(ci: str, outcome: str) -> None:
    name = "tests/api/test_access.py::test_lists_show_ones_own"
    source = f"import os, pytest; os.geteuid = lambda: 1; pytest.main(['-q', '-p', 'no:cacheprovider', '{name}'])"
    command = [sys.executable, "-c", source]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "CI": ci})
    assert outcome in done.stdout, done.stdout
    assert ("SECURITY.md points to this test" in done.stdout) == bool(ci)


def test_relative_links_of_the_security_documents_lead_somewhere() -> None:
    for document in (ROOT / "SECURITY.md", ROOT / "docs" / "security.md"):
        for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name}: {target}"
