"""Cohorts: whether the updates of a start are of two kinds of people, and whether the two starts that follow stay.

Updates are seen singly here. Auxo (dissertation 3.4) clusters by K-means, too, and splits where the heterogeneity J
falls by sqrt(K): on updates of adapters it never falls so far. Here labels that K-means finds on one half of the
coordinates are tested on the other half, of which the noise of single updates knows nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edged.runtime.chance import by_chance

Updates = NDArray[np.floating[Any]]
"""Updates of one start, seen singly: [updates, numbers]."""
Labels = NDArray[np.int64]
MIN_UPDATES, MIN_MEMBERS = 20, 5
"""Updates from which on a split is tested, and the fewest of a cohort: it has to have enough members (Auxo 3.3.1)."""
_LEAST_Z, _Z_EACH = 7.0, 0.3
"""A split needs z >= max(7, 0.3 n): people of one taste reach 4 to 6 whatever their number."""
_PERMUTATIONS, _BEGINNINGS, _MAX_STEPS = 200, 16, 100
_CHANCE = 0.01
"""Highest probability that two starts are better by chance at which they stay."""
_COLUMNS = 1 << 16


@dataclass(frozen=True, slots=True)
class SplitTest:
    """A test of a split: labels of the updates, 0 or 1, and how far they are from labels by chance."""

    z: float
    """Standard deviations by which J falls further under the labels than under permuted ones, on unseen coordinates."""
    least: float
    labels: tuple[int, ...]

    @property
    def splits(self) -> bool:
        """Whether the start is to become two, on trial."""
        ones = sum(self.labels)
        return self.z >= self.least and min(ones, len(self.labels) - ones) >= MIN_MEMBERS


def find_split(updates: Updates, chance: np.random.Generator) -> SplitTest | None:
    """Test whether updates are of two kinds; None while they are fewer than 20.

    Only their directions count (Auxo 3.4.2: cosine similarity). The labels that are returned are those of all
    coordinates. Raises ValueError where numbers are not finite.
    """
    number = len(updates)
    if number < MIN_UPDATES:
        return None
    if not np.isfinite(updates).all():
        raise ValueError("updates have numbers that are not finite: refuse them when they come")
    seen, unseen = _halves(updates, chance)
    labels, gram = two_means(_cosines(seen), chance), _cosines(unseen)
    permuted = [heterogeneity(gram, chance.permutation(labels)) for _ in range(_PERMUTATIONS)]
    spread = float(np.std(permuted))
    z = (float(np.mean(permuted)) - heterogeneity(gram, labels)) / spread if spread > 1e-12 else 0.0
    whole = two_means(_cosines(seen + unseen), chance)
    return SplitTest(z, max(_LEAST_Z, _Z_EACH * number), tuple(map(int, whole)))


def stays(counts: Iterable[tuple[int, int]]) -> bool:
    """Tell whether two starts on trial stay, by each box's held-out pairs that are right under (its own, the parent).

    A sign test at 0.01 over the boxes that differ: 7 of 7, 10 of 11. Ask once, when all boxes have answered: who looks
    after each answer is fooled by chance more often.
    """
    differences = [own - parent for own, parent in counts if own != parent]
    return by_chance(sum(difference > 0 for difference in differences), len(differences)) <= _CHANCE


def heterogeneity(gram: NDArray[np.float64], labels: Labels) -> float:
    """Return J, the sum of squared distances to the cluster's mean (Auxo Eq. 3.1), from inner products [n, n]."""
    owned = [labels == label for label in np.unique(labels)]
    return float(np.trace(gram) - sum(gram[np.ix_(own, own)].sum() / own.sum() for own in owned))


def two_means(gram: NDArray[np.float64], chance: np.random.Generator) -> Labels:
    """Return the labels of K-means with two clusters, the best of 16 beginnings, from inner products [n, n].

    Beginnings are drawn as k-means++ does (Arthur and Vassilvitskii 2007). Of vectors that are all equal there is one
    cluster.
    """
    found = [_lloyd(gram, _beginning(gram, chance)) for _ in range(_BEGINNINGS)]
    return min(found, key=lambda labels: heterogeneity(gram, labels))


def _beginning(gram: NDArray[np.float64], chance: np.random.Generator) -> Labels:
    """Return labels by the nearer of two vectors, the second drawn by its squared distance to the first."""
    squares = np.diag(gram)[:, None] - 2 * gram + np.diag(gram)
    first = squares[chance.integers(len(gram))].clip(0)
    if first.sum() <= 1e-12:
        return np.zeros(len(gram), np.int64)
    second = squares[chance.choice(len(gram), p=first / first.sum())]
    return (second < first).astype(np.int64)


def _lloyd(gram: NDArray[np.float64], labels: Labels) -> Labels:
    """Assign vectors to the nearer mean until nothing changes."""
    for _ in range(_MAX_STEPS):
        owned = [labels == label for label in (0, 1)]
        if not all(own.any() for own in owned):
            break
        # |x - mean|^2 without |x|^2, which both have.
        distances = [gram[np.ix_(own, own)].mean() - 2 * gram[:, own].mean(1) for own in owned]
        nearer = (distances[1] < distances[0]).astype(np.int64)
        if (nearer == labels).all():
            break
        labels = nearer
    return labels


def _halves(updates: Updates, chance: np.random.Generator) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the inner products of updates over a half of the coordinates drawn by chance, and over the others."""
    grams = np.zeros((2, len(updates), len(updates)))
    for begin in range(0, updates.shape[1], _COLUMNS):
        part = updates[:, begin : begin + _COLUMNS].astype(np.float64)
        first = chance.random(part.shape[1]) < 0.5
        for gram, own in zip(grams, (part[:, first], part[:, ~first]), strict=True):
            gram += own @ own.T
    return grams[0], grams[1]


def _cosines(gram: NDArray[np.float64]) -> NDArray[np.float64]:
    norms = np.sqrt(np.diag(gram)).clip(1e-12)
    cosines: NDArray[np.float64] = gram / np.outer(norms, norms)
    return cosines
