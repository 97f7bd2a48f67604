"""Plots made of characters."""

from __future__ import annotations

import pytest

from edged.cli.output import duration, number, percent
from edged.cli.plot import line_plot, sparkline

BLANK = "\u2800"


def test_a_sparkline_scales_to_its_largest_value_and_shows_anything_above_zero() -> None:
    assert sparkline([0, 1, 50, 100], 10) == " ▁▄█"


def test_a_sparkline_keeps_the_newest_values() -> None:
    assert sparkline([9, 0, 0, 8], 2) == " █"
    assert sparkline([0, 0], 5) == "  "
    assert sparkline([], 5) == ""


def test_a_rising_line_goes_from_the_bottom_left_to_the_top_right() -> None:
    rows = line_plot([0.0, 1.0], 20, 4, ends=(0.0, 1.0))
    inside = [row.split("┤")[1] for row in rows]
    assert [row.split()[0] for row in rows] == ["1.00", "0.67", "0.33", "0.00"]
    assert inside[-1][0] != BLANK
    assert inside[0][-1] != BLANK
    assert inside[0][0] == inside[-1][-1] == BLANK


def test_every_row_of_a_plot_is_as_wide_as_asked() -> None:
    rows = line_plot([-1200.0, 3.0, 44.0], 40, 6, guide=0.0)
    assert len(rows) == 6
    assert {len(row) for row in rows} == {40}


def test_values_outside_the_axis_stay_at_its_edge() -> None:
    rows = line_plot([5.0, 5.0], 12, 3, ends=(0.0, 1.0))
    assert set(rows[0].split("┤")[1]) != {BLANK}
    assert {row.split("┤")[1] for row in rows[1:]} == {BLANK * 6}


@pytest.mark.parametrize("values", [[], [0.5], [0.5, 0.5, 0.5]])
def test_a_plot_of_nothing_one_point_or_a_constant_has_its_axis(values: list[float]) -> None:
    rows = line_plot(values, 20, 3)
    assert len(rows) == 3
    drawn = any(mark not in (BLANK, " ") for row in rows for mark in row.split("┤")[1])
    assert drawn == bool(values)


def test_numbers_carry_units_and_what_is_unknown_is_a_dash() -> None:
    assert number(1234, unit="pages") == "1,234 pages"
    assert number(0.126) == "0.13"
    assert number(None, unit="ms") == "–"
    assert percent(0.956) == "96 %"
    assert percent(None) == "–"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59, "59 s"), (200, "3 min 20 s"), (7500, "2 h 5 min"), (4 * 86400 + 3 * 3600, "4 d 3 h")],
)
def test_durations_have_two_units_at_most(seconds: float, text: str) -> None:
    assert duration(seconds) == text
