"""The placement policies: `fleet`, and those that it is measured beside. docs/fleet.md says when each is best."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from edged.placement.forecast import harm_s, response_s
from edged.placement.homes import rendezvous
from edged.placement.node import NodeView, RoutedRequest
from edged.placement.policy import Placement, PlacementPolicy

_BOUND = 1.25
"""consistent-hash: most requests of a node, over the mean (Mirrokni et al., 2018)."""


def _ranked(nodes: Sequence[NodeView], key: Callable[[NodeView], Any]) -> tuple[NodeView, ...]:
    """Sort nodes by a key; equal ones by name."""
    return tuple(sorted(nodes, key=lambda node: (key(node), node.name)))


def _placement(nodes: Sequence[NodeView], arrival: RoutedRequest) -> Placement:
    return Placement(tuple(node.name for node in nodes), {node.name: response_s(node, arrival) for node in nodes})


@dataclass(slots=True)
class ByKey:
    """A policy that sends a request where a number of node, request and forecast response is smallest."""

    key: Callable[[NodeView, RoutedRequest, float], Any]

    def place(self, arrival: RoutedRequest, nodes: Sequence[NodeView], now: float) -> Placement:
        """Rank by the key."""
        forecasts = {node.name: response_s(node, arrival) for node in nodes}
        ranked = _ranked(nodes, lambda node: self.key(node, arrival, forecasts[node.name]))
        return Placement(tuple(node.name for node in ranked), forecasts)


@dataclass(slots=True)
class RoundRobin:
    """The nodes in turns."""

    _turn: int = 0

    def place(self, arrival: RoutedRequest, nodes: Sequence[NodeView], now: float) -> Placement:
        """Begin the ranking one node further than the last time."""
        known = _ranked(nodes, lambda node: 0)
        first = self._turn % len(known)
        self._turn += 1
        return _placement(known[first:] + known[:first], arrival)


@dataclass(slots=True)
class PowerOfTwo:
    """The less loaded of two nodes by chance (Mitzenmacher, 2001)."""

    _random: random.Random = field(default_factory=lambda: random.Random(0))

    def place(self, arrival: RoutedRequest, nodes: Sequence[NodeView], now: float) -> Placement:
        """Rank the two first, then the others by load."""
        known = _ranked(nodes, lambda node: node.requests)
        pair = set(self._random.sample([node.name for node in known], min(2, len(known))))
        return _placement(_ranked(known, lambda node: (node.name not in pair, node.requests)), arrival)


@dataclass(slots=True)
class ConsistentHash:
    """A user's or a prompt's own node by hash, unless it has more than 1.25 times the mean of all requests."""

    def place(self, arrival: RoutedRequest, nodes: Sequence[NodeView], now: float) -> Placement:
        """Rank by hash; nodes over the bound come last."""
        key = arrival.user or str(arrival.blocks[0] if arrival.blocks else 0)
        bound = _BOUND * (1 + sum(node.requests for node in nodes)) / len(nodes)
        order = {name: place for place, name in enumerate(rendezvous(key, [node.name for node in nodes]))}
        return _placement(_ranked(nodes, lambda node: (node.requests >= bound, order[node.name])), arrival)


POLICIES: dict[str, Callable[[], PlacementPolicy]] = {
    "fleet": lambda: ByKey(lambda node, arrival, response: response + harm_s(node, arrival)),
    "least-response": lambda: ByKey(lambda node, arrival, response: response),
    "least-loaded": lambda: ByKey(lambda node, *_: node.requests),
    "lowest-utilization": lambda: ByKey(lambda node, *_: (node.load.busy_share, node.requests)),
    "prefix-affinity": lambda: ByKey(lambda node, arrival, _: (-node.hit_bytes(arrival), node.requests)),
    "consistent-hash": ConsistentHash,
    "power-of-two": PowerOfTwo,
    "round-robin": RoundRobin,
}
"""The policies by name."""
