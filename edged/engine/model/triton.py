"""Triton kernels between the products of a decode's layer on a GPU, each in the place of several of torch's.

All go over rows of the batch, and add the LoRA updates of the product before them. Numbers are rounded where the
layer's own operations round them, but sums are in float32.
"""

import importlib.util
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from edged.engine.kv.store import KvStore
from edged.engine.lora import triton as triton_lora
from edged.engine.lora.runs import LoraTiles

MAX_ROWS = 128
"""Most rows of a batch, and tiles of its adapters."""
MAX_HIDDEN = 1 << 14
"""Most numbers of a row that one program brings to its norm."""
_BLOCK = 512
"""Numbers of one program of the activation."""
ACTIVATIONS = {"silu": torch.nn.functional.silu, "gelu": lambda x: torch.nn.functional.gelu(x, approximate="tanh")}
"""Activations that the kernels know, by name."""

if importlib.util.find_spec("triton") is not None:
    import triton
    import triton.language as tl

    from edged.engine.lora.triton import row_update, slot_of_row

    @triton.jit
    def _normed(x, norm, eps, lane, there, SIZE: tl.constexpr):
        scale = tl.rsqrt(tl.sum(x * x, 0) / SIZE + eps)
        return x * scale * tl.load(norm + lane, mask=there, other=0.0)

    # What differs between iterations must not make another variant, which would be compiled while users wait.
    @triton.jit(do_not_specialize=["tiles", "count", "rows", "splits", "post_eps", "pre_eps"])
    def _add_and_norm(
        product,
        residual,
        post_norm,
        post_eps,
        pre_norm,
        pre_eps,
        added,
        normed,
        low,
        up_0,
        up_1,
        up_2,
        tiles,
        count,
        rows,
        splits,
        SIZE: tl.constexpr,
        BLOCK: tl.constexpr,
        ADDS: tl.constexpr,
        POST: tl.constexpr,
        PRE: tl.constexpr,
        ADAPTED: tl.constexpr,
        RANK: tl.constexpr,
        TILES: tl.constexpr,
        SPLITS: tl.constexpr,
    ) -> None:
        row = tl.program_id(0).to(tl.int64)
        lane = tl.arange(0, BLOCK)
        there = lane < SIZE
        at = row * SIZE + lane
        kind: tl.constexpr = product.dtype.element_ty
        x = tl.load(product + at, mask=there, other=0.0).to(tl.float32)
        if ADAPTED:
            slot = slot_of_row(row, tiles, count, TILES)
            if slot >= 0:
                update = row_update(low, up_0, 0, slot, row, rows, splits, lane, SIZE, there, RANK, SPLITS)
                x = (x + update).to(kind).to(tl.float32)
        if POST:
            x = _normed(x, post_norm, post_eps, lane, there, SIZE).to(kind).to(tl.float32)
        if ADDS:
            x = (x + tl.load(residual + at, mask=there, other=0.0).to(tl.float32)).to(kind)
            tl.store(added + at, x, mask=there)
            x = x.to(tl.float32)
        if PRE:
            tl.store(normed + at, _normed(x, pre_norm, pre_eps, lane, there, SIZE), mask=there)

    @triton.jit(
        do_not_specialize=["pages", "offsets", "tiles", "count", "rows", "splits", "query_eps", "key_eps", "largest"]
    )
    def _rotate_and_store(
        qkv,
        cos,
        sin,
        query_norm,
        query_eps,
        key_norm,
        key_eps,
        query,
        keys,
        values,
        pages,
        offsets,
        largest,
        low,
        up_0,
        up_1,
        up_2,
        tiles,
        count,
        rows,
        splits,
        HEADS: tl.constexpr,
        KV_HEADS: tl.constexpr,
        HALF: tl.constexpr,
        HALF_PAD: tl.constexpr,
        PAGE: tl.constexpr,
        NORMED: tl.constexpr,
        ADAPTED: tl.constexpr,
        RANK: tl.constexpr,
        TILES: tl.constexpr,
        SPLITS: tl.constexpr,
    ) -> None:
        row, place = tl.program_id(0).to(tl.int64), tl.program_id(1)
        linear, head, size, up = 0, place, HEADS * HALF * 2, up_0
        if place >= HEADS:
            linear, head, size, up = 1, place - HEADS, KV_HEADS * HALF * 2, up_1
        if place >= HEADS + KV_HEADS:
            linear, head, up = 2, place - HEADS - KV_HEADS, up_2
        lane = tl.arange(0, HALF_PAD)
        there = lane < HALF
        kind: tl.constexpr = qkv.dtype.element_ty
        # A rotation takes the two halves of a head.
        at = qkv + (row * (HEADS + 2 * KV_HEADS) + place) * HALF * 2 + lane
        a = tl.load(at, mask=there, other=0.0).to(tl.float32)
        b = tl.load(at + HALF, mask=there, other=0.0).to(tl.float32)
        if ADAPTED:
            slot = slot_of_row(row, tiles, count, TILES)
            if (slot >= 0) & ((ADAPTED >> linear) % 2 == 1):
                feature = head * HALF * 2 + lane
                a += row_update(low, up, linear, slot, row, rows, splits, feature, size, there, RANK, SPLITS)
                b += row_update(low, up, linear, slot, row, rows, splits, feature + HALF, size, there, RANK, SPLITS)
                a, b = a.to(kind).to(tl.float32), b.to(kind).to(tl.float32)
        if linear < 2:
            if NORMED:
                norm, eps = query_norm, query_eps
                if linear == 1:
                    norm, eps = key_norm, key_eps
                scale = tl.rsqrt((tl.sum(a * a, 0) + tl.sum(b * b, 0)) / (2 * HALF) + eps)
                a = (a * scale * tl.load(norm + lane, mask=there, other=0.0)).to(kind).to(tl.float32)
                b = (b * scale * tl.load(norm + HALF + lane, mask=there, other=0.0)).to(kind).to(tl.float32)
            angle = row * HALF * 2 + lane
            first, second = a, b
            a = first * tl.load(cos + angle, mask=there, other=0.0) - second * tl.load(
                sin + angle, mask=there, other=0.0
            )
            angle += HALF
            b = second * tl.load(cos + angle, mask=there, other=0.0) + first * tl.load(
                sin + angle, mask=there, other=0.0
            )
        to = query + (row * HEADS + head) * HALF * 2 + lane
        if linear > 0:
            # See `KvStore.write`: a page's next owner multiplies its stale rows by 0.
            a, b = tl.where(a == a, a, 0.0), tl.where(b == b, b, 0.0)
            a, b = tl.clamp(a, -largest, largest), tl.clamp(b, -largest, largest)
            block = tl.load(pages + row) * KV_HEADS + head
            store = keys
            if linear == 2:
                store = values
            to = store + (block * PAGE + tl.load(offsets + row)) * HALF * 2 + lane
        tl.store(to, a, mask=there)
        tl.store(to + HALF, b, mask=there)

    @triton.jit(do_not_specialize=["tiles", "count", "rows", "splits"])
    def _activate(
        gate_up,
        result,
        low,
        up_0,
        up_1,
        up_2,
        tiles,
        count,
        rows,
        splits,
        SIZE: tl.constexpr,
        BLOCK: tl.constexpr,
        GELU: tl.constexpr,
        ADAPTED: tl.constexpr,
        RANK: tl.constexpr,
        TILES: tl.constexpr,
        SPLITS: tl.constexpr,
    ) -> None:
        row = tl.program_id(0).to(tl.int64)
        lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        there = lane < SIZE
        kind: tl.constexpr = gate_up.dtype.element_ty
        at = gate_up + row * SIZE * 2 + lane
        gate = tl.load(at, mask=there, other=0.0).to(tl.float32)
        up = tl.load(at + SIZE, mask=there, other=0.0).to(tl.float32)
        if ADAPTED:
            slot = slot_of_row(row, tiles, count, TILES)
            if slot >= 0:
                if ADAPTED % 2 == 1:
                    gate += row_update(low, up_0, 0, slot, row, rows, splits, lane, SIZE, there, RANK, SPLITS)
                if ADAPTED >= 2:
                    up += row_update(low, up_1, 1, slot, row, rows, splits, lane, SIZE, there, RANK, SPLITS)
                gate, up = gate.to(kind).to(tl.float32), up.to(kind).to(tl.float32)
        if GELU:
            # (1 + tanh(z)) / 2 = sigmoid(2z); Hendrycks and Gimpel 2016.
            active = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
        else:
            active = gate * tl.sigmoid(gate)
        tl.store(result + row * SIZE + lane, active.to(kind).to(tl.float32) * up, mask=there)


