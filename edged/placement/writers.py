"""Writers: the node that teaches each user, which moves where pairs would be learned sooner."""

from __future__ import annotations

import math
from collections.abc import Iterable

from edged.placement.node import NodeView

_PASSES = 5.0
"""A pair's forward under the base and the adapter, and its backward with what is recomputed, in forwards."""
_PAIR_TOKENS = 220.0
_LEAST_SHARE = 0.05
"""Share of a box's time that fine-tuning keeps: `scheduler.finetune_min_share`."""


def learning_s(node: NodeView, more: int = 1) -> float:
    """Return the seconds until `more` pairs that came to a node now would be learned, behind those that wait there.

    They are stretched by the node's load: fine-tuning has two thirds of what serving leaves, see docs/readers.md.
    """
    if not node.load.trains:
        return math.inf
    alone_s = (node.pairs + more) * _PASSES * _PAIR_TOKENS * node.cost.token_s * node.load.slowness * node.calibration
    return alone_s / max(_LEAST_SHARE, 2.0 / 3.0 * (1.0 - node.serving_share))


def sooner_writer(writer: str, waiting: int, nodes: Iterable[NodeView], least_s: float, coming: int = 0) -> str:
    """Return the node that is to teach a user: `writer`, or one that would learn sooner by more than `least_s`.

    `waiting` pairs of the user wait at the writer, and go along; `coming` ones are at none yet.
    """
    delays = {
        node.name: learning_s(node, coming if node.name == writer else waiting + coming)
        for node in sorted(nodes, key=lambda node: node.name)
    }
    soonest = min(delays, key=lambda name: delays[name])
    return soonest if delays[writer] > delays[soonest] + least_s else writer
