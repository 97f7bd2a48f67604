"""K/V storage: one tensor for keys and one for values, addressed by page, layer and KV head.

Owns the layout. Which page belongs to whom is `edged.cache.pool`'s; what is attended is `edged.engine.attention`'s.

A page index names a slab: `layers x kv_heads` blocks of `page_size` rows of `head_dim`, so that one index stands for
all layers and heads of `page_size` tokens, and so that a block is addressable on its own.
"""

from __future__ import annotations

import numpy as np
import torch


class KvStore:
    """Keys and values of `pages` slabs; both tensors have shape [pages * layers * kv_heads, page_size, head_dim]."""

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
        self.blocks_per_page = layers * kv_heads
        shape = (pages * self.blocks_per_page, page_size, head_dim)
        self.keys, self.values = _zeros(shape, dtype, device), _zeros(shape, dtype, device)
        self._key_rows = self.keys.view(-1, head_dim)
        self._value_rows = self.values.view(-1, head_dim)
        self._heads = torch.arange(kv_heads, device=device)

    @staticmethod
    def bytes_per_page(page_size: int, layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """Bytes of one slab: keys and values of `page_size` tokens in all layers."""
        return 2 * layers * kv_heads * page_size * head_dim * dtype.itemsize

    def row_index(self, pages: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Layer 0's rows of tokens: `pages` and `offsets` have shape [tokens]; the result [tokens * kv_heads]."""
        block = pages[:, None] * self.blocks_per_page + self._heads
        return (block * self.page_size + offsets[:, None]).reshape(-1)

    def block_index(self, pages: torch.Tensor) -> torch.Tensor:
        """Layer 0's blocks of page tables: `pages` has shape [sequences, n]; the result [sequences * kv_heads * n]."""
        return (pages[:, None, :] * self.blocks_per_page + self._heads[:, None]).reshape(-1)

    def write(self, layer: int, rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store keys and values of shape [tokens, kv_heads, head_dim] at `row_index` rows of `layer`.

        What is not finite is stored as if it were: a page's next owner reads its stale rows with weight 0, and 0 * NaN
        would carry one user's diverged adapter into another's answer.
        """
        index = rows + layer * self.kv_heads * self.page_size
        self._key_rows.index_copy_(0, index, keys.reshape(-1, self.head_dim).nan_to_num())
        self._value_rows.index_copy_(0, index, values.reshape(-1, self.head_dim).nan_to_num())

    def read(self, layer: int, blocks: torch.Tensor, sequences: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of `block_index` blocks of `layer`, each [sequences, kv_heads, n * page_size, head_dim]."""
        index = blocks + layer * self.kv_heads
        shape = (sequences, self.kv_heads, -1, self.head_dim)
        return self.keys.index_select(0, index).view(shape), self.values.index_select(0, index).view(shape)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeroed, not empty: rows that are not written yet are read with weight 0, which a NaN would survive.

    On the CPU numpy's zeros become resident page by page as they are written, torch's all at once.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros((*shape[:-1], shape[-1] * dtype.itemsize), np.uint8)).view(dtype)
