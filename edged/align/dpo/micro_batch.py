"""Pairs whose forwards are computed together: their streams, what is kept of them, and the scored predictions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch

from edged.align.dpo.activations import LayerInputs
from edged.align.dpo.decoder import Decoder
from edged.align.dpo.pair_layout import PairLayout, Piece
from edged.align.feedback.pair import TokenPair
from edged.tensors.device_copy import upload

Work = tuple[str, int]
"""A unit's kind and the tokens (of "step", the adapters) it covers: see `edged.scheduler.task.Unit`."""

_HEAD_LOGITS = 1 << 23
"""Logits that a head unit may hold at once: 32 MiB in fp32."""


@dataclass(slots=True, eq=False)
class PairForward:
    """One pair's forward under one policy: the adapter's or, when `reference`, the base model's."""

    pair: TokenPair
    layout: PairLayout
    reference: bool
    row: int
    """Its first row in the group's last hidden states."""
    kept: int
    """Its first row in the layer inputs; -1 when they are not kept."""
    packed: bool = True
    """Whether it is computed in the engine's packed forwards."""
    pages: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    done: int = 0

    @property
    def left(self) -> int:
        """Tokens that packed forwards are still to compute."""
        return self.layout.tokens - self.done if self.packed else 0


class MicroBatch:
    """Some pairs whose forwards are computed together: their streams, and the last layer's output for all rows."""

    def __init__(
        self,
        pairs: Sequence[TokenPair],
        reference: Callable[[TokenPair], bool],
        keep: Literal["nothing", "inputs", "graph"],
        decoder: Decoder,
    ):
        """What is kept of the policy's forward for a backward pass; with "graph" packed forwards have no part in it."""
        layouts = [PairLayout.of(pair) for pair in pairs]
        self.streams: list[PairForward] = []
        row = kept = 0
        for pair, layout in zip(pairs, layouts, strict=True):
            for is_reference in (True, False):
                if is_reference and not reference(pair):
                    continue
                keeps = keep != "nothing" and not is_reference
                packed = is_reference or keep != "graph"
                self.streams.append(PairForward(pair, layout, is_reference, row, kept if keeps else -1, packed))
                row += layout.tokens
                kept += layout.tokens if keeps else 0
        self.rows, self.kept_rows = row, kept
        self.last = torch.empty(row, decoder.hidden_size, dtype=decoder.dtype, device=decoder.device)
        self._new_inputs = lambda: (
            LayerInputs(decoder.layer_count, kept, decoder.hidden_size, decoder.dtype, decoder.device)
            if keep == "inputs"
            else None
        )
        self.inputs = self._new_inputs()
        """None once the group has ended, too."""

    @property
    def tokens_left(self) -> int:
        """Forward tokens that are not computed yet."""
        return sum(stream.left for stream in self.streams)

    def take(self, tokens: int) -> list[tuple[PairForward, Piece]]:
        """The next `tokens` forward tokens as pieces; `advance` makes them done."""
        taken: list[tuple[PairForward, Piece]] = []
        for stream in self.streams:
            stop = stream.done + min(stream.left, tokens)
            if stop > stream.done:
                taken += [(stream, piece) for piece in stream.layout.pieces(stream.done, stop)]
                tokens -= stop - stream.done
        return taken

    def restart(self, release: Callable[[np.ndarray], None]) -> None:
        """Give the pages back; nothing is computed any more."""
        self.inputs = self.inputs or self._new_inputs()
        self.free(release)
        for stream in self.streams:
            stream.done = 0

    def free(self, release: Callable[[np.ndarray], None]) -> None:
        """Give the pages back."""
        for stream in self.streams:
            if len(stream.pages):
                release(stream.pages)
                stream.pages = stream.pages[:0]

    def advance(self, tokens: int) -> None:
        """Mark the next `tokens` as computed."""
        for stream in self.streams:
            n = min(tokens, stream.left)
            stream.done += n
            tokens -= n

    def scored(self, stream: PairForward) -> tuple[np.ndarray, np.ndarray, int]:
        """(rows in `last`, target ids, number of the chosen answer's) of a stream's scored predictions."""
        chosen, rejected = stream.layout.scored_rows()
        rows = np.concatenate((chosen, rejected)) + stream.row
        return rows, np.concatenate(stream.layout.targets()), len(chosen)


@dataclass(slots=True)
class HeadWindow:
    """Scored predictions of one unit: rows of the group's last hidden states, targets, and each one's sum."""

    rows: torch.Tensor
    targets: torch.Tensor
    owners: torch.Tensor
    """Index of (stream, answer): 2 * stream + 0 for chosen, + 1 for rejected."""
    reference: bool
    gradient: torch.Tensor | None = None
    """d (sum of its log-probabilities) / d (last hidden state), per row."""


def head_windows(group: MicroBatch, reference: bool, size: int, device: torch.device) -> list[HeadWindow]:
    """Cut the scored predictions of the reference's or the policy's streams into windows of at most `size`."""
    rows, targets, owners = [], [], []
    for index, stream in enumerate(group.streams):
        if stream.reference == reference:
            r, t, chosen = group.scored(stream)
            rows.append(r)
            targets.append(t)
            owners.append(np.where(np.arange(len(r)) < chosen, 2 * index, 2 * index + 1))
    if not rows:
        return []
    row, target, owner = (
        table.split(size) for table in upload([*map(np.concatenate, (rows, targets, owners))], device)
    )
    return [HeadWindow(*part, reference=reference) for part in zip(row, target, owner, strict=True)]


def head_window_size(window_tokens: int, vocab_size: int) -> int:
    """Predictions per head unit: the window, or fewer where the vocabulary's logits would be large."""
    return max(8, min(window_tokens, _HEAD_LOGITS // vocab_size))
