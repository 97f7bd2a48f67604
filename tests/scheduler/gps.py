"""Fluid fair sharing: at each moment all open applications get the same share of the box."""

from __future__ import annotations

import math


def fair_ends(
    arrivals: list[float], costs: list[float], rate: float, weights: list[float] | None = None
) -> list[float]:
    """When each application would end: it comes at `arrivals`, needs `costs`, of a box that does `rate` a second."""
    shares = weights or [1.0] * len(costs)
    order = sorted(range(len(costs)), key=lambda each: arrivals[each])
    left, ends, now, coming = dict[int, float](), [math.inf] * len(costs), 0.0, 0
    while coming < len(order) or left:
        next_s = arrivals[order[coming]] if coming < len(order) else math.inf
        total = sum(shares[each] for each in left)
        first = min(left, key=lambda each: left[each] / shares[each], default=None)
        end_s = math.inf if first is None else now + left[first] / shares[first] * total / rate
        moment = min(next_s, end_s)
        for each in left:
            left[each] -= (moment - now) * rate * shares[each] / total
        now = moment
        if end_s <= next_s and first is not None:
            ends[first] = now
            del left[first]
        else:
            left[order[coming]] = costs[order[coming]]
            coming += 1
    return ends
