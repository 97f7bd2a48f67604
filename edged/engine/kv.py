"""K/V storage: one tensor for keys and one for values, addressed by page, layer and KV head.

Owns the layout. Which page belongs to whom is `edged.cache.pool`'s; what is attended is `edged.engine.attention`'s.

A page index names a slab: in each layer `kv_heads` blocks of `page_size` rows of `head_dim`, so that one index stands
for all layers and heads of `page_size` tokens. Layers lie one after the other: an index of rows or blocks is made once
and serves every layer, and a block is still addressable on its own.
"""

from __future__ import annotations

import numpy as np
import torch


class KvStore:
    """Keys and values of `pages` slabs; both tensors have shape [layers, pages * kv_heads, page_size, head_dim]."""

    def __init__(
        self,
        pages: int,
        page_size: int,
        layers: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.page_size, self.layers, self.kv_heads, self.head_dim = page_size, layers, kv_heads, head_dim
        shape = (layers, pages * kv_heads, page_size, head_dim)
        self.keys, self.values = _zeros(shape, dtype, device), _zeros(shape, dtype, device)
        self._heads = torch.arange(kv_heads, device=device)

    @staticmethod
    def bytes_per_page(page_size: int, layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """Bytes of one slab: keys and values of `page_size` tokens in all layers."""
        return 2 * layers * kv_heads * page_size * head_dim * dtype.itemsize

    def row_index(self, pages: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Rows of tokens in any layer: `pages` and `offsets` have shape [tokens]; the result [tokens * kv_heads]."""
        block = pages[:, None] * self.kv_heads + self._heads
        return (block * self.page_size + offsets[:, None]).reshape(-1)

    def block_index(self, pages: torch.Tensor) -> torch.Tensor:
        """Blocks of page tables in any layer: `pages` is [sequences, n]; the result [sequences * kv_heads * n]."""
        return (pages[:, None, :] * self.kv_heads + self._heads[:, None]).reshape(-1)

    def rows(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer's keys and values by row, each [pages * kv_heads * page_size, head_dim]."""
        return self.keys[layer].view(-1, self.head_dim), self.values[layer].view(-1, self.head_dim)

    def write(self, layer: int, rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store keys and values of shape [tokens, kv_heads, head_dim] at `row_index` rows of `layer`.

        What is not finite is stored as if it were: a page's next owner reads its stale rows with weight 0, and 0 * NaN
        would carry one user's diverged adapter into another's answer.
        """
        for store, new in zip(self.rows(layer), (keys, values), strict=True):
            store.index_copy_(0, rows, new.reshape(-1, self.head_dim).nan_to_num())

    def read(self, layer: int, blocks: torch.Tensor, sequences: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of `block_index` blocks of `layer`, each [sequences, kv_heads, n * page_size, head_dim]."""
        shape = (sequences, self.kv_heads, -1, self.head_dim)
        keys, values = (store[layer].index_select(0, blocks).view(shape) for store in (self.keys, self.values))
        return keys, values

    def read_keys(self, layer: int, blocks: torch.Tensor) -> torch.Tensor:
        """Keys of one sequence's `blocks` [kv_heads, n] of `layer`: [kv_heads, n * page_size, head_dim]."""
        return self.keys[layer].index_select(0, blocks.flatten()).view(len(blocks), -1, self.head_dim)

    def move(self, layer: int, rows: torch.Tensor, to: torch.Tensor) -> None:
        """Copy `rows` of `layer` over the rows `to`; the two may overlap."""
        for store in self.rows(layer):
            store.index_copy_(0, to, store.index_select(0, rows))


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeroed, not empty: rows that are not written yet are read with weight 0, which a NaN would survive.

    On the CPU numpy's zeros become resident page by page as they are written, torch's all at once.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros((*shape[:-1], shape[-1] * dtype.itemsize), np.uint8)).view(dtype)
