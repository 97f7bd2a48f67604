"""The interface of placement policies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from edged.placement.node import Arrival, NodeView


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a request goes: nodes by name, the best first, with seconds to its first token where that is forecast."""

    ranking: tuple[str, ...]
    forecasts: Mapping[str, float]


class Policy(Protocol):
    """A way to choose among nodes. A policy may remember; the order in which nodes are given must not matter."""

    def place(self, arrival: Arrival, nodes: Sequence[NodeView], now: float) -> Placement:
        """Rank all of `nodes`, of which there is at least one."""
        ...
