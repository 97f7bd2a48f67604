"""Fine-tune forwards inside the packed batch: from a group's next tokens to segments, and back to its kept rows.

Owns that translation. Must not know losses, nor when a step runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch

from edged.align.group import Group, Stream
from edged.align.layout import Piece
from edged.align.transfer import upload
from edged.engine.batch import NO_SLOT, Segment
from edged.engine.decoder import Take

Taken = list[tuple[Stream, Piece]]


def segments_of(
    taken: Taken, slots: Mapping[str, int], page_size: int, allocate: Callable[[int], np.ndarray]
) -> list[Segment]:
    """Segments of taken pieces, in the same order, each under the slot of its pair's adapter.

    Their streams' pages grow to hold them.
    """
    segments = []
    for stream, piece in taken:
        needed = -(-piece.stop // page_size) - len(stream.pages)
        if needed > 0:
            stream.pages = np.concatenate((stream.pages, allocate(needed)))
        segments.append(
            Segment(
                tokens=stream.layout.ids[piece.start : piece.stop],
                context=piece.start,
                pages=stream.pages,
                slot=NO_SLOT if stream.reference else slots[stream.pair.adapter],
                position=piece.position,
                hidden=piece.hidden,
            )
        )
    return segments


def take_of(group: Group, taken: Taken, segments: list[Segment], device: torch.device) -> Take:
    """What the layer tap shall keep of a packed batch that holds `segments`."""
    rows: list[np.ndarray] = []
    last: list[np.ndarray] = []
    kept: list[np.ndarray] = []
    kept_start = -1
    for (stream, piece), segment in zip(taken, segments, strict=True):
        n = piece.stop - piece.start
        packed = np.arange(segment.start, segment.start + n)
        rows.append(packed)
        last.append(np.arange(stream.row + piece.start, stream.row + piece.stop))
        if stream.kept >= 0:
            if not kept:
                kept_start = stream.kept + piece.start
            kept.append(packed)
    tables = [np.concatenate(part) for part in (rows, last, kept) if part]
    moved = upload(tables, device)
    return Take(
        last=group.last,
        rows=moved[0],
        last_rows=moved[1],
        inputs=group.inputs if kept else None,
        kept_rows=moved[2] if kept else None,
        kept_start=kept_start,
    )
