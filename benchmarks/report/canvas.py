"""Drawing of panels as SVG files."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

from benchmarks.report.panels import Figure, Panel

_WIDTH_IN, _HEIGHT_IN = 4.2, 3.0
_COMMENT, _PATH = re.compile(r"<!--.*?-->", re.DOTALL), re.compile(r' d="[^"]*"')
_LONG_NUMBER = re.compile(r"(\d+\.\d)\d+")
_COLOURS = {
    "mace": "#1b6ca8",
    "mace-paper": "#7fb2d9",
    "adainf": "#d1495b",
    "ekya": "#edae49",
    "fcfs": "#7d8597",
    "periodic-async": "#b08968",
    "sync": "#a4508b",
    "mace-bin": "#2a9d8f",
    "mace-prefix": "#66a182",
    "mace-prune": "#8d99ae",
    "mace-priority": "#5e548e",
    "no retraining": "#000000",
    "pruned": "#1b6ca8",
    "not pruned": "#7d8597",
}


class NoMatplotlib(RuntimeError):
    """Figures cannot be drawn without matplotlib; the message says how to install it."""


class Canvas:
    """Draws figures into a folder."""

    def __init__(self, folder: Path) -> None:
        """Open a folder for figures. Raises NoMatplotlib."""
        try:
            import matplotlib
        except ImportError:
            raise NoMatplotlib(
                "figures are drawn with matplotlib, which is not installed: pip install 'edged[report]'"
            ) from None
        # Text stays text, and the same data gives the same file.
        font = {"font.size": 9, "font.sans-serif": ["DejaVu Sans"]}
        matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "edged", **font})
        self._folder = folder

    def draw(self, figure: Figure, name: str) -> Path:
        """Draw the figure's panels side by side; return the SVG file."""
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure as Sheet

        sheet = Sheet(figsize=(_WIDTH_IN * len(figure.panels), _HEIGHT_IN), layout="constrained")
        FigureCanvasSVG(sheet)
        named: tuple[str, ...] = ()
        for axes, panel in zip(sheet.subplots(1, len(figure.panels), squeeze=False)[0], figure.panels, strict=True):
            (_bars if panel.kind == "bar" else _lines)(axes, panel)
            axes.set_title(panel.title)
            axes.set_xlabel(panel.x_label)
            axes.set_ylabel(panel.y_label)
            axes.grid(axis="y", linewidth=0.4, alpha=0.5)
            axes.spines[["top", "right"]].set_visible(False)
            if len(panel.curves) > 1 and tuple(panel.curves) != named:
                axes.legend(fontsize=7, frameon=False)
                named = tuple(panel.curves)
        path = self._folder / f"{name}.svg"
        text = io.StringIO()
        sheet.savefig(text, format="svg", metadata={"Date": None})
        path.write_text(compact(text.getvalue()))
        return path


def compact(svg: str) -> str:
    """Return the same drawing in less text: paths to a tenth of a point, no comments, no indentation."""
    svg = _PATH.sub(lambda found: _LONG_NUMBER.sub(r"\1", found[0].replace("\n", " ")), _COMMENT.sub("", svg))
    return "\n".join(line.strip() for line in svg.splitlines() if line.strip()) + "\n"


def _lines(axes: Any, panel: Panel) -> None:
    places = {x for curve in panel.curves.values() for x in curve.x}
    if len(places) == 1:
        # Around an only point matplotlib's own axes are as narrow as a tenth of its place.
        (place,) = places
        axes.set_xlim(0, 2 * float(place) or 1)
        axes.set_xticks([place], [f"{place:.3g}"])
    for name, curve in panel.curves.items():
        known = [(x, y) for x, y in zip(curve.x, curve.y, strict=True) if y is not None]
        (line,) = axes.plot(
            [x for x, _ in known],
            [y for _, y in known],
            label=name,
            color=_COLOURS.get(name),
            linewidth=1.3,
            marker="o" if len(known) <= 12 else None,
            markersize=3,
        )
        if curve.low:
            ranged = [
                (x, low, high)
                for x, low, high in zip(curve.x, curve.low, curve.high, strict=True)
                if low is not None and high is not None
            ]
            columns = list(zip(*ranged, strict=True)) or [(), (), ()]
            if len(places) == 1:
                axes.vlines(*columns, colors=line.get_color(), linewidth=0.8)
            else:
                axes.fill_between(*columns, color=line.get_color(), alpha=0.15, linewidth=0)


def _bars(axes: Any, panel: Panel) -> None:
    width = 0.8 / len(panel.curves)
    groups: list[float | str] = []
    for index, (name, curve) in enumerate(panel.curves.items()):
        groups = groups or list(curve.x)
        known = [(place, y) for place, y in enumerate(curve.y) if y is not None]
        places = [place + (index + 0.5) * width - 0.4 for place, _ in known]
        errors = None
        if curve.low and known:
            ranges = [(y, curve.low[place], curve.high[place]) for place, y in known]
            pairs = [(0.0, 0.0) if low is None or high is None else (y - low, high - y) for y, low, high in ranges]
            errors = [list(side) for side in zip(*pairs, strict=True)]
        axes.bar(
            places,
            [y for _, y in known],
            width,
            yerr=errors,
            label=name,
            color=_COLOURS.get(name),
            error_kw={"linewidth": 0.8},
            clip_on=False,
        )
    axes.set_xticks(range(len(groups)), [str(group) for group in groups])
