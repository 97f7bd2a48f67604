"""The interface of placement policies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from edged.placement.node import NodeView, RoutedRequest


@dataclass(frozen=True, slots=True)
class Placement:
    """A decision on a request: nodes by name, the best first, with forecast seconds to its first token."""

    ranking: tuple[str, ...]
    forecasts: Mapping[str, float]


class PlacementPolicy(Protocol):
    """A way to choose among nodes. A policy may remember; the order in which nodes are given must not matter."""

    def place(self, arrival: RoutedRequest, nodes: Sequence[NodeView], now: float) -> Placement:
        """Rank all of `nodes`, of which there is at least one."""
        ...
