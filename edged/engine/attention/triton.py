"""Attention on a GPU that reads K/V pages in place: Triton kernels for decodes, and one for longer segments.

All keep the running maximum and sum of the online softmax (Milakov and Gimelshein 2018).

Decodes: a program handles one sequence, one KV head with all query heads of its group, and one part of the context
(split-K, as in Flash-Decoding: long contexts keep the whole device busy however few the sequences); a second kernel
brings the parts to one maximum and adds.

Prompt chunks and fine-tune pieces: a program handles one KV head of one tile of `PrefillTiles`: some consecutive query
tokens of one segment, each with all query heads of the group, so that a loaded key serves them all. Keys are counted as
the tile sees them, without the rows hidden from it: causality and the window are defined on that count. One launch a
layer serves all segments; a tile of 0 tokens returns at once.
"""

import importlib.util
from typing import Any

import torch

from edged.engine.attention.base import AttentionCall
from edged.engine.attention.packed_batch import PrefillTiles
from edged.engine.kv.pruned_layout import HeadTables
from edged.engine.kv.store import KvStore
from edged.engine.native import triton_device

_BLOCK, _BLOCK_BYTES = 64, 16 << 10
"""Most keys of one step of a decode's program, and most bytes of them, to fit the shared memory of small GPUs."""
_PROGRAMS = 256
"""Target number of programs: contexts are split until there are about so many."""
_MAX_SPLITS = 32
_LINES, _KEYS = 64, 64
"""Most queries (tokens times the heads of a group) of a tile's program, and most keys of one of its steps."""
_QUERY_ELEMENTS = {2: 16 << 10, 4: 4 << 10}
"""About how many elements a tile's queries hold, by bytes of an element; the keys of a step hold half. Compiled for
sm_87 with heads of 64 to 512, everything then fits into registers, and into the 99 KiB of shared memory that the
smallest GPUs since sm_80 have."""
_MAX_HEAD_DIM = 512
_NO_WINDOW = 1 << 30

