"""K/V storage: one tensor for keys and one for values, addressed by page, layer and KV head; of a model whose layers
have heads of unlike shapes, such tensors for each shape.

The owner of a page is known to `edged.cache.page_pool`; attention is in `edged.engine.attention.paged`.

A page index names a slab: in each layer `kv_heads` blocks of `page_size` rows of `head_dim`, so that one index stands
for all layers and heads of `page_size` tokens. Layers are outermost: an index of rows or blocks is made once and serves
every layer, and a block is still addressable on its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from edged.engine.kv.backing import back
from edged.engine.kv.state import StateStore
from edged.tensors.device_copy import upload


class LayerHeads(NamedTuple):
    """The sizes of one layer's attention."""

    heads: int
    kv_heads: int
    head_dim: int
    """Numbers of a key; shorter values are padded to as many."""
    source: int
    """The layer whose keys and values it reads: itself, or an earlier one."""


def kv_per_token(layers: Sequence[LayerHeads | None], dtype: torch.dtype) -> int:
    """Return the bytes of one token's keys and values in all layers; None: a layer that does not attend."""
    return 2 * dtype.itemsize * sum(each.kv_heads * each.head_dim for each in _own(layers).values())


def store_of(
    layers: Sequence[LayerHeads | None],
    pages: int,
    page_size: int,
    dtype: torch.dtype,
    device: torch.device,
    states: StateStore | None = None,
) -> PagedKv:
    """Allocate K/V storage for layers of these sizes, None for one that does not attend; `states` are kept beside."""
    own = _own(layers)
    shapes = {each[1:3] for each in own.values()}
    if len(shapes) > 1 or any(each is not None and each.source != index for index, each in enumerate(layers)):
        return KvStores(layers, pages, page_size, dtype, device, states)
    places = None if len(own) == len(layers) else {index: place for place, index in enumerate(own)}
    return KvStore(pages, page_size, len(own), *shapes.pop(), dtype, device, places, states)


