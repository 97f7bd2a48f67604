"""The packed batch: the new tokens of many sequences in one row, and the tables that attention needs."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from edged.align.dpo.decoder import Masks
from edged.engine.attention.attention_stats import AttentionStats
from edged.engine.kv.pruned_layout import HeadTables, PrunedLayout
from edged.engine.kv.state import ZEROS, SlotPair
from edged.engine.kv.store import PagedKv
from edged.engine.lora.runs import LoraTiles, Run
from edged.engine.lora.segments import NO_SLOT
from edged.tensors.device_copy import upload

_TILE_COLUMNS = 6


@dataclass(slots=True)
class Segment:
    """Consecutive new tokens of one sequence.

    `context` rows of K/V precede them in `pages`. `position` is the first token's position id; it differs from
    `context` in a branch of a preference pair, whose keys leave out the rows `hidden` = (first, past the last) that
    belong to the other branch, and in a decode whose first pages were `compacted`.
    """

    token_ids: Sequence[int] | np.ndarray
    context: int
    pages: np.ndarray
    slot: int = NO_SLOT
    position: int = 0
    hidden: tuple[int, int] | None = None
    samples: bool = False
    """Whether the last token's logits are needed."""
    scores: range = range(0)
    """Tokens before it whose logits are needed, too."""
    compacted: PrunedLayout | None = None
    watch: AttentionStats | None = None
    """Statistics that this decode updates, if any."""
    states: SlotPair = (ZEROS, ZEROS)
    """Slots of the layers' states before and after these tokens, where layers keep any."""
    start: int = field(default=0, init=False)
    """Row of the first token in the packed batch."""

    @property
    def rows(self) -> slice:
        """Rows of the segment's tokens in the packed batch."""
        return slice(self.start, self.start + len(self.token_ids))

    @property
    def logit_rows(self) -> list[int]:
        """Rows whose logits are needed; the sampled one is the last."""
        rows = [self.start + token for token in self.scores]
        return [*rows, self.start + len(self.token_ids) - 1] if self.samples else rows

    @property
    def is_decode(self) -> bool:
        """Whether the segment is a single token that sees all rows before it."""
        return len(self.token_ids) == 1 and self.hidden is None

    @property
    def is_plain_decode(self) -> bool:
        """Whether the segment is a decode without pruned pages and without statistics."""
        return self.is_decode and self.compacted is None and self.watch is None


@dataclass(slots=True)
class Prefill:
    """A segment of several tokens that attends alone, with its `pages` on the device where it has a context."""

    segment: Segment
    pages: torch.Tensor | None
    masks: Masks = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PrefillTiles:
    """All segments of several tokens, cut into tiles of at most `num_tokens` consecutive tokens, for `paged_prefill`.

    `table` [tiles, 6]: first row in the packed batch, tokens (0: an empty tile), K/V rows before the first token, first
    hidden one of these, hidden ones, where the segment's pages begin in `pages`.
    """

    table: torch.Tensor
    pages: torch.Tensor
    num_tokens: int


@dataclass(slots=True)
class PackedBatch:
    """The input of one iteration's forward.

    `input_ids`, `position_ids`: [1, tokens]. `pages`, `offsets`: [tokens], where their K/V go. `logit_rows`: [rows],
    those whose logits are needed, in the order of the segments. `runs`: (start, stop, slot) of consecutive tokens under
    one adapter.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    pages: torch.Tensor
    offsets: torch.Tensor
    logit_rows: torch.Tensor
    decode_rows: torch.Tensor
    decode_tables: torch.Tensor
    decode_context: torch.Tensor
    decodes: list[Segment] = field(default_factory=list)
    """Segments of one token, in the order of `decode_rows`, `decode_context` [n] and `decode_tables` [n, width]."""
    runs: list[Run] = field(default_factory=list)
    prefills: list[Prefill] = field(default_factory=list)
    """All other segments, one by one; empty if they are in `tiles`."""
    tiles: PrefillTiles | None = None
    lora_tiles: LoraTiles | None = None
    """`runs` in the form that the Triton LoRA kernels read, if `pack` was asked for it."""
    decode_heads: HeadTables | None = None
    """Locations of the decodes' K/V rows by head, if any decode was pruned or updates statistics."""
    segments: list[Segment] = field(default_factory=list)
    """All segments as they were given: those of one preference pair in their order."""

    @property
    def pruned(self) -> HeadTables | None:
        """`decode_heads`, if any of the decodes was pruned."""
        return self.decode_heads if self.decode_heads is not None and self.decode_heads.pruned else None


