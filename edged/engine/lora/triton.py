"""LoRA updates of a packed batch of many adapters on a GPU: two Triton kernels over tiles of rows.

The first kernel shrinks a tile's rows to the rank, x A^T, in parts of the input features where there are few tiles; the
second adds the parts in a fixed order, expands them, (x A^T) B^T, and adds that to the tile's own rows of the output.
Every row lies in one tile and every sum has one order: results do not depend on which program ends first.
Up to three linears of one input (queries, keys and values; gate and up) share a launch of each.

Kernels that go over rows anyway add the second product themselves (`row_update`), from what `shrink` left in parts.

A launch depends on the number of tiles and of packed rows alone, never on what the table says. A table that outlives an
iteration (a CUDA graph's) is padded with tiles of 0 rows, whose programs return at once.
"""

import importlib.util
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from edged.engine.lora.runs import LoraTiles, Run
from edged.engine.native import triton_device
from edged.tensors.device_copy import upload

FEW_ROWS, _MANY_ROWS = 16, 64
"""Rows of a tile: the fewest that a matrix unit multiplies, for batches of decodes; more if there is a longer run."""
_OUT_BLOCK, _RANKS = 64, 16
"""Output features of one program, and ranks of one of its steps."""
_IN_ELEMENTS = 2048
"""Elements of A that one step of a program reads."""
_PROGRAMS = 128
"""Target number of programs: input features are split until there are about so many."""
MAX_SPLITS = 16
_SPLIT_FEATURES = 256
"""Fewest input features of a part."""
_MAX_RANK = 128

if importlib.util.find_spec("triton") is not None:
    import triton
    import triton.language as tl

    # What differs between iterations must not make another variant, which would be compiled while users wait.
    @triton.jit(do_not_specialize=["tiles", "rows"])
    def _shrink(
        x,
        down_0,
        down_1,
        down_2,
        low,
        tiles,
        rows,
        size,
        RANK: tl.constexpr,
        LINE: tl.constexpr,
        RANK_PAD: tl.constexpr,
        TILE: tl.constexpr,
        BLOCK: tl.constexpr,
    ) -> None:
        tile, part, splits = tiles + tl.program_id(0) * 3, tl.program_id(1), tl.num_programs(1)
        count = tl.load(tile + 1)
        if count == 0:
            return
        slot = tl.load(tile + 2)
        linear = tl.program_id(2)
        down = down_0
        if linear == 1:
            down = down_1
        if linear == 2:
            down = down_2
        line = tl.arange(0, TILE)
        ranks = tl.arange(0, RANK_PAD)
        row = tl.load(tile) + line
        share = tl.cdiv(tl.cdiv(size, splits), BLOCK) * BLOCK
        start = part * share
        stop = tl.minimum(start + share, size)
        total = tl.zeros((TILE, RANK_PAD), tl.float32)
        for begin in range(start, stop, BLOCK):
            feature = begin + tl.arange(0, BLOCK)
            there = (line[:, None] < count) & (feature[None, :] < stop)
            own = tl.load(x + row[:, None] * size + feature[None, :], mask=there, other=0.0)
            there = (feature[:, None] < stop) & (ranks[None, :] < RANK)
            a = tl.load(down + (slot * size + feature)[:, None] * LINE + ranks[None, :], mask=there, other=0.0)
            total += tl.dot(own, a, input_precision="ieee")
        at = ((linear * splits + part) * rows + row)[:, None] * RANK + ranks[None, :]
        tl.store(low + at, total, mask=(line[:, None] < count) & (ranks[None, :] < RANK))

    @triton.jit(do_not_specialize=["tiles", "rows", "splits"])
    def _expand(
        y_0,
        y_1,
        y_2,
        up_0,
        up_1,
        up_2,
        low,
        tiles,
        rows,
        splits,
        size_0,
        size_1,
        size_2,
        RANK: tl.constexpr,
        RANKS: tl.constexpr,
        TILE: tl.constexpr,
        BLOCK: tl.constexpr,
    ) -> None:
        tile = tiles + tl.program_id(0) * 3
        count = tl.load(tile + 1)
        if count == 0:
            return
        slot = tl.load(tile + 2)
        linear = tl.program_id(2)
        y, up, size = y_0, up_0, size_0
        if linear == 1:
            y, up, size = y_1, up_1, size_1
        if linear == 2:
            y, up, size = y_2, up_2, size_2
        first = tl.program_id(1) * BLOCK
        if first >= size:
            return
        line = tl.arange(0, TILE)
        row = tl.load(tile) + line
        feature = first + tl.arange(0, BLOCK)
        added = tl.zeros((TILE, BLOCK), tl.float32)
        # Few ranks at a time, or float32 (which no matrix unit multiplies) would not fit in registers.
        for begin in range(0, RANK, RANKS):
            ranks = begin + tl.arange(0, RANKS)
            total = tl.zeros((TILE, RANKS), tl.float32)
            there = (line[:, None] < count) & (ranks[None, :] < RANK)
            for part in range(0, splits):
                total += tl.load(
                    low + ((linear * splits + part) * rows + row)[:, None] * RANK + ranks[None, :],
                    mask=there,
                    other=0.0,
                )
            there = (ranks[:, None] < RANK) & (feature[None, :] < size)
            b = tl.load(up + (slot * RANK + ranks)[:, None] * size + feature[None, :], mask=there, other=0.0)
            added += tl.dot(total.to(b.dtype), b, input_precision="ieee")
        at = y + row[:, None] * size + feature[None, :]
        there = (line[:, None] < count) & (feature[None, :] < size)
        tl.store(at, tl.load(at, mask=there, other=0.0).to(tl.float32) + added, mask=there)

    @triton.jit
    def slot_of_row(row, tiles, count, TILES: tl.constexpr):
        """Return the slot of a row by the first `count` tiles; -1 if it lies in none."""
        tile = tl.arange(0, TILES)
        first = tl.load(tiles + tile * 3, mask=tile < count, other=0)
        rows = tl.load(tiles + tile * 3 + 1, mask=tile < count, other=0)
        slot = tl.load(tiles + tile * 3 + 2, mask=tile < count, other=0)
        return tl.max(tl.where((first <= row) & (row < first + rows), slot, -1), 0)

    @triton.jit
    def row_update(
        low, up, linear, slot, row, rows, splits, feature, size, there, RANK: tl.constexpr, SPLITS: tl.constexpr
    ):
        """Return a row's updates of output features, from `shrink`'s parts; 0 where not `there`."""
        part = tl.arange(0, SPLITS)
        first = ((linear * splits + part) * rows + row) * RANK
        total = feature * 0.0
        for rank in range(0, RANK):
            own = tl.sum(tl.load(low + first + rank, mask=part < splits, other=0.0), 0)
            b = tl.load(up + (slot * RANK + rank) * size + feature, mask=there, other=0.0)
            total += own * b.to(tl.float32)
        return total


