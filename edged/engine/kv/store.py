"""K/V storage: one tensor for keys and one for values, addressed by page, layer and KV head.

Which page belongs to whom is `edged.cache.page_pool`'s; what is attended is `edged.engine.attention.paged`'s.

A page index names a slab: in each layer `kv_heads` blocks of `page_size` rows of `head_dim`, so that one index stands
for all layers and heads of `page_size` tokens. Layers lie one after the other: an index of rows or blocks is made once
and serves every layer, and a block is still addressable on its own.
"""

from collections.abc import Mapping

import numpy as np
import torch

from edged.engine.kv.backing import back
from edged.tensors.device_copy import upload


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
        # Rows that are not written yet are read with weight 0, which a NaN would survive: they are zeros.
        self._backings = back(shape, dtype, device), back(shape, dtype, device)
        self.keys, self.values = (backing.tensor for backing in self._backings)
        self._pages = pages
        self._page_layer_bytes = kv_heads * page_size * head_dim * dtype.itemsize
        self._heads = torch.arange(kv_heads, device=device)

    @property
    def page_bytes(self) -> int:
        """Of one slab: keys and values of a page's tokens in all layers."""
        return 2 * self.layers * self._page_layer_bytes

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

    @property
    def gives_back(self) -> bool:
        """Whether memory of pages that nobody holds can be returned to the system."""
        return self._backings[0].gives_back

    def give_back(self, first: int) -> None:
        """Return the memory of the pages from `first` on to the system, as far as it does not hold others as well."""
        for backing in self._backings:
            backing.give_back(self._ranges(first, self._pages))

    def take_back(self, end: int) -> None:
        """Have memory for all pages below `end`, zeros where it was given back. Raises MemoryError."""
        for backing in self._backings:
            backing.take_back(self._ranges(0, end))

    def _ranges(self, first: int, end: int) -> list[tuple[int, int]]:
        """Where pages lie in each layer of the keys, and so of the values: (first byte, end)."""
        size, layers = self._page_layer_bytes, range(0, self.layers * self._pages, self._pages)
        return [((before + first) * size, (before + end) * size) for before in layers]

    def move_pages(self, moved: Mapping[int, int]) -> None:
        """Copy the pages in the keys over those in the values; no page is in both."""
        device = self.keys.device
        tables = [np.fromiter(pages, np.int64) for pages in (moved.keys(), moved.values())]
        old, new = (self.block_index(pages[None]) for pages in upload(tables, device))
        for store in (self.keys, self.values):
            for layer in store:
                layer.index_copy_(0, new, layer.index_select(0, old))
