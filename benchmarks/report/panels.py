"""A figure before it is drawn: panels with their numbers, and rows that compare ours with the paper's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from benchmarks.report.paper import PaperNumber


@dataclass(frozen=True, slots=True)
class Curve:
    """Values `y` over `x`, with their range over seeds if there are several; bars have names as `x`."""

    x: Sequence[float | str]
    y: Sequence[float | None]
    low: Sequence[float | None] = ()
    high: Sequence[float | None] = ()


@dataclass(frozen=True, slots=True)
class Panel:
    """One coordinate system with a curve, or a row of bars, for each name."""

    title: str
    x_label: str
    y_label: str
    curves: dict[str, Curve]
    kind: Literal["line", "bar"] = "line"


@dataclass(frozen=True, slots=True)
class ComparisonRow:
    """A comparison with the paper, as text; None if the paper has no such number."""

    what: str
    ours: str
    paper: PaperNumber | None = None


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure of the paper, from our runs; one without panels is a table alone."""

    key: str
    title: str
    rows: tuple[ComparisonRow, ...]
    panels: tuple[Panel, ...] = ()
    note: str = ""
    data: dict[str, Any] = field(default_factory=dict)
    """Further fields of the JSON file, which explain the numbers."""

    def as_json(self) -> dict[str, Any]:
        """Return the drawn numbers, for the JSON file beside the drawing."""
        return {"title": self.title, **self.data, "panels": [asdict(panel) for panel in self.panels]}


def told(value: float | None, digits: int = 2, unit: str = "") -> str:
    """Format a number for a table; a missing one is a dash."""
    return "–" if value is None else f"{value:,.{digits}f}{unit}"