def why_not(device: torch.device, dtype: torch.dtype, rank: int) -> str:
    """Return why the kernels cannot be used for adapters of `rank`; "" when they can."""
    if rank > _MAX_RANK:
        return f"rank {rank} is larger than {_MAX_RANK}"
    return triton_device.why_not(device, dtype)


def cut(runs: list[Run], device: torch.device) -> LoraTiles:
    """Cut an iteration's runs (at least one) into tiles on the device, in one transfer."""
    rows = tile_rows(runs)
    table = tiles_of(runs, rows)
    (moved,) = upload([table.reshape(-1)], device)
    return LoraTiles(moved.view(table.shape), rows)


def tile_rows(runs: list[Run]) -> int:
    """Return the rows of a tile for `runs` (at least one)."""
    return FEW_ROWS if max(stop - start for start, stop, _ in runs) <= FEW_ROWS else _MANY_ROWS


def tiles_of(runs: list[Run], rows: int) -> np.ndarray:
    """Return `LoraTiles.table` of `runs` (at least one) in tiles of at most `rows` rows."""
    start, stop, slot = np.array(runs, np.int64).T
    counts = -(-(stop - start) // rows)
    run = np.repeat(np.arange(len(runs)), counts)
    nth = np.arange(len(run)) - np.repeat(np.cumsum(counts) - counts, counts)
    first = start[run] + nth * rows
    return np.stack((first, np.minimum(rows, stop[run] - first), slot[run]), axis=1)


def shrink(x: torch.Tensor, downs: Sequence[torch.Tensor], tiles: LoraTiles) -> torch.Tensor:
    """Multiply x[rows] @ down[slot] for each tile and up to three linears, with float32 sums.

    Returns the sums' parts, [linears, splits, n, rank], of which rows that no tile has are not written. `x` [n, in] and
    `downs` [slots, in, rank] are of one dtype and contiguous; only the rows of `downs` may have a stride, the same for
    all.
    """
    n, size_in = x.shape
    rank = downs[0].shape[2]
    rank_pad = max(16, triton.next_power_of_2(rank))
    count, linears = len(tiles.table), len(downs)
    splits = max(1, min(MAX_SPLITS, _PROGRAMS // (count * linears), size_in // _SPLIT_FEATURES))
    low = torch.empty(linears, splits, n, rank, dtype=torch.float32, device=x.device)
    _shrink[(count, splits, linears)](
        x,
        *three(downs),
        low,
        tiles.table,
        n,
        size_in,
        RANK=rank,
        LINE=downs[0].stride(1),
        RANK_PAD=rank_pad,
        TILE=tiles.rows,
        BLOCK=max(16, min(128, _IN_ELEMENTS // rank_pad)),
        num_stages=2,
    )
    return low


def add_updates(
    x: torch.Tensor,
    ys: Sequence[torch.Tensor],
    downs: Sequence[torch.Tensor],
    ups: Sequence[torch.Tensor],
    tiles: LoraTiles,
) -> None:
    """Add the updates of up to three linears in place: y[rows] += (x[rows] @ down[slot]) @ up[slot] for each tile,
    with float32 sums.

    For `x` and `downs` see `shrink`; each of `ys` [n, out] and `ups` [slots, rank, out] is contiguous, too.
    """
    low, sizes_out = shrink(x, downs, tiles), [up.shape[2] for up in ups]
    linears, splits, n, rank = low.shape
    _expand[(len(tiles.table), -(-max(sizes_out) // _OUT_BLOCK), linears)](
        *three(ys),
        *three(ups),
        low,
        tiles.table,
        n,
        splits,
        *three(sizes_out),
        RANK=rank,
        RANKS=_RANKS,
        TILE=tiles.rows,
        BLOCK=_OUT_BLOCK,
        num_stages=2,
    )


def three(parts: Sequence[Any]) -> list[Any]:
    """Return one to three parts as three: a place that no program reads has the first again."""
    return [*parts, *[parts[0]] * (3 - len(parts))]
