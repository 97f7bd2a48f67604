"""What comparisons have in common whose arrivals are scored; it needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from edged.bench.compare import Workload


@dataclass(frozen=True, slots=True)
class ScoredWorkload(Workload):
    """Runs whose arrivals are scored; the mark stays in the manifest of their folder."""

    score_arrivals: bool = True

    program: ClassVar[tuple[str, ...]] = ("python", "-m", "benchmarks.report.arrivals")
