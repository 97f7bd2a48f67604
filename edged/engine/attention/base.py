"""The interface between a model's layers and the attention implementations."""

from typing import NamedTuple, Protocol

import torch


class AttentionCall(NamedTuple):
    """The parameters of one layer's attention call, beside its query, key and value."""

    layer: int
    scaling: float
    """Factor of the scores, before the soft cap."""
    window: int | None = None
    """Sliding window: how many latest keys a query sees, its own included; None: all."""
    softcap: float | None = None
    """Bounds the scores as in Gemma 2: cap * tanh(score / cap)."""
    sinks: torch.Tensor | None = None
    """A further score of each head, [heads], without a value behind it, as in gpt-oss; the cap does not bound it."""


class AttentionBackend(Protocol):
    """An implementation of attention, bound to one forward pass."""

    def attend(self, call: AttentionCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Attend: `query` [heads, tokens, d], `key` and `value` [kv_heads, tokens, d] -> [tokens, heads, d]."""
