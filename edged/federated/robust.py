"""Robust means of updates that are seen singly, some of which may be faulty or hostile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edged.federated.clustering import Updates

Mean = NDArray[np.floating[Any]]
FAULTY_SHARE = 0.15
"""Share of updates that may be faulty: beyond it Auxo (3.7.5) tries none."""


def _faulty(updates: Updates, faulty: int | None) -> int:
    return int(FAULTY_SHARE * len(updates)) if faulty is None else faulty


def coordinate_median(updates: Updates) -> Mean:
    """Return the median of each number (Yin et al. 2018, Definition 1), of updates [n, numbers].

    It lies between honest numbers where fewer than half of the updates are faulty.
    """
    return np.asarray(np.median(updates, axis=0))


def trimmed_mean(updates: Updates, faulty: int | None = None) -> Mean:
    """Return the mean of each number without the `faulty` largest and smallest ones (Yin et al. 2018, Definition 2).

    `faulty` is by default 15 % of the updates. Raises ValueError where none is left.
    """
    number, cut = len(updates), _faulty(updates, faulty)
    if not 0 <= 2 * cut < number:
        raise ValueError(f"{number} updates, {cut} of them faulty: a trimmed mean needs more than {2 * cut}")
    return np.asarray(np.sort(updates, axis=0)[cut : number - cut].mean(0))


def multi_krum(updates: Updates, faulty: int | None = None) -> Mean:
    """Return the mean of the n - f updates of least score (Multi-Krum of Blanchard et al. 2017, sections 4 and 6).

    An update's score is the sum of squared distances to its n - f - 2 nearest others. `faulty`, f, is by default 15 %
    of the updates. Raises ValueError where 2 f + 2 < n does not hold.
    """
    number, cut = len(updates), _faulty(updates, faulty)
    if cut < 0 or 2 * cut + 2 >= number:
        raise ValueError(f"{number} updates, {cut} of them faulty: Multi-Krum needs more than {2 * cut + 2}")
    distances = np.array([np.square(updates - own).sum(1, dtype=np.float64) for own in updates])
    # The nearest of all is the update itself, at distance 0.
    scores = np.sort(distances, axis=1)[:, 1 : number - cut - 1].sum(1)
    return np.asarray(updates[np.argsort(scores, kind="stable")[: number - cut]].mean(0))


def plain_mean(updates: Updates) -> Mean:
    """Return the mean of updates [n, numbers], which a single hostile one can move anywhere within the clip."""
    return np.asarray(updates.mean(0))


AGGREGATES: dict[str, Callable[[Updates], Mean]] = {
    "mean": plain_mean,
    "median": coordinate_median,
    "trimmed": trimmed_mean,
    "multi-krum": multi_krum,
}
"""Aggregates by the name that a campaign gives them (`aggregate`)."""
