"""Decode attention on a GPU that reads K/V pages where they lie: a Triton kernel over pages, and one to join its parts.

A program handles one sequence, one KV head with all query heads of its group, and one part of the context (split-K, as
in Flash-Decoding: long contexts keep the whole device busy however few the sequences). It keeps the running maximum and
sum of the online softmax (Milakov and Gimelshein 2018); the second kernel brings the parts to one maximum and adds.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

from edged.engine.attention.base import AttentionCall
from edged.engine.kv.pruned_layout import HeadTables
from edged.engine.kv.store import KvStore
from edged.engine.native import triton_device

_BLOCK, _BLOCK_BYTES = 64, 16 << 10
"""Most keys of one step of a program, and what they take at most, so that they fit the shared memory of small GPUs."""
_PROGRAMS = 256
"""Programs wanted at once: contexts are split until there are about so many."""
_MOST_SPLITS = 32
_MOST_HEAD_DIM = 256
_NO_WINDOW = 1 << 30

if importlib.util.find_spec("triton") is not None:
    import triton
    import triton.language as tl

    # What differs between iterations must not make another variant, which would be compiled while users wait.
    @triton.jit(do_not_specialize=["tables", "context", "slabs", "counts", "offsets", "window", "width"])
    def _attend_part(
        query,
        keys,
        values,
        tables,
        context,
        slabs,
        counts,
        offsets,
        parts,
        extremes,
        sums,
        scaling,
        softcap,
        window,
        width,
        GROUP: tl.constexpr,
        GROUP_PAD: tl.constexpr,
        HEAD: tl.constexpr,
        HEAD_PAD: tl.constexpr,
        PAGE: tl.constexpr,
        BLOCK: tl.constexpr,
        CAPPED: tl.constexpr,
        BY_HEAD: tl.constexpr,
    ) -> None:
        # 64 bits, as the tables have: what is addressed may have more than 2^31 elements.
        sequence, head, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
        kv_heads, splits = tl.num_programs(1), tl.num_programs(2)
        length = tl.load(context + sequence) + 1
        if BY_HEAD:
            # See `edged.engine.kv.pruned_layout`.
            slab = tl.load(slabs + sequence)
            kept = tl.load(counts + sequence * kv_heads + head)
            before = tl.load(offsets + sequence * kv_heads + head)
            length += (kept - slab) * PAGE
        first = tl.maximum(0, length - window)
        share = tl.cdiv(tl.cdiv(length - first, splits), BLOCK) * BLOCK
        start = first + part * share
        stop = tl.minimum(start + share, length)

        rows = tl.arange(0, GROUP_PAD)
        lanes = tl.arange(0, HEAD_PAD)
        at = ((sequence * kv_heads + head) * GROUP + rows[:, None]) * HEAD + lanes[None, :]
        seen = (rows[:, None] < GROUP) & (lanes[None, :] < HEAD)
        q = tl.load(query + at, mask=seen, other=0.0)
        highest = tl.full((GROUP_PAD,), float("-inf"), tl.float32)
        total = tl.zeros((GROUP_PAD,), tl.float32)
        out = tl.zeros((GROUP_PAD, HEAD_PAD), tl.float32)
        for begin in range(start, stop, BLOCK):
            position = begin + tl.arange(0, BLOCK)
            inside = position < stop
            column, slot = position // PAGE, head
            if BY_HEAD:
                slot = tl.where(column < kept, (before + column) % kv_heads, head)
                column = tl.where(column < kept, (before + column) // kv_heads, slab + column - kept)
            page = tl.load(tables + sequence * width + column, mask=inside, other=0)
            row = (page * kv_heads + slot) * PAGE + position % PAGE
            address = row[:, None] * HEAD + lanes[None, :]
            there = inside[:, None] & (lanes[None, :] < HEAD)
            k = tl.load(keys + address, mask=there, other=0.0)
            v = tl.load(values + address, mask=there, other=0.0)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scaling
            if CAPPED:
                # tanh(x) = 2 sigmoid(2x) - 1
                scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
            scores = tl.where(inside[None, :], scores, float("-inf"))
            higher = tl.maximum(highest, tl.max(scores, 1))
            fading = tl.exp(highest - higher)
            weights = tl.exp(scores - higher[:, None])
            total = total * fading + tl.sum(weights, 1)
            out = out * fading[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
            highest = higher
        slot = ((sequence * kv_heads + head) * splits + part) * GROUP
        tl.store(parts + (slot + rows[:, None]) * HEAD + lanes[None, :], out, mask=seen)
        tl.store(extremes + slot + rows, highest, mask=rows < GROUP)
        tl.store(sums + slot + rows, total, mask=rows < GROUP)

    @triton.jit(do_not_specialize=["splits"])
    def _join_parts(
        parts,
        extremes,
        sums,
        result,
        splits,
        GROUP: tl.constexpr,
        HEAD: tl.constexpr,
        HEAD_PAD: tl.constexpr,
        SPLITS_PAD: tl.constexpr,
    ) -> None:
        pair, row = tl.program_id(0).to(tl.int64), tl.program_id(1)
        part = tl.arange(0, SPLITS_PAD)
        lanes = tl.arange(0, HEAD_PAD)
        slot = (pair * splits + part) * GROUP + row
        highest = tl.load(extremes + slot, mask=part < splits, other=float("-inf"))
        fading = tl.exp(highest - tl.max(highest, 0))
        total = tl.sum(tl.load(sums + slot, mask=part < splits, other=0.0) * fading, 0)
        there = (part[:, None] < splits) & (lanes[None, :] < HEAD)
        pieces = tl.load(parts + slot[:, None] * HEAD + lanes[None, :], mask=there, other=0.0)
        out = tl.sum(pieces * fading[:, None], 0) / total
        tl.store(result + (pair * GROUP + row) * HEAD + lanes, out, mask=lanes < HEAD)


def why_not(kv: KvStore) -> str:
    """Why the kernels cannot be used on this K/V storage; "" when they can."""
    if kv.head_dim > _MOST_HEAD_DIM:
        return f"heads of {kv.head_dim} are larger than {_MOST_HEAD_DIM}"
    return triton_device.why_not(kv.keys.device, kv.keys.dtype)


def paged_decode(
    call: AttentionCall, query: torch.Tensor, tables: torch.Tensor, context: torch.Tensor, kv: KvStore
) -> torch.Tensor:
    """`query` [n, heads, d] over pages `tables` [n, width], `context` [n] earlier keys and its own -> [n, heads, d]."""
    longest = min(tables.shape[1] * kv.page_size, call.window or tables.shape[1] * kv.page_size)
    # Without heads' own tables their pointers are not read.
    return _decode(call, query, (tables, context, tables, tables, tables), kv, longest, False)


def paged_decode_by_head(call: AttentionCall, query: torch.Tensor, heads: HeadTables, kv: KvStore) -> torch.Tensor:
    """`paged_decode` where sequences were pruned; no window is shorter than their contexts."""
    layer = call.layer
    tables = (heads.tables, heads.context, heads.slabs, heads.counts[layer], heads.offsets[layer])
    longest = int(heads.most_blocks[layer].max()) * kv.page_size
    return _decode(call._replace(window=None), query, tables, kv, longest, True)


def _decode(
    call: AttentionCall, query: torch.Tensor, tables: tuple[torch.Tensor, ...], kv: KvStore, longest: int, by_head: bool
) -> torch.Tensor:
    """Both kernels; `tables` as `_attend_part` has them, `longest` is the most keys that a query sees."""
    n, heads, size = query.shape
    group = heads // kv.kv_heads
    splits = max(1, min(_MOST_SPLITS, _PROGRAMS // (n * kv.kv_heads), -(-longest // _BLOCK)))
    floats: dict[str, Any] = {"dtype": torch.float32, "device": query.device}
    parts = torch.empty(n, kv.kv_heads, splits, group, size, **floats)
    extremes, sums = (torch.empty(n, kv.kv_heads, splits, group, **floats) for _ in range(2))
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    head_pad = triton.next_power_of_2(size)
    _attend_part[(n, kv.kv_heads, splits)](
        query.contiguous(),
        kv.keys[call.layer],
        kv.values[call.layer],
        *tables,
        parts,
        extremes,
        sums,
        call.scaling,
        1.0 if call.softcap is None else float(call.softcap),
        call.window or _NO_WINDOW,
        tables[0].shape[1],
        GROUP=group,
        GROUP_PAD=max(16, triton.next_power_of_2(group)),
        HEAD=size,
        HEAD_PAD=max(16, head_pad),
        PAGE=kv.page_size,
        BLOCK=max(16, min(_BLOCK, _BLOCK_BYTES // (head_pad * query.dtype.itemsize))),
        CAPPED=call.softcap is not None,
        BY_HEAD=by_head,
    )
    _join_parts[(n * kv.kv_heads, group)](
        parts, extremes, sums, out, splits, GROUP=group, HEAD=size, HEAD_PAD=head_pad, SPLITS_PAD=_MOST_SPLITS
    )
    return out
