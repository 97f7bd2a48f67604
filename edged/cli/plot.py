"""Text plots: lines in braille dots, bars in block characters. Pure functions from numbers to text."""

from collections.abc import Sequence
from itertools import pairwise

BLOCKS = " ▁▂▃▄▅▆▇█"
_BRAILLE = 0x2800
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""Bit of each dot of a braille character, by column (0-1) and row (0-3, from the top)."""


def sparkline(values: Sequence[float], width: int) -> str:
    """Return the last `width` values as bars from 0 to their maximum; those above 0 are visible."""
    shown = list(values)[-width:]
    scale = max(shown, default=0.0)
    if scale <= 0:
        return " " * len(shown)
    steps = len(BLOCKS) - 1
    return "".join(BLOCKS[0 if v <= 0 else min(steps, max(1, round(steps * v / scale)))] for v in shown)


def line_plot(
    values: Sequence[float],
    width: int,
    height: int,
    ends: tuple[float, float] | None = None,
    guide: float | None = None,
) -> list[str]:
    """Return `height` strings of `width` characters that plot `values` as a line, with an axis on the left.

    `ends` are the axis' lowest and highest value (default: the data's range); `guide` adds a dotted horizontal line at
    its value.
    """
    known = [*values, *([] if guide is None else [guide])]
    bottom, ceiling = ends or (min(known, default=0.0), max(known, default=1.0))
    if ceiling - bottom < 1e-9:
        bottom, ceiling = bottom - 0.5, ceiling + 0.5
    digits = 2 if max(abs(bottom), abs(ceiling)) < 10 else 0
    labels = [ceiling - (ceiling - bottom) * row / max(1, height - 1) for row in range(height)]
    texts = [f"{round(label, digits) + 0.0:.{digits}f}" for label in labels]
    margin = max(map(len, texts))
    plot_width = max(1, width - margin - 2)
    columns, rows = 2 * plot_width, 4 * height
    cells = [[0] * plot_width for _ in range(height)]

    def level(value: float) -> int:
        return round((rows - 1) * (ceiling - min(max(value, bottom), ceiling)) / (ceiling - bottom))

    def dot(x: int, y: int) -> None:
        cells[y // 4][x // 2] |= _DOTS[x % 2][y % 4]

    if guide is not None:
        for x in range(0, columns, 4):
            dot(x, level(guide))
    points = [(round((columns - 1) * i / max(1, len(values) - 1)), level(v)) for i, v in enumerate(values)]
    # One value is drawn as a point: a line from itself to itself.
    for (x0, y0), (x1, y1) in pairwise(points if len(points) > 1 else points * 2):
        steps = max(x1 - x0, abs(y1 - y0), 1)
        for step in range(steps + 1):
            dot(x0 + (x1 - x0) * step // steps, y0 + round((y1 - y0) * step / steps))
    drawn = ("".join(chr(_BRAILLE + cell) for cell in row) for row in cells)
    return [f"{text:>{margin}} ┤{row}" for text, row in zip(texts, drawn, strict=True)]
