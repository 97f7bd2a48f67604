"""One comparison that several tests look at."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.report.scored import ScoredWorkload
from edged.lab.bench.compare import Axes, compare
from tests.lab.bench.conftest import tiny_workload, workload_files

__all__ = ["compared", "workload_files"]


@pytest.fixture(scope="session")
def compared(workload_files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of one real comparison whose arrivals are scored: fcfs and mace at one point."""
    folder = tmp_path_factory.mktemp("compared") / "tiny"
    axes = Axes(("fcfs", "mace"), retrain_rates=(1.0,), seeds=(0,), rates_per_s=(3.0,))
    compare(tiny_workload(workload_files, ScoredWorkload), axes, folder)
    return folder
