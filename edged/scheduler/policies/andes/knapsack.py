"""The knapsack of readers (Andes 2.4): who is served where not all fit, and who gives way, as pure functions."""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import itemgetter
from typing import Any

from edged.scheduler.reader import Reader, gain
from edged.scheduler.task import ServingTask

URGENT = 1e9
"""Gain of those who must not wait any more: above all others together, whatever their pages."""
_SIZES = 3
"""Batch sizes that are tried, about: in between, gains hardly change."""


@dataclass(slots=True, eq=False)
class Contender:
    """A request with a reader that asks to be served."""

    task: ServingTask
    reader: Reader
    pages: int
    """Number of pages that it holds or needs."""
    starts_s: float
    """Seconds until its next token where it is served: 0 where it is in memory, else it waits."""
    urgent: bool = False


def contest(
    contenders: Sequence[Contender],
    pages: int,
    slots: int,
    token_s: Callable[[int], float],
    now: float,
    horizon_s: float,
) -> tuple[list[tuple[Contender, float]], set[ServingTask], float]:
    """Return contenders by gain per page (Eq. 2.6), each with the QoE that serving it gains, whom to serve within
    `pages` and `slots`, and at most how many; inf where no size of the batch is better than what fits.

    `token_s` is how long a token takes of so many who are served. Of equals those go first who are in memory, then
    those who run dry first.
    """
    import numpy as np  # late: a process is prepared before numpy starts its threads

    dry_s: Any = np.array([one.reader.dry_s for one in contenders])
    starts_s: Any = np.array([one.starts_s for one in contenders])
    # Equals stay in this order.
    first = np.lexsort((dry_s, starts_s > 0.0))
    contenders = [contenders[one] for one in first.tolist()]
    dry_s, starts_s, needs = dry_s[first], starts_s[first], [one.pages for one in contenders]
    pace: Any = np.array([one.reader.pace for one in contenders])
    ideal_s: Any = np.array([one.reader.ideal_s for one in contenders])
    left_s = np.minimum(np.maximum(dry_s - now, 0.0), horizon_s)
    expected_s = np.maximum(now + horizon_s - ideal_s, 1e-9)
    sizes = batch_sizes(needs, pages, slots, token_s, 1.0 / float(pace.max()))
    rates: Any = np.array([1.0 / token_s(size) for size in sizes]).reshape(-1, 1)
    gains: Any = gain(pace, left_s, expected_s, horizon_s, starts_s, rates)
    if urgent := [at for at, one in enumerate(contenders) if one.urgent]:
        gains[:, urgent] = URGENT
    orders = np.argsort(-gains / np.maximum(needs, 1), kind="stable").tolist()
    packed = [
        (sum([values[one] for one in served]), size, order, served, values)
        for size, order, values in zip(sizes, orders, gains.tolist(), strict=True)
        for served in [pack(order, values, needs, pages, size)]
    ]
    _, size, order, served, values = max(packed, key=itemgetter(0), default=(0.0, 0, [], [], []))
    ranked = [(contenders[one], values[one]) for one in order]
    return ranked, {contenders[one].task for one in served}, size if sizes and size < sizes[0] else math.inf


def batch_sizes(
    needs: Iterable[int], pages: int, slots: int, token_s: Callable[[int], float], fastest_s: float
) -> range:
    """Return the numbers of contenders of which one may be the best to serve at once, the largest first (2.4.2).

    None is more than fit, by the pages that each `needs`, or more than `slots`; none is less than the most of which
    all get a token within `fastest_s`.
    """
    most = min(max(0, slots), bisect_right(list(accumulate(sorted(needs))), pages))
    fast = bisect_right(range(1, most + 1), fastest_s, key=token_s)
    return range(most, max(1, fast) - 1, -max(1, (most - fast) // (_SIZES - 1)))


def pack(order: Sequence[int], gains: Sequence[float], needs: Sequence[int], pages: int, most: int) -> list[int]:
    """Return those of `order`, at most so many, who are served within `pages`, by what each gains and needs.

    Where Algorithm 1 ends, at the first who does not fit, this passes over them. If one alone gains more than all who
    were chosen so, that one goes first.
    """
    served = _filled(order, needs, pages, most)
    gained = sum([gains[one] for one in served])
    if max(gains, default=0.0) > gained:
        best = max([one for one in order if needs[one] <= pages], key=gains.__getitem__, default=None)
        if best is not None and gains[best] > gained:
            return _filled([best, *(one for one in order if one != best)], needs, pages, most)
    return served


def _filled(order: Iterable[int], needs: Sequence[int], pages: int, most: int) -> list[int]:
    served: list[int] = []
    for one in order:
        if needs[one] <= pages:
            if len(served) >= most:
                break
            served.append(one)
            pages -= needs[one]
    return served


def fewest(lowest: Iterable[Contender], pages: int, least: int) -> list[Contender] | None:
    """Return the victims, at least so many, whose `pages` suffice: from the `lowest` up, without the needless.

    None where all of them do not suffice.
    """
    victims: list[Contender] = []
    for one in lowest:
        if pages <= 0 and len(victims) >= least:
            break
        victims.append(one)
        pages -= one.pages
    if pages > 0 or len(victims) < least:
        return None
    for one in reversed(victims[:]):
        if pages + one.pages <= 0 and len(victims) > least:
            victims.remove(one)
            pages += one.pages
    return victims
