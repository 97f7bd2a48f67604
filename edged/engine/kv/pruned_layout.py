"""The layout of pruned sequences' K/V rows: the owner of each block, by layer and KV head.

A pruned sequence's first `slabs` pages hold, in each layer, the kept rows of its KV heads, one head after the other in
whole blocks of a page's rows: of these pages' `slabs * kv_heads` blocks, in order, head h owns `counts[layer, h]`
after those of the heads before it. The pages that follow have the usual layout, a block for each head. So the usual
page table and the counts locate every row. A head's rows are in the order of their tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from edged.engine.kv.store import KvStore
from edged.tensors.device_copy import upload


@dataclass(frozen=True, slots=True, eq=False)
class PrunedLayout:
    """The compacted pages of one sequence; each layer's `counts` [layers, kv_heads] add up to `slabs * kv_heads`."""

    slabs: int
    counts: np.ndarray
    removed: int
    """Tokens by which the K/V rows are fewer than the sequence's tokens, on the mean of the heads."""


@dataclass(frozen=True, slots=True)
class HeadTables:
    """The locations of each head's rows for all decodes of a batch; unpruned ones have counts and slabs of 0.

    `tables` [n, width] are the page tables, `context` [n] the rows before the new one on the mean of the heads, `slabs`
    [n], `counts` and `offsets` [layers, n, kv_heads] the blocks of a head and those of the heads before it.
    """

    tables: torch.Tensor
    context: torch.Tensor
    slabs: torch.Tensor
    counts: torch.Tensor
    offsets: torch.Tensor
    max_blocks: np.ndarray
    """The most blocks of any head of a sequence, its newest row's included: [layers, n], on the host."""
    pruned: bool
    """Whether any of the sequences was pruned."""

    @classmethod
    def of(
        cls,
        compacted: Sequence[PrunedLayout | None],
        contexts: Sequence[int],
        tables: torch.Tensor,
        context: torch.Tensor,
        kv: KvStore,
    ) -> HeadTables:
        """Build the tables of all decodes; `contexts` is `context` on the host."""
        counts = np.zeros((kv.layers, len(compacted), kv.kv_heads), np.int64)
        slabs = np.zeros(len(compacted), np.int64)
        for row, part in enumerate(compacted):
            if part is not None:
                counts[:, row], slabs[row] = part.counts, part.slabs
        later = np.array(contexts, np.int64) // kv.page_size + 1 - slabs
        most = counts.max(axis=2) + later
        moved = upload([counts.reshape(-1), slabs], tables.device)
        on_device = moved[0].view(counts.shape)
        offsets = on_device.cumsum(-1) - on_device
        return cls(tables, context, moved[1], on_device, offsets, most, bool(slabs.any()))

    def lengths(self, layer: int, page_size: int) -> torch.Tensor:
        """Return the number of rows that each head sees, the new one included: [n, kv_heads]."""
        return (self.context + 1 - self.slabs * page_size)[:, None] + self.counts[layer] * page_size

    def blocks(self, layer: int) -> torch.Tensor:
        """Return each head's blocks of `layer` in order, [n, kv_heads, most]; past a head's own blocks, any block."""
        counts, offsets = self.counts[layer][..., None], self.offsets[layer][..., None]
        kv_heads = counts.shape[1]
        block = torch.arange(int(self.max_blocks[layer].max()), device=counts.device)
        head = torch.arange(kv_heads, device=counts.device)[:, None]
        kept, flat = block < counts, offsets + block
        column = torch.where(kept, flat // kv_heads, self.slabs[:, None, None] + block - counts)
        column.clamp_(max=self.tables.shape[1] - 1)
        page = self.tables.gather(1, column.flatten(1)).view(column.shape)
        return page * kv_heads + torch.where(kept, flat % kv_heads, head)
