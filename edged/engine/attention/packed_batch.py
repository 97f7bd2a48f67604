"""The packed batch: the new tokens of many sequences in one row, and the tables that attention needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from edged.engine.kv.attention_stats import AttentionStats
from edged.engine.kv.pruned_layout import HeadTables, PrunedLayout
from edged.engine.kv.store import KvStore
from edged.engine.lora.segments import NO_SLOT, LoraTiles, Run
from edged.tensors.device_copy import upload

_TILE_COLUMNS = 6


@dataclass(slots=True)
class Segment:
    """Consecutive new tokens of one sequence.

    `context` rows of K/V precede them in `pages`. `position` is the first token's position id; it differs from
    `context` in a branch of a preference pair, whose keys leave out the rows `hidden` = (first, past the last) that
    belong to the other branch, and in a decode whose first pages were `compacted`.
    """

    tokens: Sequence[int] | np.ndarray
    context: int
    pages: np.ndarray
    slot: int = NO_SLOT
    position: int = 0
    hidden: tuple[int, int] | None = None
    samples: bool = False
    """Whether the last token's logits are wanted."""
    compacted: PrunedLayout | None = None
    watch: AttentionStats | None = None
    """What observes this decode, if it is to be observed."""
    start: int = field(default=0, init=False)
    """Row of its first token in the packed batch."""

    @property
    def is_decode(self) -> bool:
        """Whether it is a single token that sees all rows before it."""
        return len(self.tokens) == 1 and self.hidden is None

    @property
    def is_plain_decode(self) -> bool:
        """Whether it is a decode over pages as they were written, which nobody observes."""
        return self.is_decode and self.compacted is None and self.watch is None


