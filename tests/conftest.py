"""Settings of all tests."""

import gc
import os
import time
from collections.abc import Generator
from typing import Any

import psutil
import pytest
import torch
from hypothesis import settings

from tests.defences import defences

if not torch.cuda.is_available():
    # Triton's kernels run in its interpreter. Read when triton is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")

# No timing assertions: a busy machine must not fail a property.
settings.register_profile("edged", deadline=None)
settings.load_profile("edged")

DEFENCES = {name for named in defences().values() for name in named}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--within", type=float, metavar="SECONDS", help="begin no test after this time, and say so")


def pytest_collection_finish() -> None:
    """Search what was imported for garbage no more: each time it would take longer than most tests."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what would begin later after the start of this process than `--within` says."""
    within = item.config.getoption("--within", None)
    if within is not None and time.time() > psutil.Process().create_time() + within:
        pytest.skip(f"the {within:.0f} s of --within are over: `tools/test` runs all")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    """In continuous integration a test that shows a defence fails where it would be skipped."""
    report = yield
    test = item.nodeid.partition("[")[0]
    if report.skipped and os.environ.get("CI") and {test, test.partition("::")[0]} & DEFENCES:
        report.outcome, report.longrepr = (
            "failed",
            f"SECURITY.md points to this test, and it was skipped: {report.longrepr}",
        )
    return report


@pytest.fixture
def each_version_is_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines of this process test each version, not each eighth."""
    monkeypatch.setattr("edged.align.pair_queues.EVALUATE_EVERY", 1)


@pytest.fixture
def two_held_out_pairs_suffice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards of this process judge from two held-out pairs on."""
    monkeypatch.setattr("edged.align.guard.MIN_PAIRS", 2)
    monkeypatch.setattr("edged.align.pair_queues.MIN_PAIRS", 2)
