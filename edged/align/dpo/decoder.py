"""The served model's interface to fine-tune units: single layers with autograd, KV by page, and the head."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from edged.align.adapters.form import LoraLeaves
from edged.align.dpo.layout import Piece

KeysValues = tuple[torch.Tensor, torch.Tensor]
Masks = dict[tuple[int, int, int | None], torch.Tensor]
"""Attention masks of the last queries of a text, by the numbers of queries and of keys, and the sliding window."""


@dataclass(frozen=True, slots=True)
class LoraParameters:
    """One adapter's LoRA matrices in a backward pass; `gradients` (fp32) are totals that are added to in place."""

    weights: LoraLeaves
    """Weights, each linear's last one times LoRA's scaling, in the dtype of computation: autograd's leaves (see
    `with_scaling`)."""
    scalings: Mapping[str, float]
    """LoRA's scaling factor, by linear."""
    gradients: LoraLeaves


def with_scaling(
    weights: LoraLeaves, scalings: Mapping[str, float], dtype: torch.dtype
) -> dict[str, tuple[torch.Tensor, ...]]:
    """Return each linear's weights, as served, the last one times LoRA's scaling, in the dtype of computation."""
    return {
        name: (*(each.to(dtype) for each in own[:-1]), (own[-1] * scalings[name]).to(dtype))
        for name, own in weights.items()
    }


@dataclass(frozen=True, slots=True)
class LoraRows:
    """Rows [start, stop) of a window that use one adapter."""

    start: int
    stop: int
    leaves: LoraParameters


@dataclass(frozen=True, slots=True)
class Branches:
    """One pair inside a window of rows: window rows [first, last) are the pair's flat rows from `start` on.

    `earlier` are the pair's keys and values [kv_heads, start, head_dim] before the window, None when `start` is 0.
    `masks` keeps the masks of the attention for the layers that follow.
    """

    first: int
    last: int
    start: int
    pieces: tuple[Piece, ...]
    earlier: KeysValues | None
    masks: Masks = field(default_factory=dict)


class Decoder(Protocol):
    """The served model's interface to a step."""

    layer_count: int
    hidden_size: int
    vocab_size: int
    device: torch.device
    dtype: torch.dtype
    keeps_states: bool
    """Whether layers keep states: an answer goes on from the one after its prompt, and a unit covers whole pairs."""
    sources: tuple[int, ...]
    """The layer whose keys and values each layer reads: its own number, or an earlier one's."""

    def read_kv(self, layer: int, pages: np.ndarray, rows: int) -> KeysValues:
        """Keys and values [kv_heads, rows, head_dim] of the first `rows` rows in `pages`."""

    def begin(self, ids: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, list[dict[str, Any]]]:
        """The first layer's input [n, hidden] for tokens [n] at positions [n], and every layer's keyword arguments."""

    def run_branches(
        self,
        layer: int,
        hidden: torch.Tensor,
        call: Mapping[str, Any],
        branches: Sequence[Branches],
        rows: Sequence[LoraRows],
        read: KeysValues | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """One layer with autograd: [tokens, hidden] -> output, own keys, own values ([kv_heads, tokens, head_dim]).

        `rows` cover all tokens, in order. A layer that reads an earlier one's keys and values is given them: `read`,
        those of the tokens.
        """

    def layer_linears(self, layer: int) -> list[str]:
        """Names of the LoRA linears in a layer."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Final norm and head: [tokens, hidden] -> [tokens, vocab] in fp32."""