@dataclass(slots=True)
class Prefill:
    """A segment of several tokens, as attention sees it: rows [start, stop) over `context` earlier keys."""

    start: int
    stop: int
    context: int
    hidden: tuple[int, int] | None
    blocks: torch.Tensor | None
    mask: dict[int | None, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PrefillTiles:
    """All segments of several tokens, cut into tiles of at most `tokens` consecutive ones: what `triton_prefill` reads.

    `table` [tiles, 6]: first row in the packed batch, tokens (0: an empty tile), K/V rows before the first token, first
    hidden one of these, hidden ones, where the segment's pages begin in `pages`.
    """

    table: torch.Tensor
    pages: torch.Tensor
    tokens: int


@dataclass(slots=True)
class PackedBatch:
    """One iteration's forward.

    `input_ids`, `position_ids`: [1, tokens]. `logit_rows`: [sampled], rows whose logits are wanted, in the order of
    the segments that sample. `runs`: (start, stop, slot) of consecutive tokens under one adapter.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    write_rows: torch.Tensor
    logit_rows: torch.Tensor
    runs: list[tuple[int, int, int]]
    decodes: list[Segment]
    """Segments of one token, in the order of `decode_rows`, `decode_context` [n] and `decode_tables` [n, width]."""
    decode_rows: torch.Tensor
    decode_tables: torch.Tensor
    decode_context: torch.Tensor
    prefills: list[Prefill]
    """All other segments, one by one; empty where they are in `tiles`."""
    tiles: PrefillTiles | None
    lora_tiles: LoraTiles | None
    """`runs` as `triton_lora` reads them, where that was asked for."""
    decode_heads: HeadTables | None = None
    """Where the decodes' rows lie by head, if any of them was pruned or is observed."""

    @property
    def pruned(self) -> HeadTables | None:
        """`decode_heads`, if any of the decodes was pruned."""
        return self.decode_heads if self.decode_heads is not None and self.decode_heads.pruned else None


def pack(
    segments: list[Segment], kv: KvStore, device: torch.device, tile_tokens: int = 0, lora: bool = False
) -> PackedBatch:
    """Pack `segments` (reordered by adapter slot, single tokens first) and move all tables to `device` at once.

    With `tile_tokens` the segments of several tokens become tiles of at most so many; with `lora` so do the runs.
    """
    ordered = sorted(segments, key=lambda s: (s.slot, len(s.tokens) > 1))
    rows, runs = packed_rows(ordered, kv.page_size)
    decodes = [s for s in ordered if s.is_decode]
    chunks = [s for s in ordered if not s.is_decode]
    tables = page_tables(decodes, kv.page_size)
    tiled = tile_tokens > 0 and len(chunks) > 0
    pages = [s.pages[: -(-(s.context + len(s.tokens)) // kv.page_size)] for s in chunks if tiled or s.context]
    lora_tiles = _lora_tiles(runs) if lora and runs else None
    moved = upload(
        [
            *rows,
            np.array([s.start + len(s.tokens) - 1 for s in segments if s.samples], np.int64),
            np.array([s.start for s in decodes], np.int64),
            np.array([s.context for s in decodes], np.int64),
            tables.reshape(-1),
            *([_tiles(chunks, pages, tile_tokens).reshape(-1), np.concatenate(pages)] if tiled else pages),
            *([] if lora_tiles is None else [lora_tiles[0].reshape(-1)]),
        ],
        device,
    )
    return PackedBatch(
        input_ids=moved[0][None],
        position_ids=moved[1][None],
        write_rows=kv.row_index(moved[2], moved[3]),
        logit_rows=moved[4],
        runs=runs,
        decodes=decodes,
        decode_rows=moved[5],
        decode_context=moved[6],
        decode_tables=moved[7].view(tables.shape),
        prefills=[] if tiled else _prefills(chunks, [kv.block_index(used[None]) for used in moved[8 : 8 + len(pages)]]),
        tiles=PrefillTiles(moved[8].view(-1, _TILE_COLUMNS), moved[9], tile_tokens) if tiled else None,
        lora_tiles=None if lora_tiles is None else LoraTiles(moved[-1].view(-1, 3), lora_tiles[1]),
        decode_heads=_head_tables(decodes, moved[7].view(tables.shape), moved[6], kv),
    )


def _head_tables(decodes: list[Segment], tables: torch.Tensor, context: torch.Tensor, kv: KvStore) -> HeadTables | None:
    """`PackedBatch.decode_heads`."""
    if all(s.compacted is None and s.watch is None for s in decodes):
        return None
    shape = (kv.layers, kv.kv_heads, kv.page_size)
    return HeadTables.of([s.compacted for s in decodes], [s.context for s in decodes], tables, context, shape)


def _lora_tiles(runs: list[Run]) -> tuple[np.ndarray, int]:
    """`LoraTiles` on the host: table and rows of a tile."""
    from edged.engine.lora import triton as triton_lora  # triton is slow to import, and not everywhere

    rows = triton_lora.tile_rows(runs)
    return triton_lora.tiles_of(runs, rows), rows


def _prefills(chunks: list[Segment], blocks: list[torch.Tensor]) -> list[Prefill]:
    """Segments one by one; `blocks` are of those that have a context."""
    of_context = iter(blocks)
    return [
        Prefill(s.start, s.start + len(s.tokens), s.context, s.hidden, next(of_context) if s.context else None)
        for s in chunks
    ]


def _tiles(chunks: list[Segment], pages: list[np.ndarray], tokens: int) -> np.ndarray:
    """`PrefillTiles.table` of tiles of at most `tokens`; the segments' `pages` will lie one after the other."""
    tables = []
    begin = 0
    for segment, used in zip(chunks, pages, strict=True):
        first = np.arange(0, len(segment.tokens), tokens)
        hidden_first, hidden_last = segment.hidden or (0, 0)
        table = np.empty((len(first), _TILE_COLUMNS), np.int64)
        table[:, 0] = segment.start + first
        table[:, 1] = np.minimum(tokens, len(segment.tokens) - first)
        table[:, 2] = segment.context + first
        table[:, 3:] = hidden_first, hidden_last - hidden_first, begin
        tables.append(table)
        begin += len(used)
    return np.concatenate(tables)


def packed_rows(ordered: Sequence[Segment], page_size: int) -> tuple[list[np.ndarray], list[Run]]:
    """Of every packed token its id, position, page and offset in the page; and the runs under one adapter.

    Sets each segment's `start`.
    """
    total = sum(len(s.tokens) for s in ordered)
    ids, positions, pages, offsets = (np.empty(total, np.int64) for _ in range(4))
    runs: list[Run] = []
    start = 0
    for segment in ordered:
        n, context = len(segment.tokens), segment.context
        stop = start + n
        segment.start = start
        ids[start:stop] = segment.tokens
        if n == 1:
            positions[start] = segment.position
            pages[start], offsets[start] = segment.pages[context // page_size], context % page_size
        else:
            positions[start:stop] = np.arange(segment.position, segment.position + n)
            rows = np.arange(context, context + n)
            pages[start:stop], offsets[start:stop] = segment.pages[rows // page_size], rows % page_size
        if runs and runs[-1][2] == segment.slot:
            runs[-1] = (runs[-1][0], stop, segment.slot)
        else:
            runs.append((start, stop, segment.slot))
        start = stop
    return [ids, positions, pages, offsets], [run for run in runs if run[2] != NO_SLOT]


def page_tables(decodes: Sequence[Segment], page_size: int) -> np.ndarray:
    """The decodes' page tables [n, width], padded with page 0."""
    tables = np.zeros((len(decodes), max((s.context // page_size + 1 for s in decodes), default=0)), np.int64)
    for row, segment in enumerate(decodes):
        used = segment.context // page_size + 1
        tables[row, :used] = segment.pages[:used]
    return tables
