"""Nodes with made-up reports, in the prices of a small device."""

from __future__ import annotations

from typing import Any

from edged.placement.node import NodeLoad, NodeView

REPORT: dict[str, Any] = {
    **{"version": "0.1.0", "model": "m", "fingerprint": "f", "dtype": "float32", "phase": "ready"},
    **{"backlog_tokens": 0, "waiting": 0, "decodes": 0, "context": 0, "free_pages": 900, "pages": 1000},
    **{"page_tokens": 16, "free_sequences": 64, "chunk_tokens": 256, "unit_s": 0.0, "pairs_queued": 0},
    **{"busy_share": 0.0, "slowness": 1.0, "knee_tokens": 16},
    "forward_prices": (0.01, 0.0, 0.0005, 0.0005, 1e-7, 0.0, 0.0005, 0.0, 0.0, 0.0),
}


def node(name: str, **changes: Any) -> NodeView:
    """A node that reported at second 0; it is idle but for `changes`."""
    return NodeView(name, NodeLoad.model_validate(REPORT | changes), 0.0)
