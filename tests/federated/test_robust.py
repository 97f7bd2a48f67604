"""Robust means: within what honest people sent, whatever the others send, and the mean where nobody is faulty."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from edged.federated.clustering import Updates
from edged.federated.robust import AGGREGATES, coordinate_median, multi_krum, trimmed_mean

FINITE = st.floats(-100, 100, width=32)
ROBUST = [coordinate_median, trimmed_mean, multi_krum]


@st.composite
def honest_and_hostile(draw: st.DrawFn) -> tuple[Updates, Updates]:
    """Updates of honest people, and fewer of others, that say anything."""
    number, size = draw(st.integers(7, 15)), draw(st.integers(1, 4))
    hostile = draw(st.integers(0, (number - 3) // 2))
    good = draw(arrays(np.float64, (number - hostile, size), elements=FINITE))
    return good, draw(arrays(np.float64, (hostile, size), elements=st.floats(-1e9, 1e9)))


@given(honest_and_hostile())
@settings(deadline=None)
def test_no_number_leaves_what_honest_people_sent(case: tuple[Updates, Updates]) -> None:
    good, hostile = case
    both = np.concatenate([good, hostile])
    for found in (coordinate_median(both), trimmed_mean(both, len(hostile))):
        assert (found >= good.min(0) - 1e-9).all()
        assert (found <= good.max(0) + 1e-9).all()


@given(honest_and_hostile())
@settings(deadline=None)
def test_multi_krum_is_no_farther_than_honest_people_are_apart(case: tuple[Updates, Updates]) -> None:
    good, hostile = case
    both = np.concatenate([good, hostile])
    widest = np.linalg.norm(good[:, None] - good, axis=-1).max()
    # Each update that is taken scores no more than the worst honest one, whose nearest are honest in the worst case.
    near = len(both) - len(hostile) - 2
    apart = np.linalg.norm(multi_krum(both, len(hostile)) - good.mean(0))
    assert apart <= widest * (1 + np.sqrt(near)) + 1e-6


@given(arrays(np.float64, (9, 3), elements=FINITE), st.permutations(range(9)), arrays(np.float64, 3, elements=FINITE))
@settings(deadline=None)
def test_order_does_not_count_and_what_is_added_to_all_is_added_to_the_mean(
    updates: Updates, order: list[int], moved: Updates
) -> None:
    for aggregate in (coordinate_median, trimmed_mean):
        assert aggregate(updates[order]) == pytest.approx(aggregate(updates), abs=1e-9)
        assert aggregate(updates + moved) == pytest.approx(aggregate(updates) + moved, abs=1e-9)


@given(arrays(np.float64, (6, 3), elements=FINITE))
@settings(deadline=None)
def test_where_nobody_is_faulty_they_are_the_mean(updates: Updates) -> None:
    for found in (trimmed_mean(updates, 0), multi_krum(updates, 0), AGGREGATES["mean"](updates)):
        assert found == pytest.approx(updates.mean(0), abs=1e-9)


def test_multi_krum_takes_those_that_are_near_each_other() -> None:
    honest = np.array([[0.0, 0.0], [0.1, 0.0], [0.0, 0.1], [0.1, 0.1], [0.05, 0.05]])
    assert multi_krum(np.concatenate([honest, [[50.0, 50.0]]]), 1) == pytest.approx(honest.mean(0))


@pytest.mark.parametrize("aggregate", ROBUST)
def test_one_of_ten_that_sends_huge_numbers_moves_a_mean_little(aggregate: Callable[[Updates], Updates]) -> None:
    updates = np.random.default_rng(0).normal(size=(10, 50))
    updates[3] = 1e6
    assert np.abs(AGGREGATES["mean"](updates)).min() > 1e4
    assert np.abs(aggregate(updates)).max() < 2.0


def test_a_share_that_cannot_be_left_out_is_refused() -> None:
    with pytest.raises(ValueError, match="4 updates, 2 of them faulty: a trimmed mean needs more than 4"):
        trimmed_mean(np.zeros((4, 2)), 2)
    with pytest.raises(ValueError, match="4 updates, 1 of them faulty: Multi-Krum needs more than 4"):
        multi_krum(np.zeros((4, 2)), 1)
