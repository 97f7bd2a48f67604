"""Attention of prompt chunks and fine-tune pieces on a GPU that reads K/V pages where they lie: one Triton kernel.

A program handles one KV head of one tile of `batch.PrefillTiles`: some consecutive query tokens of one segment, each
with all query heads of the group, so that a loaded key serves them all. It keeps the running maximum and sum of the
online softmax (Milakov and Gimelshein 2018). Keys are counted as the tile sees them, without the rows hidden from it:
causality and the window are defined on that count. One launch a layer serves all segments; a tile of 0 tokens returns
at once.
"""

from __future__ import annotations

import importlib.util

import torch

from edged.engine.attention.base import AttentionCall
from edged.engine.attention.packed_batch import PrefillTiles
from edged.engine.kv.store import KvStore
from edged.engine.native import triton_device

_LINES, _KEYS = 64, 64
"""Most queries (tokens times the heads of a group) of a program, and most keys of one of its steps."""
_QUERY_ELEMENTS = {2: 16 << 10, 4: 4 << 10}
"""By bytes of an element, what the queries of a program hold about; the keys of a step hold half. Compiled for sm_87
with heads of 64, 128 and 256, everything then fits into registers, and into the 99 KiB of shared memory that the
smallest GPUs since sm_80 have."""
_MOST_HEAD_DIM = 256
_NO_WINDOW = 1 << 30

if importlib.util.find_spec("triton") is not None:
    import triton
    import triton.language as tl

    # What differs between iterations must not make another variant, which would be compiled while users wait.
    @triton.jit(do_not_specialize=["tiles", "pages", "window"])
    def _attend_tile(
        query,
        keys,
        values,
        tiles,
        pages,
        result,
        scaling,
        softcap,
        window,
        COLUMNS: tl.constexpr,
        GROUP: tl.constexpr,
        HEAD: tl.constexpr,
        HEAD_PAD: tl.constexpr,
        PAGE: tl.constexpr,
        LINES: tl.constexpr,
        BLOCK: tl.constexpr,
        CAPPED: tl.constexpr,
    ) -> None:
        tile, head, kv_heads = tiles + tl.program_id(0) * COLUMNS, tl.program_id(1), tl.num_programs(1)
        tokens = tl.load(tile + 1)
        if tokens == 0:
            return
        first_token = tl.load(tile)
        hidden_first, hidden = tl.load(tile + 3), tl.load(tile + 4)
        table = pages + tl.load(tile + 5)
        before = tl.load(tile + 2) - hidden

        line = tl.arange(0, LINES)
        lanes = tl.arange(0, HEAD_PAD)
        token = line // GROUP
        # Tables hold 64-bit numbers, and so does what is computed from them: elements may be more than 2^31.
        row = ((first_token + token) * kv_heads + head) * GROUP + line % GROUP
        at = row[:, None] * HEAD + lanes[None, :]
        asked = (token[:, None] < tokens) & (lanes[None, :] < HEAD)
        q = tl.load(query + at, mask=asked, other=0.0)
        own = before + token
        highest = tl.full((LINES,), float("-inf"), tl.float32)
        total = tl.zeros((LINES,), tl.float32)
        out = tl.zeros((LINES, HEAD_PAD), tl.float32)
        stop = before + tokens
        for begin in range(tl.maximum(before - window + 1, 0), stop, BLOCK):
            seen = begin + tl.arange(0, BLOCK)
            lies = tl.where(seen < hidden_first, seen, seen + hidden)
            page = tl.load(table + lies // PAGE, mask=seen < stop, other=0)
            address = ((page * kv_heads + head) * PAGE + lies % PAGE)[:, None] * HEAD + lanes[None, :]
            there = (seen[:, None] < stop) & (lanes[None, :] < HEAD)
            k = tl.load(keys + address, mask=there, other=0.0)
            v = tl.load(values + address, mask=there, other=0.0)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scaling
            if CAPPED:
                # tanh(x) = 2 sigmoid(2x) - 1
                scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
            behind = own[:, None] - seen[None, :]
            scores = tl.where((behind >= 0) & (behind < window), scores, float("-inf"))
            higher = tl.maximum(highest, tl.max(scores, 1))
            # A step may lie outside a query's window: its maximum is -inf, which must not be subtracted from itself.
            base = tl.where(higher == float("-inf"), 0.0, higher)
            fading = tl.exp(highest - base)
            weights = tl.exp(scores - base[:, None])
            total = total * fading + tl.sum(weights, 1)
            out = out * fading[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
            highest = higher
        total = tl.where(token < tokens, total, 1.0)
        tl.store(result + at, out / total[:, None], mask=asked)


def why_not(kv: KvStore) -> str:
    """Why the kernel cannot be used on this K/V storage; "" when it can."""
    if kv.head_dim > _MOST_HEAD_DIM:
        return f"heads of {kv.head_dim} are larger than {_MOST_HEAD_DIM}"
    return triton_device.why_not(kv.keys.device, kv.keys.dtype)


def tile_tokens(kv: KvStore, group: int) -> int:
    """Tokens of a tile where `group` query heads share a KV head."""
    return max(1, max(32, min(_LINES, _QUERY_ELEMENTS[kv.keys.dtype.itemsize] // _lanes(kv))) // group)


def _lanes(kv: KvStore) -> int:
    return max(16, triton.next_power_of_2(kv.head_dim))


def paged_prefill(
    call: AttentionCall, query: torch.Tensor, tiles: PrefillTiles, kv: KvStore, out: torch.Tensor
) -> None:
    """Attend with the tokens of all tiles; their rows of `out` are written.

    `query` [heads, tokens, d] and `out` [tokens, heads, d], contiguous, are the whole packed batch, whose K/V are in
    the pages already. A window is of the keys that are not hidden from a query.
    """
    heads, _, size = query.shape
    group = heads // kv.kv_heads
    lines, lanes, itemsize = max(16, triton.next_power_of_2(tiles.tokens * group)), _lanes(kv), query.dtype.itemsize
    _attend_tile[(len(tiles.table), kv.kv_heads)](
        query.transpose(0, 1).contiguous(),
        kv.keys[call.layer],
        kv.values[call.layer],
        tiles.table,
        tiles.pages,
        out,
        call.scaling,
        1.0 if call.softcap is None else float(call.softcap),
        call.window or _NO_WINDOW,
        COLUMNS=tiles.table.shape[1],
        GROUP=group,
        HEAD=size,
        HEAD_PAD=lanes,
        PAGE=kv.page_size,
        LINES=lines,
        BLOCK=max(16, min(_KEYS, _QUERY_ELEMENTS[itemsize] // 2 // lanes)),
        CAPPED=call.softcap is not None,
        num_warps=8 if lines * lanes * itemsize >= 16 << 10 else 4,
        num_stages=2,
    )
