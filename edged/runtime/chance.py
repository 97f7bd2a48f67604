"""The probability of counts under chance: the exact sign test, one-sided."""

import math


def by_chance(right: float, pairs: int) -> float:
    """Return the probability that at least `right` of so many pairs are right where each is with 1/2."""
    return sum(math.comb(pairs, count) for count in range(math.ceil(right), pairs + 1)) / 2**pairs
