"""The clip, the noise, epsilon beside an independent accountant, and where noise drowns the signal."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edged.federated.privacy import clipped, epsilon, least_threshold, noised, norm, record_deviation

TENSORS = {"a": np.full((3, 4), 0.5, np.float32), "b": np.full((2, 2), -1.0, np.float32)}


@given(st.floats(1e-3, 1e3), st.floats(1e-3, 1e3))
def test_a_record_is_no_longer_than_the_clip_and_points_where_it_did(scale: float, clip: float) -> None:
    long = {name: (each * scale).astype(np.float32) for name, each in TENSORS.items()}
    short = clipped(long, clip)
    assert norm(short) <= clip * (1 + 1e-6)
    assert norm(short) == pytest.approx(min(norm(long), clip), rel=1e-5)
    assert short["a"][0, 0] * long["b"][0, 0] == pytest.approx(short["b"][0, 0] * long["a"][0, 0], rel=1e-5)


def test_a_record_without_anything_stays_so() -> None:
    assert norm(clipped({"a": np.zeros((2, 2), np.float32)}, 0.4)) == 0.0


def test_noise_is_gaussian_of_its_deviation_and_never_the_same() -> None:
    zeros = {"a": np.zeros((300, 400), np.float32)}
    one, other = (noised(zeros, 0.25)["a"].astype(np.float64).ravel() for _ in range(2))
    for each in (one, other):
        assert each.mean() == pytest.approx(0.0, abs=5 * 0.25 / math.sqrt(each.size))
        assert each.std() == pytest.approx(0.25, rel=0.02)
        assert (np.abs(each) > 0.5).mean() == pytest.approx(0.0455, abs=0.004)
        assert (np.abs(each) > 0.75).mean() == pytest.approx(0.0027, abs=0.001)
    assert abs(np.corrcoef(one, other)[0, 1]) < 0.02
    assert abs(np.corrcoef(one[:-1], one[1:])[0, 1]) < 0.02


def test_a_sum_keeps_its_noise_though_half_leave_theirs_out() -> None:
    own = record_deviation(1.27, 0.4, 300)
    assert own * math.sqrt(150) == pytest.approx(1.27 * 0.4)
    assert own * math.sqrt(300) == pytest.approx(math.sqrt(2) * 1.27 * 0.4)


ACCOUNTED = [
    (0.69, 1, 1e-6, 7.99044992263196),
    (1.27, 1, 1e-6, 3.9923622978213773),
    (4.0, 2, 1e-6, 1.6599790502878973),
    (1.0, 10, 1e-5, 19.04725955271548),
    (0.5, 1, 1e-6, 11.68859625079168),
    (20.0, 3, 1e-8, 0.45052752517274486),
]
"""(Noise, participations, delta, epsilon of dp-accounting 0.6.0: compute_epsilon over 400,001 orders from 1.001 on)."""


@pytest.mark.parametrize(("noise", "rounds", "delta", "accounted"), ACCOUNTED)
def test_epsilon_is_that_of_an_independent_accountant(
    noise: float, rounds: int, delta: float, accounted: float
) -> None:
    assert epsilon(rounds / noise**2, delta) == pytest.approx(accounted, abs=1e-6)


def test_epsilon_of_nothing_is_nothing_and_more_rounds_cost_more() -> None:
    assert epsilon(0.0, 1e-6) == 0.0
    costs = [epsilon(rounds / 1.27**2, 1e-6) for rounds in (1, 2, 3, 10)]
    assert costs == sorted(costs)
    assert epsilon(0.69**-2, 1e-6) == pytest.approx(8.0, abs=0.01)
    assert epsilon(1.27**-2, 1e-6) == pytest.approx(4.0, abs=0.01)
    # Rounds of unlike noise add up as their shares do.
    assert epsilon(2 / 1.27**2, 1e-6) == pytest.approx(epsilon((1.27 / math.sqrt(2)) ** -2, 1e-6))


@pytest.mark.parametrize(
    ("noise", "size", "needed"), [(0.0, 82_944, 0), (0.69, 82_944, 125), (1.27, 82_944, 229), (1.27, 11_000_000, 2633)]
)
def test_noise_needs_so_many_records(noise: float, size: int, needed: int) -> None:
    assert least_threshold(noise, size) == needed
    assert noise * math.sqrt(size) / (0.2 * max(needed, 1)) <= 8