def _own(layers: Sequence[LayerHeads | None]) -> dict[int, LayerHeads]:
    """Return the layers that have keys and values of their own, by number."""
    return {index: each for index, each in enumerate(layers) if each is not None and each.source == index}


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
        places: Mapping[int, int] | None = None,
        states: StateStore | None = None,
    ) -> None:
        """Allocate the store of `layers` that attend.

        Where a model has other layers, too, `places` has the number here of each of them; `states` are those that
        layers keep beside K/V.
        """
        self.places, self.states = places, states
        self.page_size, self.layers, self.kv_heads, self.head_dim = page_size, layers, kv_heads, head_dim
        shape = (layers, pages * kv_heads, page_size, head_dim)
        # Rows that are not written yet are read with weight 0, which a NaN would survive: they are zeros.
        self._backings = back(shape, dtype, device), back(shape, dtype, device)
        self.keys, self.values = (backing.tensor for backing in self._backings)
        self._pages = pages
        self._page_layer_bytes = kv_heads * page_size * head_dim * dtype.itemsize
        self._heads = torch.arange(kv_heads, device=device)

    @property
    def stores(self) -> tuple[KvStore, ...]:
        """The stores of all shapes: this one alone."""
        return (self,)

    def store_of_layer(self, layer: int) -> tuple[KvStore, int]:
        """Return the store that holds a layer, and the layer's number in it."""
        return self, layer if self.places is None else self.places[layer]

    @property
    def page_bytes(self) -> int:
        """Bytes of one slab: keys and values of a page's tokens in all layers."""
        return 2 * self.layers * self._page_layer_bytes

    def row_index(self, pages: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Return the rows of tokens in any layer, [tokens * kv_heads]; `pages` and `offsets` are [tokens]."""
        block = pages[:, None] * self.kv_heads + self._heads
        return (block * self.page_size + offsets[:, None]).reshape(-1)

    def block_index(self, pages: torch.Tensor) -> torch.Tensor:
        """Return the blocks of page tables in any layer, [sequences * kv_heads * n]; `pages` is [sequences, n]."""
        return (pages[:, None, :] * self.kv_heads + self._heads[:, None]).reshape(-1)

    def rows(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a layer's keys and values by row, each [pages * kv_heads * page_size, head_dim]."""
        return self.keys[layer].view(-1, self.head_dim), self.values[layer].view(-1, self.head_dim)

    def write(self, layer: int, rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store keys and values of shape [tokens, kv_heads, head_dim] at `row_index` rows of `layer`.

        Values that are not finite are replaced by finite ones: a page's next owner reads its stale rows with weight 0,
        and 0 * NaN would carry one user's diverged adapter into another's answer.
        """
        for store, new in zip(self.rows(layer), (keys, values), strict=True):
            store.index_copy_(0, rows, new.reshape(-1, self.head_dim).nan_to_num())

    def read(self, layer: int, blocks: torch.Tensor, sequences: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `block_index` blocks of `layer`: keys and values [sequences, kv_heads, n * page_size, head_dim]."""
        shape = (sequences, self.kv_heads, -1, self.head_dim)
        keys, values = (store[layer].index_select(0, blocks).view(shape) for store in (self.keys, self.values))
        return keys, values

    def read_keys(self, layer: int, blocks: torch.Tensor) -> torch.Tensor:
        """Return the keys [kv_heads, n * page_size, head_dim] of one sequence's `blocks` [kv_heads, n] of `layer`."""
        return self.keys[layer].index_select(0, blocks.flatten()).view(len(blocks), -1, self.head_dim)

    def move(self, layer: int, rows: torch.Tensor, to: torch.Tensor) -> None:
        """Copy `rows` of `layer` over the rows `to`; the two may overlap."""
        for store in self.rows(layer):
            store.index_copy_(0, to, store.index_select(0, rows))

    @property
    def gives_back(self) -> bool:
        """Whether the memory of free pages can be returned to the system."""
        return self._backings[0].gives_back

    def give_back(self, first: int) -> None:
        """Return the memory of the pages from `first` on to the system, unless it holds parts of other pages, too."""
        for backing in self._backings:
            backing.give_back(self._ranges(first, self._pages))

    def reclaim(self, end: int) -> None:
        """Make all pages below `end` usable again, zeros if they were given back. Raises MemoryError."""
        for backing in self._backings:
            backing.reclaim(self._ranges(0, end))

    def _ranges(self, first: int, end: int) -> list[tuple[int, int]]:
        """Return (first byte, end) of the pages in each layer of the keys, the same as of the values."""
        size, layers = self._page_layer_bytes, range(0, self.layers * self._pages, self._pages)
        return [((before + first) * size, (before + end) * size) for before in layers]

    def move_pages(self, moved: Mapping[int, int]) -> None:
        """Copy each page that is a key of `moved` over the page that is its value; no page is both."""
        device = self.keys.device
        tables = [np.fromiter(pages, np.int64) for pages in (moved.keys(), moved.values())]
        old, new = (self.block_index(pages[None]) for pages in upload(tables, device))
        for store in (self.keys, self.values):
            for layer in store:
                layer.index_copy_(0, new, layer.index_select(0, old))


class KvStores:
    """Keys and values of layers of unlike shapes: a store for each shape, all over the same pages.

    Layers that read the keys and values of an earlier layer have none of their own.
    """

    def __init__(
        self,
        layers: Sequence[LayerHeads | None],
        pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        states: StateStore | None = None,
    ) -> None:
        self.page_size, self.states = page_size, states
        held: dict[tuple[int, int], list[int]] = {}
        for index, each in _own(layers).items():
            held.setdefault(each[1:3], []).append(index)
        made = {shape: KvStore(pages, page_size, len(of), *shape, dtype, device) for shape, of in held.items()}
        self.stores = tuple(made.values())
        self._places = {
            index: (made[each[1:3]], held[each[1:3]].index(each.source))
            for index, each in enumerate(layers)
            if each is not None
        }

    def store_of_layer(self, layer: int) -> tuple[KvStore, int]:
        """Return the store that holds a layer, and the layer's number in it."""
        return self._places[layer]

    @property
    def page_bytes(self) -> int:
        """Bytes of one page: keys and values of its tokens in all layers."""
        return sum(store.page_bytes for store in self.stores)

    @property
    def gives_back(self) -> bool:
        """Whether the memory of free pages can be returned to the system."""
        return self.stores[0].gives_back

    def give_back(self, first: int) -> None:
        """See `KvStore.give_back`."""
        for store in self.stores:
            store.give_back(first)

    def reclaim(self, end: int) -> None:
        """See `KvStore.reclaim`. Raises MemoryError."""
        for store in self.stores:
            store.reclaim(end)

    def move_pages(self, moved: Mapping[int, int]) -> None:
        """See `KvStore.move_pages`."""
        for store in self.stores:
            store.move_pages(moved)


PagedKv = KvStore | KvStores
"""K/V storage of a model."""
