"""Settings of all tests."""

import os
from collections.abc import Generator
from typing import Any

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
