"""Intersection resource scheduling (Venn Algorithm 3): which group of requests gets the boxes of each atom.

The printed algorithm and its text differ; docs/decisions.md says what was taken.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

QueueLength = Callable[[Sequence[int], float, float], int]
"""m' of the richer group: of its requests' summed demands, its rate, and the seconds in which the scarcer one is
through."""


def whole_queue(sums: Sequence[int], rate: float, until_s: float) -> int:
    """Return the group's length, the paper's easier m'."""
    return len(sums)


def affected_queue(sums: Sequence[int], rate: float, until_s: float) -> int:
    """Return how many requests would be served before the scarcer group is through.

    Later ones gain nothing by overtaking: they get the boxes of both groups then.
    """
    return bisect_right(sums, rate * until_s)


@dataclass(frozen=True, slots=True)
class Group:
    """Requests that may take the same atoms: `sums` are their demands, ascending and summed up."""

    atoms: frozenset[int]
    sums: Sequence[int]


def allocate(
    groups: Sequence[Group], supply: Mapping[int, float], queue_length: QueueLength = affected_queue
) -> dict[int, int]:
    """Return the group's index for each atom that a group may take; `supply` is the rate of each atom's boxes."""

    def rate(atoms: set[int] | frozenset[int]) -> float:
        return sum(supply[atom] for atom in atoms)

    sizes = [rate(group.atoms) for group in groups]
    scarce_first = sorted(range(len(groups)), key=lambda index: (sizes[index], sorted(groups[index].atoms)))
    free = frozenset().union(*(group.atoms for group in groups))
    shares: dict[int, set[int]] = {}
    for index in scarce_first:
        shares[index] = set(groups[index].atoms & free)
        free -= shares[index]
    rates = {index: rate(share) for index, share in shares.items()}
    for place in range(len(groups) - 1, 0, -1):
        rich, overtaken = scarce_first[place], 0
        for scarce in reversed(scarce_first[:place]):
            shared = shares[scarce] & groups[rich].atoms
            if not rates[rich]:
                break
            if not shared:
                continue
            waiting = len(groups[scarce].sums)
            through_s = groups[scarce].sums[-1] / rates[scarce]
            lengthened = queue_length(groups[rich].sums, rates[rich], through_s) + overtaken
            if lengthened * rates[scarce] <= waiting * rates[rich]:
                break
            shares[rich] |= shared
            shares[scarce] -= shared
            rates[rich], rates[scarce] = rate(shares[rich]), rate(shares[scarce])
            overtaken += waiting
    return {atom: index for index, share in shares.items() for atom in share}