if importlib.util.find_spec("triton") is not None:
    import triton
    import triton.language as tl

    @triton.jit
    def _step(q, k, v, visible, highest, total, out, scaling, softcap, CAPPED: tl.constexpr):
        """Continue the online softmax over more keys: return the new `highest` scores, `total` weights and `out`."""
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scaling
        if CAPPED:
            # tanh(x) = 2 sigmoid(2x) - 1
            scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
        scores = tl.where(visible, scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        # A query may see none of these: its maximum is -inf, which must not be subtracted from itself.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        fading = tl.exp(highest - base)
        weights = tl.exp(scores - base[:, None])
        out = out * fading[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        return higher, total * fading + tl.sum(weights, 1), out

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
            highest, total, out = _step(q, k, v, inside[None, :], highest, total, out, scaling, softcap, CAPPED)
        slot = ((sequence * kv_heads + head) * splits + part) * GROUP
        tl.store(parts + (slot + rows[:, None]) * HEAD + lanes[None, :], out, mask=seen)
        tl.store(extremes + slot + rows, highest, mask=rows < GROUP)
        tl.store(sums + slot + rows, total, mask=rows < GROUP)

    @triton.jit(do_not_specialize=["sinks", "splits"])
    def _join_parts(
        parts,
        extremes,
        sums,
        sinks,
        result,
        splits,
        KV_HEADS: tl.constexpr,
        GROUP: tl.constexpr,
        HEAD: tl.constexpr,
        HEAD_PAD: tl.constexpr,
        SPLITS_PAD: tl.constexpr,
        SINKS: tl.constexpr,
    ) -> None:
        pair, row = tl.program_id(0).to(tl.int64), tl.program_id(1)
        part = tl.arange(0, SPLITS_PAD)
        lanes = tl.arange(0, HEAD_PAD)
        slot = (pair * splits + part) * GROUP + row
        highest = tl.load(extremes + slot, mask=part < splits, other=float("-inf"))
        largest, sink = tl.max(highest, 0), float("-inf")
        if SINKS:
            sink = tl.load(sinks + pair % KV_HEADS * GROUP + row).to(tl.float32)
            largest = tl.maximum(largest, sink)
        fading = tl.exp(highest - largest)
        total = tl.sum(tl.load(sums + slot, mask=part < splits, other=0.0) * fading, 0)
        if SINKS:
            total += tl.exp(sink - largest)
        there = (part[:, None] < splits) & (lanes[None, :] < HEAD)
        pieces = tl.load(parts + slot[:, None] * HEAD + lanes[None, :], mask=there, other=0.0)
        out = tl.sum(pieces * fading[:, None], 0) / total
        tl.store(result + (pair * GROUP + row) * HEAD + lanes, out, mask=lanes < HEAD)

    @triton.jit(do_not_specialize=["tiles", "pages", "sinks", "window"])
    def _attend_tile(
        query,
        keys,
        values,
        tiles,
        pages,
        sinks,
        result,
        scaling,
        softcap,
        window,
        COLUMNS: tl.constexpr,
        TOKENS: tl.constexpr,
        GROUP: tl.constexpr,
        HEAD: tl.constexpr,
        HEAD_PAD: tl.constexpr,
        PAGE: tl.constexpr,
        LINES: tl.constexpr,
        BLOCK: tl.constexpr,
        CAPPED: tl.constexpr,
        SINKS: tl.constexpr,
    ) -> None:
        tile, head, kv_heads = tiles + tl.program_id(0) * COLUMNS, tl.program_id(1), tl.num_programs(1)
        skipped = tl.program_id(2) * TOKENS
        num_tokens = tl.minimum(tl.load(tile + 1) - skipped, TOKENS)
        if num_tokens <= 0:
            return
        first_token = tl.load(tile) + skipped
        hidden_first, hidden = tl.load(tile + 3), tl.load(tile + 4)
        table = pages + tl.load(tile + 5)
        before = tl.load(tile + 2) - hidden + skipped

        line = tl.arange(0, LINES)
        lanes = tl.arange(0, HEAD_PAD)
        token = line // GROUP
        # Tables hold 64-bit numbers, and so does what is computed from them: elements may be more than 2^31.
        row = ((first_token + token) * kv_heads + head) * GROUP + line % GROUP
        at = row[:, None] * HEAD + lanes[None, :]
        asked = (token[:, None] < num_tokens) & (lanes[None, :] < HEAD)
        q = tl.load(query + at, mask=asked, other=0.0)
        own = before + token
        highest = tl.full((LINES,), float("-inf"), tl.float32)
        total = tl.zeros((LINES,), tl.float32)
        if SINKS:
            highest = tl.load(sinks + head * GROUP + line % GROUP).to(tl.float32)
            total = tl.where(highest == float("-inf"), 0.0, 1.0)
        out = tl.zeros((LINES, HEAD_PAD), tl.float32)
        stop = before + num_tokens
        for begin in range(tl.maximum(before - window + 1, 0), stop, BLOCK):
            seen = begin + tl.arange(0, BLOCK)
            lies = tl.where(seen < hidden_first, seen, seen + hidden)
            page = tl.load(table + lies // PAGE, mask=seen < stop, other=0)
            address = ((page * kv_heads + head) * PAGE + lies % PAGE)[:, None] * HEAD + lanes[None, :]
            there = (seen[:, None] < stop) & (lanes[None, :] < HEAD)
            k = tl.load(keys + address, mask=there, other=0.0)
            v = tl.load(values + address, mask=there, other=0.0)
            behind = own[:, None] - seen[None, :]
            visible = (behind >= 0) & (behind < window)
            highest, total, out = _step(q, k, v, visible, highest, total, out, scaling, softcap, CAPPED)
        total = tl.where(token < num_tokens, total, 1.0)
        tl.store(result + at, out / total[:, None], mask=asked)


def why_not(kv: KvStore) -> str:
    """Return why the kernels cannot be used on this K/V storage; "" when they can."""
    if kv.head_dim > _MAX_HEAD_DIM:
        return f"heads of {kv.head_dim} are larger than {_MAX_HEAD_DIM}"
    return triton_device.why_not(kv.keys.device, kv.keys.dtype)


def paged_decode(
    call: AttentionCall,
    query: torch.Tensor,
    tables: torch.Tensor,
    context: torch.Tensor,
    kv: KvStore,
    pruned: HeadTables | None = None,
) -> torch.Tensor:
    """Attend with `query` [n, heads, d] over pages `tables` [n, width], to `context` [n] earlier keys and its own.

    Returns [n, heads, d]. `pruned` locates the rows of each head, if any of the sequences was pruned.
    """
    n, heads, size = query.shape
    group, layer = heads // kv.kv_heads, call.layer
    window = call.window or _NO_WINDOW
    longest = min(tables.shape[1] * kv.page_size, window)
    # Without heads' own tables their pointers are not read.
    by_head = tables, tables, tables
    if pruned is not None:
        # No window is shorter than the contexts of pruned sequences.
        window, longest = _NO_WINDOW, int(pruned.max_blocks[layer].max()) * kv.page_size
        by_head = pruned.slabs, pruned.counts[layer], pruned.offsets[layer]
    splits = max(1, min(_MAX_SPLITS, _PROGRAMS // (n * kv.kv_heads), -(-longest // _BLOCK)))
    floats: dict[str, Any] = {"dtype": torch.float32, "device": query.device}
    parts = torch.empty(n, kv.kv_heads, splits, group, size, **floats)
    extremes, sums = (torch.empty(n, kv.kv_heads, splits, group, **floats) for _ in range(2))
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    head_pad = triton.next_power_of_2(size)
    _attend_part[(n, kv.kv_heads, splits)](
        query.contiguous(),
        kv.keys[layer],
        kv.values[layer],
        tables,
        context,
        *by_head,
        parts,
        extremes,
        sums,
        call.scaling,
        1.0 if call.softcap is None else float(call.softcap),
        window,
        tables.shape[1],
        GROUP=group,
        GROUP_PAD=max(16, triton.next_power_of_2(group)),
        HEAD=size,
        HEAD_PAD=max(16, head_pad),
        PAGE=kv.page_size,
        BLOCK=max(16, min(_BLOCK, _BLOCK_BYTES // (head_pad * query.dtype.itemsize))),
        CAPPED=call.softcap is not None,
        BY_HEAD=pruned is not None,
    )
    _join_parts[(n * kv.kv_heads, group)](
        parts,
        extremes,
        sums,
        sums if call.sinks is None else call.sinks,
        out,
        splits,
        KV_HEADS=kv.kv_heads,
        GROUP=group,
        HEAD=size,
        HEAD_PAD=head_pad,
        SPLITS_PAD=_MAX_SPLITS,
        SINKS=call.sinks is not None,
    )
    return out


def tile_tokens(kv: KvStore, group: int) -> int:
    """Return the tokens of a tile if `group` query heads share a KV head."""
    itemsize, lanes = kv.keys.dtype.itemsize, _lanes(kv)
    least = 32 if lanes * itemsize <= 1024 else 16
    return max(1, max(least, min(_LINES, _QUERY_ELEMENTS[itemsize] // lanes)) // group)


def _lanes(kv: KvStore) -> int:
    return max(16, triton.next_power_of_2(kv.head_dim))


def paged_prefill(
    call: AttentionCall, query: torch.Tensor, tiles: PrefillTiles, kv: KvStore, out: torch.Tensor
) -> None:
    """Attend with the tokens of all tiles and write their rows of `out`.

    `query` [heads, tokens, d] and `out` [tokens, heads, d], contiguous, are the whole packed batch, whose K/V are in
    the pages already. A window counts only keys that are not hidden from a query.
    """
    heads, _, size = query.shape
    group = heads // kv.kv_heads
    # The tiles may be those of smaller heads in other layers.
    num_tokens = min(tiles.num_tokens, tile_tokens(kv, group))
    lines, lanes, itemsize = max(16, triton.next_power_of_2(num_tokens * group)), _lanes(kv), query.dtype.itemsize
    _attend_tile[(len(tiles.table), kv.kv_heads, triton.cdiv(tiles.num_tokens, num_tokens))](
        query.transpose(0, 1).contiguous(),
        kv.keys[call.layer],
        kv.values[call.layer],
        tiles.table,
        tiles.pages,
        query if call.sinks is None else call.sinks,
        out,
        call.scaling,
        1.0 if call.softcap is None else float(call.softcap),
        call.window or _NO_WINDOW,
        COLUMNS=tiles.table.shape[1],
        TOKENS=num_tokens,
        GROUP=group,
        HEAD=size,
        HEAD_PAD=lanes,
        PAGE=kv.page_size,
        LINES=lines,
        BLOCK=max(16, min(_KEYS, _QUERY_ELEMENTS[itemsize] // 2 // lanes)),
        CAPPED=call.softcap is not None,
        SINKS=call.sinks is not None,
        num_warps=8 if lines * lanes * itemsize >= 16 << 10 else 4,
        num_stages=2,
    )
