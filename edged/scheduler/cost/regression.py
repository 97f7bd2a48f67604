"""Regression: non-negative prices of features, fitted to all measurements at once or online.

All times are seconds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import add, mul

FORGETTING = 0.99
"""Weight of an observation against the next one: about the last hundred iterations count."""
RIDGE = 0.005
"""Pull of a price towards what is usual, in observations that it alone explains."""
USUAL_S = 4 * 3600.0
"""Seconds of work over which prices become the usual ones; fewer while few observations were seen."""
PATIENCE = 8
"""Number of first observations that count in full: the start values are guesses."""
KNOWN_OBSERVATIONS = 20.0
"""Weight of a profile's measurements together, in observations."""
_SWEEPS = 2000
_REWEIGHTINGS = 5
_CLOSE = 0.05
"""Relative error below which all measurements count the same."""
_FAR = 0.5
"""Relative error from which on a larger one pulls no harder."""
_FURTHEST = 4.0
"""Most by which the divisor of an observation, its predicted seconds, may differ from its measured ones."""
_FIRST, _FIRST_SHARE = 400, 4.0
"""Number of first observations, of which the n-th has the share 4 / n in the usual prices."""
_MIN_SHARE = 0.01
"""A price that was found to be zero starts at this share of the time that its feature would take alone."""

Row = Sequence[float]


def least_squares(rows: Sequence[Row], seconds: Sequence[float]) -> list[float]:
    """Return the non-negative prices that minimise the sum of relative errors over all measurements.

    Iteratively reweighted least squares of `row . prices / seconds - 1`, each solved by coordinate descent. A feature
    that no row has gets the price 0. ValueError without measurements, or with one that took no time.
    """
    if not rows or min(seconds) <= 0.0:
        raise ValueError("prices need measurements, all of them longer than zero seconds")
    import numpy as np  # late: a process is prepared before numpy starts its threads

    scaled = np.array(rows) / np.array(seconds)[:, None]
    # Features are scaled by their means: amounts of a token and of a key differ by orders of magnitude.
    unit = scaled.mean(axis=0)
    unit[unit == 0.0] = 1.0
    scaled /= unit
    weights, shares = np.ones(len(rows)), [1.0 / len(unit)] * len(unit)
    for _ in range(_REWEIGHTINGS):
        weighted = weights[:, None] * scaled
        shares = _descend((weighted.T @ scaled).tolist(), weighted.sum(axis=0).tolist(), shares)
        weights = 1.0 / np.maximum(_CLOSE, np.abs(scaled @ shares - 1.0))
    return [
        float(share / width) if there else 0.0
        for share, width, there in zip(shares, unit, scaled.any(axis=0), strict=True)
    ]


def _descend(gram: list[list[float]], moment: list[float], start: Sequence[float]) -> list[float]:
    """Solve the normal equations by coordinate descent over values at or above zero."""
    values = list(start)
    for _ in range(_SWEEPS):
        moved = 0.0
        for i, line in enumerate(gram):
            if line[i] <= 0.0:
                continue
            value = max(0.0, values[i] + (moment[i] - sum(map(float.__mul__, line, values))) / line[i])
            moved, values[i] = max(moved, abs(value - values[i])), value
        if moved < 1e-9:
            break
    return values


def _relax_pair(gram: list[list[float]], targets: list[float], scale: list[float], sweeps: int) -> None:
    """Do for the two prices of a unit what sweeps of `OnlineRegression.observe` do: one step may have 125 units."""
    (one, both), (same, other) = gram
    first, second = scale
    for _ in range(sweeps):
        rest = targets[0] + one * first - (one * first + both * second)
        first = rest / (one + RIDGE) if rest > 0.0 else 0.0
        rest = targets[1] + other * second - (same * first + other * second)
        second = rest / (other + RIDGE) if rest > 0.0 else 0.0
    scale[:] = first, second


