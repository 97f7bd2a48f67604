"""The workload of comparisons whose arrivals are scored; it needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from edged.lab.bench.compare import ComparedLoad


@dataclass(frozen=True, slots=True)
class ScoredWorkload(ComparedLoad):
    """A workload whose arrivals are scored; the manifest of its folder records `score_arrivals`."""

    score_arrivals: bool = True

    program: ClassVar[tuple[str, ...]] = ("python", "-m", "benchmarks.report.arrivals")