def pack(
    segments: list[Segment], kv: PagedKv, device: torch.device, tile_tokens: int = 0, lora: bool = False
) -> PackedBatch:
    """Pack `segments` (reordered by adapter slot, single tokens first) and move all tables to `device` at once.

    With `tile_tokens` the segments of several tokens become tiles of at most so many; with `lora` so do the runs.
    """
    ordered = sorted(segments, key=lambda s: (s.slot, len(s.token_ids) > 1))
    rows, runs = packed_rows(ordered, kv.page_size)
    decodes = [s for s in ordered if s.is_decode]
    chunks = [s for s in ordered if not s.is_decode]
    host_tables = page_tables(decodes, kv.page_size)
    tiled = tile_tokens > 0 and len(chunks) > 0
    pages = [s.pages[: -(-(s.context + len(s.token_ids)) // kv.page_size)] for s in chunks if tiled or s.context]
    parts = [
        *rows,
        np.array([row for s in segments for row in s.logit_rows], np.int64),
        np.array([s.start for s in decodes], np.int64),
        np.array([s.context for s in decodes], np.int64),
        host_tables.reshape(-1),
        *([_tiles(chunks, pages, tile_tokens).reshape(-1), np.concatenate(pages)] if tiled else pages),
    ]
    lora_rows = 0
    if lora and runs:
        from edged.engine.lora import triton as triton_lora  # triton is slow to import, and not everywhere

        lora_rows = triton_lora.tile_rows(runs)
        parts.append(triton_lora.tiles_of(runs, lora_rows).reshape(-1))
    ids, positions, at_page, at_row, logit_rows, decode_rows, context, flat, *rest = upload(parts, device)
    tables, heads = flat.view(host_tables.shape), None
    if any(s.compacted is not None or s.watch is not None for s in decodes):
        (store,) = kv.stores
        heads = HeadTables.of([s.compacted for s in decodes], [s.context for s in decodes], tables, context, store)
    in_context = iter([] if tiled else rest[: len(pages)])
    return PackedBatch(
        input_ids=ids[None],
        position_ids=positions[None],
        pages=at_page,
        offsets=at_row,
        logit_rows=logit_rows,
        runs=runs,
        decodes=decodes,
        decode_rows=decode_rows,
        decode_context=context,
        decode_tables=tables,
        prefills=[] if tiled else [Prefill(s, next(in_context) if s.context else None) for s in chunks],
        tiles=PrefillTiles(rest[0].view(-1, _TILE_COLUMNS), rest[1], tile_tokens) if tiled else None,
        lora_tiles=LoraTiles(rest[-1].view(-1, 3), lora_rows) if lora_rows else None,
        decode_heads=heads,
        segments=segments,
    )


def _tiles(chunks: list[Segment], pages: list[np.ndarray], num_tokens: int) -> np.ndarray:
    """Return `PrefillTiles.table` of tiles of at most `num_tokens`; the segments' `pages` will be concatenated."""
    tables = []
    begin = 0
    for segment, used in zip(chunks, pages, strict=True):
        first = np.arange(0, len(segment.token_ids), num_tokens)
        hidden_first, hidden_last = segment.hidden or (0, 0)
        table = np.empty((len(first), _TILE_COLUMNS), np.int64)
        table[:, 0] = segment.start + first
        table[:, 1] = np.minimum(num_tokens, len(segment.token_ids) - first)
        table[:, 2] = segment.context + first
        table[:, 3:] = hidden_first, hidden_last - hidden_first, begin
        tables.append(table)
        begin += len(used)
    return np.concatenate(tables)


def packed_rows(ordered: Sequence[Segment], page_size: int) -> tuple[list[np.ndarray], list[Run]]:
    """Return the id, position, page and offset in the page of every packed token, and the runs under one adapter.

    Sets each segment's `start`.
    """
    total = sum(len(s.token_ids) for s in ordered)
    ids, positions, pages, offsets = (np.empty(total, np.int64) for _ in range(4))
    runs: list[Run] = []
    start = 0
    for segment in ordered:
        n, context = len(segment.token_ids), segment.context
        stop = start + n
        segment.start = start
        ids[start:stop] = segment.token_ids
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
    """Return the decodes' page tables [n, width], padded with page 0."""
    tables = np.zeros((len(decodes), max((s.context // page_size + 1 for s in decodes), default=0)), np.int64)
    for row, segment in enumerate(decodes):
        used = segment.context // page_size + 1
        tables[row, :used] = segment.pages[:used]
    return tables
