"""Which adapter's LoRA matrices the rows of a unit see, and where the gradients go.

Owns the order in which a unit's matrices are handed to autograd. Must not know models, losses or windows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from edged.align.decoder import Branches, Leaves, LoraRows
from edged.align.group import Stream


def lora_rows(branches: Sequence[Branches], streams: Sequence[Stream], leaves: Mapping[str, Leaves]) -> list[LoraRows]:
    """The rows that `branches` (of `streams`) cover, by adapter; an adapter's pairs lie side by side."""
    rows: list[LoraRows] = []
    for branch, stream in zip(branches, streams, strict=True):
        own, start = leaves[stream.pair.adapter], branch.first
        if rows and rows[-1].leaves is own:
            start = rows.pop().start
        rows.append(LoraRows(start, branch.last, own))
    return rows


def matrices(rows: Sequence[LoraRows], names: Sequence[str]) -> list[torch.Tensor]:
    """A and B of the linears `names`, adapter by adapter."""
    return [matrix for part in rows for name in names for matrix in part.leaves.weights[name]]


def add_gradients(rows: Sequence[LoraRows], names: Sequence[str], gradients: Iterator[torch.Tensor]) -> None:
    """Add the gradients of `matrices` to each adapter's totals."""
    for part in rows:
        for name in names:
            for total in part.leaves.gradients[name]:
                total.add_(next(gradients))
