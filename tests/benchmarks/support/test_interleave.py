"""Sides take turns in processes of their own, and figures come with their spread."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from benchmarks.support.interleave import Side, SideFailed, Spread, open_sides, paired_ratio, take_turns

ECHO = "tests.benchmarks.support.echo_child"


def process_state(side: Side) -> str:
    status = Path(f"/proc/{side.pid}/status").read_text()
    return next(line.split()[1] for line in status.splitlines() if line.startswith("State:"))


def test_sides_answer_in_turns_and_the_first_one_rotates() -> None:
    order: list[tuple[int, str]] = []
    with open_sides([("a", ECHO, ["a"]), ("b", ECHO, ["b"])]) as sides:
        answers = take_turns(sides, [{"n": 0}, {"n": 1}], lambda number, name, _answer: order.append((number, name)))
    assert order == [(0, "a"), (0, "b"), (1, "b"), (1, "a")]
    assert answers == {name: [{"name": name, "n": 0}, {"name": name, "n": 1}] for name in ("a", "b")}


def test_a_side_stands_still_while_it_is_not_its_turn() -> None:
    with Side("a", ECHO, ["a"]) as side:
        side.ask({})
        deadline = time.monotonic() + 5.0
        while process_state(side) != "T" and time.monotonic() < deadline:
            time.sleep(0.01)
        assert process_state(side) == "T"


def test_a_side_that_dies_says_why() -> None:
    with Side("a", ECHO, ["a"]) as side, pytest.raises(SideFailed, match=r"(?s)side a failed on .*the disk is full"):
        side.ask({"fail": True})


def test_a_spread_is_the_median_and_the_quartiles() -> None:
    assert Spread.of([5.0, 1.0, 2.0, 3.0, 4.0]) == Spread(3.0, 2.0, 4.0, 5)
    assert Spread.of([3.0, 1.0]) == Spread(2.0, 1.0, 3.0, 2)
    assert Spread.of([1.0]).text() == "1.00 (1.00-1.00)"


def test_ratios_are_taken_within_a_round() -> None:
    # The machine was twice as slow in the second round: the ratio does not notice.
    assert paired_ratio([4.0, 2.0], [2.0, 1.0]) == Spread(2.0, 2.0, 2.0, 2)
