"""Policies: in which order the requests of a group get boxes, and which group gets the boxes of each atom."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import attrgetter
from typing import Any

from edged.federated.campaigns import RoundRequest
from edged.federated.irs import Group, QueueLength, affected_queue, allocate, whole_queue

Queues = dict[int, list[list[RoundRequest]]]
"""By atom, the groups that may take its boxes, the first one first; each is a list of its requests in order."""


@dataclass(frozen=True, slots=True)
class DevicePolicy:
    """A row: requests are served by `key`; with a queue length, groups by Algorithm 3 and heads by Algorithm 4."""

    key: Callable[[RoundRequest], Any]
    queue_length: QueueLength | None = None

    def queues(self, groups: Mapping[frozenset[int], list[RoundRequest]], supply: Mapping[int, float]) -> Queues:
        """Sort the requests of each group, which is named by its atoms, and return who gets the boxes of each atom."""
        for requests in groups.values():
            requests.sort(key=self.key)
        if self.queue_length is None:
            ranked = sorted(groups, key=lambda atoms: self.key(groups[atoms][0]))
            owners: dict[int, int] = {}
        else:
            ranked = sorted(groups, key=lambda atoms: (sum(supply[atom] for atom in atoms), sorted(atoms)))
            sums = [list(accumulate(map(attrgetter("demand"), groups[atoms]))) for atoms in ranked]
            owners = allocate([Group(*each) for each in zip(ranked, sums, strict=True)], supply, self.queue_length)
        return {atom: [groups[atoms] for atoms in _first(ranked, owners.get(atom)) if atom in atoms] for atom in supply}


def _first(ranked: Sequence[frozenset[int]], owner: int | None) -> Sequence[frozenset[int]]:
    """Return the groups with the owner's moved to the front."""
    return ranked if owner is None else (ranked[owner], *ranked[:owner], *ranked[owner + 1 :])


_by_demand = attrgetter("demand", "campaign.submitted_s")
POLICIES = {
    "venn": DevicePolicy(_by_demand, affected_queue),
    "venn-queue": DevicePolicy(_by_demand, whole_queue),
    "srsf": DevicePolicy(_by_demand),
    "fifo": DevicePolicy(attrgetter("campaign.submitted_s")),
    "random": DevicePolicy(attrgetter("draw")),
}
"""`venn-queue` takes the paper's easier queue length; `srsf` is shortest remaining service first; `random` draws an
order of the requests anew for each, the paper's optimised random matching."""