class RmsNorm(NamedTuple):
    """An RMS norm: its factors [size] in float32, and what is added to the mean square."""

    factors: torch.Tensor
    eps: float


class Updates(NamedTuple):
    """The LoRA updates of a product's linears that a kernel is to add."""

    low: torch.Tensor
    """See `triton_lora.shrink`."""
    ups: Sequence[torch.Tensor]
    """B [slots, rank, out] of each linear."""
    adapted: int
    """Bit i: whether linear i has updates."""
    tiles: LoraTiles


def _arguments(updates: Updates | None, unread: torch.Tensor) -> tuple[list[Any], dict[str, Any]]:
    """Return a kernel's arguments from `low` on, and its constants; pointers that it does not read are `unread`."""
    if updates is None:
        return [*[unread] * 5, 0, 0, 0], {"ADAPTED": 0, "RANK": 1, "TILES": MAX_ROWS, "SPLITS": triton_lora.MAX_SPLITS}
    low, ups, adapted, tiles = updates
    _, splits, rows, rank = low.shape
    given = [low, *triton_lora.three(ups), tiles.table, len(tiles.table), rows, splits]
    return given, {"ADAPTED": adapted, "RANK": rank, "TILES": MAX_ROWS, "SPLITS": triton_lora.MAX_SPLITS}


