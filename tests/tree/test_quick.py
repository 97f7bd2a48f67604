"""`tools/test --quick` finds the tests that are nearest to a change, and begins none when its time is over."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def quick() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tools_quick", ROOT / "tools" / "quick.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("changed", "nearest"),
    [
        ("edged/align/dpo/loss.py", "tests/align/dpo/test_losses_exact.py"),
        ("edged/scheduler/policies/registry.py", "tests/scheduler/policies/test_policies.py"),
        ("docs/policies.md", "tests/scheduler/policies/test_rows.py"),
        ("tests/test_units.py", "tests/test_units.py"),
        ("pyproject.toml", "tests/test_layers.py"),
    ],
)
def test_the_nearest_tests_of_a_change_are_found(quick: ModuleType, changed: str, nearest: str) -> None:
    found = quick.nearest_tests([changed])
    assert nearest in found
    assert len(found) <= quick.MOST_FILES


def test_what_changed_is_there(quick: ModuleType) -> None:
    assert all((ROOT / name).is_file() for name in quick.changed(None))


@pytest.mark.slow
def test_no_test_begins_when_the_time_is_over() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--within=0", "tests/test_units.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0
    assert " skipped" in done.stdout
    assert " passed" not in done.stdout
