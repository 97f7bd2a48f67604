"""Splits of a start: two tastes are told from one, labels as scikit-learn's, and which starts stay."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from edged.federated.clustering import MIN_UPDATES, Updates, find_split, heterogeneity, stays, two_means


def updates_of(tastes: list[int], seed: int, size: int = 3000, strength: float = 12.0) -> Updates:
    """Updates of people of some tastes: what all have in common, what a taste has, and their own noise."""
    rng = np.random.default_rng(seed)
    common, taste = rng.normal(size=(2, size)) * strength / np.sqrt(size)
    rows = [common + sign * taste + rng.normal(size=size) * rng.uniform(0.7, 1.3) for sign in tastes]
    return np.array(rows, np.float32)


@pytest.mark.parametrize("number", [20, 30])
def test_two_tastes_split_and_one_does_not(number: int) -> None:
    for seed in range(10):
        tastes = [1, -1] * (number // 2)
        two, one = (find_split(updates_of(each, seed), np.random.default_rng(seed)) for each in (tastes, [1] * number))
        assert two is not None
        assert one is not None
        assert two.splits, two.z
        assert len(set(zip(tastes, two.labels, strict=True))) == 2, "each taste has its label"
        assert not one.splits, one.z


def test_no_split_is_looked_for_under_20_updates_and_none_is_made_for_a_few() -> None:
    assert find_split(updates_of([1, -1] * 9, 0), np.random.default_rng(0)) is None
    colluding = updates_of([1] * 30, 0)
    colluding[:4] = updates_of([1], 5)[0]
    found = find_split(colluding, np.random.default_rng(0))
    assert found is not None
    assert found.z >= found.least
    assert not found.splits, "four are no cohort"


def test_the_bound_grows_with_the_number() -> None:
    assert find_split(updates_of([1, -1] * 10, 0), np.random.default_rng(0)).least == 7.0  # type: ignore[union-attr]
    assert find_split(updates_of([1] * 40, 0), np.random.default_rng(0)).least == 12.0  # type: ignore[union-attr]


def test_updates_that_cannot_be_are_refused_and_equal_ones_are_of_one_kind() -> None:
    updates = updates_of([1] * MIN_UPDATES, 0)
    same = find_split(np.ones_like(updates), np.random.default_rng(0))
    assert same is not None
    assert not same.splits
    updates[3, 5] = np.nan
    with pytest.raises(ValueError, match="not finite"):
        find_split(updates, np.random.default_rng(0))


@given(arrays(np.float64, (6, 3), elements=st.floats(-9, 9)), st.lists(st.integers(0, 1), min_size=6, max_size=6))
@settings(deadline=None)
def test_heterogeneity_is_equation_3_1(rows: Updates, labels: list[int]) -> None:
    told = 0.0
    for label in set(labels):
        own = [row for row, each in zip(rows, labels, strict=True) if each == label]
        told += sum(float(((a - b) ** 2).sum()) for a, b in product(own, own)) / (2 * len(own))
    assert heterogeneity(rows @ rows.T, np.array(labels)) == pytest.approx(told, abs=1e-6)


# scikit-learn 1.9.1, in a virtual environment of its own: KMeans(2, n_init=50, random_state=0).fit(data(seed)).inertia_
INERTIAS = {0: 218.96019031394192, 1: 185.6871350452619, 2: 215.34234700388464, 3: 200.69301955144482}


def data(seed: int) -> Updates:
    """Points in two clouds that overlap the more, the larger the seed."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=(40, 6)) + np.repeat([[1.5 - 0.4 * seed], [0.0]], 20, axis=0)


@pytest.mark.parametrize(("seed", "inertia"), INERTIAS.items())
def test_labels_are_as_good_as_scikit_learn_s(seed: int, inertia: float) -> None:
    points = data(seed)
    labels = two_means(points @ points.T, np.random.default_rng(1))
    assert heterogeneity(points @ points.T, labels) <= inertia * (1 + 1e-9)


@pytest.mark.parametrize(
    ("better", "worse", "same", "kept"), [(7, 0, 0, True), (6, 0, 9, False), (10, 1, 3, True), (9, 1, 0, False)]
)
def test_starts_stay_where_boxes_are_right_on_more_with_theirs(better: int, worse: int, same: int, kept: bool) -> None:
    """The probabilities are scipy's, of `binomtest(better, better + worse)`, one-sided: .0078, .0156, .0059, .0107."""
    counts = [(5, 3)] * better + [(2, 4)] * worse + [(4, 4)] * same
    assert stays(counts) == kept
    assert not stays([])
