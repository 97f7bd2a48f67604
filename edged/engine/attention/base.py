"""What the layers of a model ask of attention, and what answers them."""

from typing import NamedTuple, Protocol

import torch


class AttentionCall(NamedTuple):
    """What a layer asks beside its query, key and value."""

    layer: int
    scaling: float
    """Of the scores, before the soft cap."""
    window: int | None = None
    """A query sees only the latest so many keys, its own included."""
    softcap: float | None = None
    """Bounds the scores as in Gemma 2: cap * tanh(score / cap)."""


class AttentionBackend(Protocol):
    """One forward's meaning of attention."""

    def attend(self, call: AttentionCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """`query` [heads, tokens, d], `key` and `value` [kv_heads, tokens, d] -> [tokens, heads, d]."""
