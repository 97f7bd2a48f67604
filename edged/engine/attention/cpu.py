"""Decode attention by the compiled kernels, which read each context's K/V pages in place, once."""

import ctypes

import torch

from edged.engine.attention.base import AttentionCall
from edged.engine.kv.pruned_layout import HeadTables
from edged.engine.kv.store import KvStore
from edged.engine.native import library
from edged.engine.native.library import CPages, kernels

_MAX_PAGE_SIZE = 4096
"""Largest page size, in rows: the kernel keeps the scores of a piece of at least a page on its stack."""


def why_not(kv: KvStore) -> str:
    """Return why this path cannot be used on this K/V storage; "" when it can."""
    if kv.page_size > _MAX_PAGE_SIZE:
        return f"pages of {kv.page_size} rows are larger than the compiled kernels' {_MAX_PAGE_SIZE}"
    return library.why_not(kv.keys.device, kv.keys.dtype)


class NativeDecode:
    """The decodes of one iteration, each a single query token over `context` + 1 keys (the last `window` of them)."""

    def __init__(
        self, kv: KvStore, tables: torch.Tensor, context: torch.Tensor, pruned: HeadTables | None, heads: int
    ) -> None:
        """`tables` [n, width] and `context` [n] are as in `PackedBatch`; `pruned` is set if any sequence was pruned."""
        self._pruned = pruned
        self._addresses = kv.keys.data_ptr(), kv.values.data_ptr()
        self._layer_bytes = kv.keys.stride(0) * kv.keys.element_size()
        self._kept = [tables.contiguous(), context]
        n, width = tables.shape
        self._pages = CPages(
            tables=self._kept[0].data_ptr(),
            context=context.data_ptr(),
            slabs=None if pruned is None else pruned.slabs.data_ptr(),
            n=n,
            width=width,
            page_size=kv.page_size,
            kv_heads=kv.kv_heads,
            head_dim=kv.head_dim,
            heads=heads,
        )
        compiled = kernels()
        assert compiled is not None
        self._library = compiled
        piece_pages = max(1, ctypes.c_int64.in_dll(compiled, "edged_piece").value // kv.page_size)
        # A sequence has at most kv_heads * width blocks, also where some heads have more than others.
        pieces = n * kv.kv_heads * (width // piece_pages + 2)
        self._scratch = torch.empty(pieces * (heads // kv.kv_heads) * (kv.head_dim + 2), dtype=torch.float32)
        self._begins = torch.empty(n * kv.kv_heads + 1, dtype=torch.int64)

    def attend(
        self, call: AttentionCall, query: torch.Tensor, new: tuple[torch.Tensor, torch.Tensor] | None
    ) -> torch.Tensor:
        """Attend: `query` [heads, n, d] -> [n, heads, d]; `new` keys and values [kv_heads, n, d] are stored first."""
        pages, layer = self._pages, call.layer
        pages.keys, pages.values = (address + layer * self._layer_bytes for address in self._addresses)
        pages.scaling, pages.softcap, pages.window = call.scaling, call.softcap or 0.0, call.window or 0
        sinks = None if call.sinks is None else call.sinks.float().contiguous()
        pages.sinks = None if sinks is None else sinks.data_ptr()
        if self._pruned is not None:
            # No window is shorter than the contexts of pruned sequences.
            pages.window = 0
            pages.counts = self._pruned.counts[layer].data_ptr()
            pages.offsets = self._pruned.offsets[layer].data_ptr()
        heads, n, d = query.shape
        out = query.new_empty(n, heads, d)
        # The kernel wants contiguous rows, and keys and values of the same strides.
        query = query if query.stride(2) == 1 else query.contiguous()
        stored: tuple[int | None, ...] = (None, None, 0, 0)
        if new is not None:
            keys, values = new
            if keys.stride() != values.stride() or keys.stride(2) != 1:
                keys, values = keys.contiguous(), values.contiguous()
            stored = keys.data_ptr(), values.data_ptr(), keys.stride(0), keys.stride(1)
        buffers = out.data_ptr(), self._scratch.data_ptr(), self._begins.data_ptr()
        rows = query.data_ptr(), query.stride(0), query.stride(1)
        self._library.edged_decode(ctypes.byref(pages), *rows, *stored, *buffers, torch.get_num_threads())
        return out
