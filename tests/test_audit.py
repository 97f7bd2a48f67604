"""What `tools/audit` makes of pip-audit's report."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

SAFE = {"name": "yarl", "version": "1.25.1", "vulns": []}
KNOWN = {"name": "aiohttp", "version": "3.9.0", "vulns": [{"id": "PYSEC-2024-24", "fix_versions": ["3.9.2"]}]}
SKIPPED = {"name": "torch", "skip_reason": "Dependency not found on PyPI and could not be audited: torch (2.13.0)"}


@pytest.fixture(scope="module")
def audit() -> ModuleType:
    path = Path(__file__).parents[1] / "tools" / "audit.py"
    spec = importlib.util.spec_from_file_location("tools_audit", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["tools_audit"] = module
    spec.loader.exec_module(module)
    return module


def test_vulnerabilities_are_told_with_the_version_that_mends_them(audit: ModuleType) -> None:
    known = audit.understand([SAFE, KNOWN])
    assert known.vulnerabilities == ("aiohttp 3.9.0: PYSEC-2024-24, fixed in 3.9.2",)
    assert not known.problem
    assert not known.unknown


def test_what_the_database_does_not_know_does_not_count_as_checked(audit: ModuleType) -> None:
    assert audit.understand([SAFE, SKIPPED]).unknown == ("torch",)
    assert not audit.understand([SAFE, SKIPPED]).problem
    assert "knows none" in audit.understand([SKIPPED]).problem


def test_other_versions_than_the_tested_ones_are_named(audit: ModuleType) -> None:
    installed = [audit.Package(name, version, 1, ()) for name, version in (("Jinja2", "3.1.6"), ("aiohttp", "3.9.0"))]
    installed += [audit.Package("torch", "2.13.0+cpu", 1, ()), audit.Package("own", "1.0", 1, ())]
    named = audit.compare(installed, "# made by hand\njinja2==3.1.6\naiohttp==3.14.5\n")
    assert named == ["aiohttp 3.9.0: tested with 3.14.5", "own 1.0: not among those tested"]


def test_the_constraints_hold_what_the_project_and_its_networks_need(audit: ModuleType) -> None:
    project = audit.tomllib.loads((audit.ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    needed = [*project["dependencies"], *extras["fleet"], *extras["federated"]]
    pins = audit.CONSTRAINTS.read_text()
    named = {audit.canonicalize_name(line.partition("==")[0]) for line in pins.splitlines()}
    assert {audit.canonicalize_name(audit.Requirement(line).name) for line in needed} - named == {"torch"}
    # What an extra leads to, where it is installed.
    found = [audit.Package(each.metadata["Name"], each.version, 0, ()) for each in audit.requirements(needed)]
    assert not [line for line in audit.compare(found, pins) if "not among" in line]
