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


@pytest.mark.slow
def test_a_skipped_test_of_a_defence_fails_in_continuous_integration() -> None:
    name = "tests/api/test_access.py::test_lists_show_ones_own"
    run = f"pytest.main(['-q', '-p', 'no:cacheprovider', '{name}'])"
    source = f"import os, pytest; os.geteuid = lambda: 1; {run}; print('in CI'); os.environ['CI'] = 'true'; {run}"
    environment = {**os.environ, "CI": ""}
    done = subprocess.run([sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True, env=environment)
    elsewhere, _, in_ci = done.stdout.partition("in CI\n")
    assert "1 skipped" in elsewhere, done.stdout
    assert "SECURITY.md points to this test" not in elsewhere
    assert "1 error" in in_ci, done.stdout
    assert "SECURITY.md points to this test" in in_ci


def test_relative_links_of_the_security_documents_lead_somewhere() -> None:
    for document in (ROOT / "SECURITY.md", ROOT / "docs" / "security.md"):
        for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name}: {target}"
