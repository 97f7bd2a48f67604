"""An arrival is told what it met and how many units it waited for."""

from __future__ import annotations

import pytest

from benchmarks.preemption import BETWEEN, FORWARD, Piece, wait_of

PIECES = [
    Piece("layer", 30, 1.0, 2.0),
    Piece("head", 20, 2.0, 2.5),
    Piece(FORWARD, 70, 2.6, 4.0),
    Piece("step", 1, 4.0, 4.1),
]


def test_a_unit_that_ends_after_the_arrival_counts() -> None:
    wait = wait_of(PIECES[:1], arrived_s=1.25, started_s=2.05)
    assert (wait.kind, wait.tokens, wait.unit_ends) == ("layer", 30, 1)
    assert (wait.delay_s, wait.piece_s, wait.outside_s) == pytest.approx((0.8, 1.0, 0.05))


def test_every_later_unit_that_ended_before_the_start_counts_but_forwards_do_not() -> None:
    wait = wait_of(PIECES, arrived_s=1.5, started_s=4.2)
    assert (wait.kind, wait.unit_ends) == ("layer", 3)
    assert wait.outside_s == pytest.approx(0.1 + 0.1)
    assert wait_of(PIECES, arrived_s=3.0, started_s=4.05).unit_ends == 0


def test_an_arrival_between_pieces_met_none() -> None:
    wait = wait_of(PIECES, arrived_s=2.55, started_s=2.58)
    assert (wait.kind, wait.piece_s, wait.unit_ends) == (BETWEEN, 0.0, 0)
    assert wait_of(PIECES, arrived_s=0.5, started_s=0.6).kind == BETWEEN
    assert wait_of([], arrived_s=0.5, started_s=0.6).kind == BETWEEN