class OnlineRegression:
    """Prices fitted online to relative errors.

    Each observation `(features, seconds)` enters exponentially forgotten normal equations, divided by what it was
    predicted to take so that a short iteration counts as much as a long one; the pull of one that is far off is
    bounded, so that a stall counts little (Huber's weights). Coordinate descent keeps every price at or above zero.
    Prices that the latest data do not determine are the usual ones, times how much slower than usual the device is; at
    first, near their start values times the mean ratio of measured to guessed time.
    """

    def __init__(self, start: Sequence[float]) -> None:
        """Start from `start`, guessed seconds per unit of each feature, all above zero."""
        size = len(start)
        self._start = list(start)
        self._scale = [1.0] * size
        self._usual = [1.0] * size
        self._gram = [[0.0] * size for _ in range(size)]
        self._moment = [0.0] * size
        self._log_level = 0.0
        self._seen = 0
        self._lately = False
        self.prices = list(start)

    @classmethod
    def known(
        cls, prices: Sequence[float], rows: Sequence[Row], seconds: Sequence[float], guess: Sequence[float]
    ) -> OnlineRegression:
        """Build a regression whose prices were fitted to measurements, which hold them at first.

        A price that was found to be zero can be learned: from a hundredth of what the feature would cost alone. One of
        a feature that no measurement had is the guess.
        """
        used = [sum(row[i] for row in rows) for i in range(len(prices))]
        prices = [price if amount else other for price, amount, other in zip(prices, used, guess, strict=True)]
        least = [
            _MIN_SHARE * sum(seconds) / amount if amount else other for amount, other in zip(used, guess, strict=True)
        ]
        fit = cls([max(price, other) for price, other in zip(prices, least, strict=True)])
        fit._scale = [price / start for price, start in zip(prices, fit._start, strict=True)]
        fit.prices, fit._usual = list(prices), list(fit._scale)
        fit._seen = _FIRST
        for row in rows:
            predicted_s = sum(map(float.__mul__, prices, row))
            if predicted_s > 0.0:
                shares = [start * value / predicted_s for start, value in zip(fit._start, row, strict=True)]
                fit._enter(shares, 1.0, KNOWN_OBSERVATIONS / len(rows), 1.0)
        return fit

    @property
    def settled(self) -> bool:
        """Whether its prices are more than guesses."""
        return self._seen >= PATIENCE

    def usual_s(self, features: Row) -> float:
        """Return the seconds at the usual prices."""
        return sum(
            price * usual * amount for price, usual, amount in zip(self._start, self._usual, features, strict=True)
        )

    def rescale(self, factor: float, drift: float) -> None:
        """Raise all prices `factor` times, which makes them `drift` times the usual ones.

        What was not observed since the last time is set by `drift`: factors of many jumps would add up their errors.
        """
        if not self._lately and sum(self._scale) > 0.0:
            factor = drift * sum(self._usual) / sum(self._scale) or factor
        self._lately = False
        self._gram = [[value / factor**2 for value in line] for line in self._gram]
        self._moment = [value / factor for value in self._moment]
        self._scale = [value * factor for value in self._scale]
        self._log_level += math.log(factor)
        self.prices = [price * factor for price in self.prices]

    def observe(self, features: Row, seconds: float, drift: float = 1.0) -> None:
        """Learn from one measurement of `seconds` above zero; `drift` tells how much slower than usual all is."""
        start, scale = self._start, self._scale
        row = list(map(mul, start, features))
        guessed_s = sum(row)
        if guessed_s <= 0.0:
            return
        self._seen += 1
        self._lately = True
        if self._seen <= PATIENCE:
            self._log_level += (math.log(seconds / guessed_s) - self._log_level) / self._seen
            pull = [RIDGE * math.exp(self._log_level)] * len(row)
            scale_s, weight, sweeps = seconds, 1.0, 8
        else:
            pull = [RIDGE * (drift * usual) for usual in self._usual]
            predicted_s = sum(map(mul, scale, row))
            scale_s = min(_FURTHEST * seconds, max(seconds / _FURTHEST, predicted_s))
            weight, sweeps = _FAR / max(_FAR, abs(seconds - predicted_s) / scale_s), 2
        self._enter([value / scale_s for value in row], seconds / scale_s, weight, FORGETTING)
        targets = list(map(add, self._moment, pull))
        if len(scale) == 2:
            _relax_pair(self._gram, targets, scale, sweeps)
            sweeps = 0
        for _ in range(sweeps):
            for i, line in enumerate(self._gram):
                own = line[i]
                rest = targets[i] + own * scale[i] - sum(map(mul, line, scale))
                scale[i] = rest / (own + RIDGE) if rest > 0.0 else 0.0
        self.prices = list(map(mul, start, scale))
        first = min(1.0, _FIRST_SHARE / self._seen) if self._seen <= _FIRST else 0.0
        share = max(first, min(1.0, seconds / USUAL_S))
        self._usual = [old + share * (new - old) for old, new in zip(self._usual, scale, strict=True)]

    def _enter(self, row: Row, target: float, weight: float, forgetting: float) -> None:
        """Add an observation of `row . scale = target` to the normal equations."""
        gram, moment = self._gram, self._moment
        for i, value in enumerate(row):
            share = weight * value
            gram[i] = [forgetting * old + share * other for old, other in zip(gram[i], row, strict=True)]
            moment[i] = forgetting * moment[i] + share * target
