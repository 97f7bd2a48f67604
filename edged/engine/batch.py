"""The packed batch: the new tokens of many sequences in one row, and the tables that attention needs.

Owns the segment table. Must not know requests, policies or the model: it is built from segments and read by
`edged.engine.attention` and `edged.engine.lora`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from edged.engine.kv import KvStore

NO_SLOT = -1
"""The LoRA slot of tokens that the base model answers."""


@dataclass(slots=True)
class Segment:
    """Consecutive new tokens of one sequence.

    `context` rows of K/V precede them in `pages`. `position` is the first token's position id; it differs from
    `context` in a branch of a preference pair, whose keys leave out the rows `hidden` = (first, past the last) that
    belong to the other branch.
    """

    tokens: Sequence[int] | np.ndarray
    context: int
    pages: np.ndarray
    slot: int = NO_SLOT
    position: int = 0
    hidden: tuple[int, int] | None = None
    samples: bool = False
    """Whether the last token's logits are wanted."""
    start: int = field(default=0, init=False)
    """Row of its first token in the packed batch."""


@dataclass(slots=True)
class Prefill:
    """A segment of several tokens, as attention sees it: rows [start, stop) over `context` earlier keys."""

    start: int
    stop: int
    context: int
    hidden: tuple[int, int] | None
    blocks: torch.Tensor | None
    mask: dict[int | None, torch.Tensor] = field(default_factory=dict)


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
    segments: list[Segment]

    @property
    def tokens(self) -> int:
        """Packed tokens."""
        return self.input_ids.shape[1]


def pack(segments: list[Segment], kv: KvStore, device: torch.device) -> PackedBatch:
    """Pack `segments` (reordered by adapter slot, single tokens first) and move all tables to `device` at once."""
    ordered = sorted(segments, key=lambda s: (s.slot, len(s.tokens) > 1))
    total = sum(len(s.tokens) for s in ordered)
    ids, positions = np.empty(total, np.int64), np.empty(total, np.int64)
    pages, offsets = np.empty(total, np.int64), np.empty(total, np.int64)
    runs: list[tuple[int, int, int]] = []
    decodes: list[Segment] = []
    start = 0
    for segment in ordered:
        n = len(segment.tokens)
        stop = start + n
        segment.start = start
        ids[start:stop] = segment.tokens
        if n == 1 and segment.hidden is None:
            decodes.append(segment)
            positions[start] = segment.position
            pages[start], offsets[start] = (
                segment.pages[segment.context // kv.page_size],
                segment.context % kv.page_size,
            )
        else:
            positions[start:stop] = np.arange(segment.position, segment.position + n)
            rows = np.arange(segment.context, segment.context + n)
            pages[start:stop], offsets[start:stop] = segment.pages[rows // kv.page_size], rows % kv.page_size
        if runs and runs[-1][2] == segment.slot:
            runs[-1] = (runs[-1][0], stop, segment.slot)
        else:
            runs.append((start, stop, segment.slot))
        start = stop
    width = max((s.context // kv.page_size + 1 for s in decodes), default=0)
    tables = np.zeros((len(decodes), width), np.int64)
    for row, segment in enumerate(decodes):
        used = segment.context // kv.page_size + 1
        tables[row, :used] = segment.pages[:used]
    chunks = [s for s in ordered if len(s.tokens) > 1 or s.hidden is not None]
    chunk_tables = [s.pages[: -(-(s.context + len(s.tokens)) // kv.page_size)] for s in chunks if s.context]
    parts = [
        ids,
        positions,
        pages,
        offsets,
        np.array([s.start + len(s.tokens) - 1 for s in segments if s.samples], np.int64),
        np.array([s.start for s in decodes], np.int64),
        np.array([s.context for s in decodes], np.int64),
        tables.reshape(-1),
        *chunk_tables,
    ]
    moved = _to_device(parts, device)
    chunk_pages = iter(moved[8:])
    prefills = [
        Prefill(
            s.start,
            s.start + len(s.tokens),
            s.context,
            s.hidden,
            kv.block_index(next(chunk_pages)[None]) if s.context else None,
        )
        for s in chunks
    ]
    return PackedBatch(
        input_ids=moved[0][None],
        position_ids=moved[1][None],
        write_rows=kv.row_index(moved[2], moved[3]),
        logit_rows=moved[4],
        runs=[run for run in runs if run[2] != NO_SLOT],
        decodes=decodes,
        decode_rows=moved[5],
        decode_tables=moved[7].view(len(decodes), width),
        decode_context=moved[6],
        prefills=prefills,
        segments=ordered,
    )


def _to_device(parts: list[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """All integer tables in one transfer; the results are views of one device tensor."""
    joined = torch.from_numpy(np.concatenate(parts))
    if device.type == "cuda":
        joined = joined.pin_memory().to(device, non_blocking=True)
    return list(joined.split([part.size for part in parts]))