def add_and_norm(
    product: torch.Tensor,
    residual: torch.Tensor | None = None,
    post: RmsNorm | None = None,
    pre: RmsNorm | None = None,
    updates: Updates | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add `residual` to a `product`, which is normed by `post` before; norm the sum by `pre`.

    All are [rows, hidden] and contiguous. Returns the sum, and the sum normed; without `residual` the sum is the
    product, and without `pre` the second is the sum.
    """
    rows, size = product.shape
    added = product if residual is None else torch.empty_like(product)
    normed = added if pre is None else torch.empty_like(product)
    block = triton.next_power_of_2(size)
    none = RmsNorm(product, 0.0)
    given, constants = _arguments(updates, product)
    _add_and_norm[(rows,)](
        product,
        product if residual is None else residual,
        *(post or none),
        *(pre or none),
        added,
        normed,
        *given,
        SIZE=size,
        BLOCK=block,
        ADDS=residual is not None,
        POST=post is not None,
        PRE=pre is not None,
        num_warps=8 if block > 2048 else 4,
        **constants,
    )
    return added, normed


def rotate_and_store(
    qkv: torch.Tensor,
    angles: tuple[torch.Tensor, torch.Tensor],
    norms: tuple[RmsNorm, RmsNorm] | None,
    kv: KvStore,
    layer: int,
    pages: torch.Tensor,
    offsets: torch.Tensor,
    updates: Updates | None = None,
) -> torch.Tensor:
    """Norm and rotate queries and keys, store keys and values, and return the queries [rows, heads, d].

    `qkv` [rows, (heads + 2 kv_heads) * d], cosine and sine [1, rows, d], all contiguous; `norms` of queries' and keys'
    heads; `pages` and `offsets` [rows] are where K/V go in `layer` of `kv`.
    """
    rows, size = len(qkv), kv.head_dim
    heads = qkv.shape[1] // size - 2 * kv.kv_heads
    query = qkv.new_empty(rows, heads, size)
    query_norm, key_norm = norms or (RmsNorm(qkv, 0.0), RmsNorm(qkv, 0.0))
    given, constants = _arguments(updates, qkv)
    _rotate_and_store[(rows, heads + 2 * kv.kv_heads)](
        qkv,
        *angles,
        *query_norm,
        *key_norm,
        query,
        kv.keys[layer],
        kv.values[layer],
        pages,
        offsets,
        torch.finfo(qkv.dtype).max,
        *given,
        HEADS=heads,
        KV_HEADS=kv.kv_heads,
        HALF=size // 2,
        HALF_PAD=triton.next_power_of_2(size // 2),
        PAGE=kv.page_size,
        NORMED=norms is not None,
        num_warps=1,
        **constants,
    )
    return query


def activate(gate_up: torch.Tensor, activation: str, updates: Updates | None = None) -> torch.Tensor:
    """Return the `activation` of the gates times the others: [rows, 2 * size], contiguous -> [rows, size]."""
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    result = gate_up.new_empty(rows, size)
    given, constants = _arguments(updates, gate_up)
    _activate[(rows, triton.cdiv(size, _BLOCK))](
        gate_up, result, *given, SIZE=size, BLOCK=_BLOCK, GELU=activation == "gelu", **constants
    )
    return result
