"""Micro-batches: pairs whose forwards are computed together, their kept tensors, and the predictions to score."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch

from edged.align.dpo.decoder import Decoder, Masks
from edged.align.dpo.layout import Layout, Piece
from edged.align.feedback.pair import TokenPair
from edged.settings.load import AlignSettings
from edged.tensors.device_copy import upload


@dataclass(frozen=True, slots=True)
class _KeptTensor:
    """The placeholder of a kept tensor in a layer's recorded call."""

    index: int


class LayerInputs:
    """The inputs of each decoder layer in a fine-tune forward: all that is kept of it besides the KV pages.

    They are hidden states [layers, rows, hidden_size] and every per-token tensor of the layers' calls, filled chunk by
    chunk from packed forwards; `window` returns a layer's arguments for some rows.
    """

    def __init__(self, layers: int, rows: int, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.rows = rows
        self.hidden = torch.empty(layers, rows, hidden_size, dtype=dtype, device=device)
        self._calls: list[dict[str, Any]] = [{} for _ in range(layers)]
        self._banks: list[torch.Tensor] = []
        self._chunk: dict[int, tuple[torch.Tensor, int]] = {}
        """Tensors of the current chunk by identity (kept alive, so that an identity cannot be reused) -> bank."""
        self._chunk_start = -1

    def keep(self, layer: int, start: int, hidden: torch.Tensor, call: Mapping[str, Any], index: torch.Tensor) -> None:
        """Keep packed rows `index` of a layer's call (`hidden` [1, tokens, hidden_size]) as rows from `start` on."""
        if layer == 0 or start != self._chunk_start:
            self._chunk, self._chunk_start = {}, start
        self.hidden[layer, start : start + len(index)] = hidden[0].index_select(0, index)
        known = self._calls[layer]
        for name, value in call.items():
            known[name] = self._keep(known.get(name), value, index, hidden.shape[1])

    def _keep(self, known: Any, value: Any, index: torch.Tensor, num_tokens: int) -> Any:
        if isinstance(value, tuple):
            parts = known if isinstance(known, tuple) else (None,) * len(value)
            return tuple(self._keep(k, v, index, num_tokens) for k, v in zip(parts, value, strict=True))
        if not isinstance(value, torch.Tensor) or value.dim() < 2 or value.shape[1] != num_tokens:
            return value
        # Most decoders hand one tensor to every layer: one bank serves them all, written once per chunk.
        if id(value) in self._chunk:
            return _KeptTensor(self._chunk[id(value)][1])
        if isinstance(known, _KeptTensor):
            bank = known.index
        else:
            bank = len(self._banks)
            shape = (value.shape[0], self.rows, *value.shape[2:])
            with torch.inference_mode(False):
                self._banks.append(torch.empty(shape, dtype=value.dtype, device=value.device))
        self._banks[bank][:, self._chunk_start : self._chunk_start + len(index)] = value.index_select(1, index)
        self._chunk[id(value)] = (value, bank)
        return _KeptTensor(bank)

    def window(self, layer: int, start: int, stop: int) -> dict[str, Any]:
        """The keyword arguments of `layer` for rows [start, stop)."""
        return {name: self._cut(value, start, stop) for name, value in self._calls[layer].items()}

    def _cut(self, value: Any, start: int, stop: int) -> Any:
        if isinstance(value, tuple):
            return tuple(self._cut(part, start, stop) for part in value)
        return self._banks[value.index][:, start:stop] if isinstance(value, _KeptTensor) else value


@dataclass(slots=True, eq=False)
class PairForward:
    """One pair's forward under one policy: the adapter's or, when `reference`, the base model's."""

    pair: TokenPair
    layout: Layout
    reference: bool
    row: int
    """First of its rows in the micro-batch's last hidden states."""
    kept: int
    """First of its rows in the layer inputs; -1 when they are not kept."""
    owner: int
    """Number of its first scored text among those of the micro-batch's streams."""
    packed: bool = True
    """Whether it is computed in the engine's packed forwards."""
    pages: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    done: int = 0

    @property
    def left(self) -> int:
        """Tokens that packed forwards are still to compute."""
        return self.layout.num_tokens - self.done if self.packed else 0

    @property
    def owners(self) -> slice:
        """Numbers of its scored texts."""
        return slice(self.owner, self.owner + len(self.layout.scored_tokens))


class MicroBatch:
    """Pairs whose forwards are computed together: their streams, and the last layer's output for all rows."""

    def __init__(
        self,
        pairs: Sequence[TokenPair],
        reference: Callable[[TokenPair], bool],
        keep: Literal["nothing", "inputs", "graph"],
        decoder: Decoder,
        align: AlignSettings,
    ):
        """`keep` is what a backward pass needs of the policy's forward; packed forwards do not compute a "graph"."""
        layouts = [Layout.of(pair, align) for pair in pairs]
        self.pair_forwards: list[PairForward] = []
        row = kept = owner = 0
        for pair, layout in zip(pairs, layouts, strict=True):
            for is_reference in (True, False):
                if is_reference and not reference(pair):
                    continue
                keeps = keep != "nothing" and not is_reference
                packed = is_reference or keep != "graph"
                at = (row, kept if keeps else -1, owner)
                self.pair_forwards.append(PairForward(pair, layout, is_reference, *at, packed))
                row += layout.num_tokens
                owner += len(layout.scored_tokens)
                kept += layout.num_tokens if keeps else 0
        self.rows, self.kept_rows, self._forks = row, kept, decoder.keeps_states
        self.owners = owner
        """Number of all streams' scored texts: answers and, for some losses, prompts."""
        self.masks: Masks = {}
        """Masks of the policy's attention, for all layers."""
        self.last = torch.empty(row, decoder.hidden_size, dtype=decoder.dtype, device=decoder.device)
        self._new_inputs = lambda: (
            LayerInputs(decoder.layer_count, kept, decoder.hidden_size, decoder.dtype, decoder.device)
            if keep == "inputs"
            else None
        )
        self.inputs = self._new_inputs()
        """Kept inputs of the policy's forward; None where there are none, and once the micro-batch has ended."""

    @property
    def tokens_left(self) -> int:
        """Forward tokens that are not computed yet."""
        return sum(pair_forward.left for pair_forward in self.pair_forwards)

    def next_pieces(self, num_tokens: int) -> list[tuple[PairForward, Piece]]:
        """The next `num_tokens` forward tokens as pieces, which `advance` marks as computed."""
        pieces: list[tuple[PairForward, Piece]] = []
        for pair_forward in self.pair_forwards:
            stop = pair_forward.done + min(pair_forward.left, num_tokens)
            if stop > pair_forward.done:
                own = pair_forward.layout.pieces(pair_forward.done, stop, self._forks)
                pieces += [(pair_forward, piece) for piece in own]
                num_tokens -= stop - pair_forward.done
        return pieces

    def restart(self, release: Callable[[np.ndarray], None]) -> None:
        """Give the pages back, and mark all tokens as not computed."""
        self.inputs = self.inputs or self._new_inputs()
        self.free(release)
        for pair_forward in self.pair_forwards:
            pair_forward.done = 0

    def free(self, release: Callable[[np.ndarray], None]) -> None:
        """Give the pages back."""
        for pair_forward in self.pair_forwards:
            if len(pair_forward.pages):
                release(pair_forward.pages)
                pair_forward.pages = pair_forward.pages[:0]

    def advance(self, num_tokens: int) -> None:
        """Mark the next `num_tokens` as computed."""
        for pair_forward in self.pair_forwards:
            n = min(num_tokens, pair_forward.left)
            pair_forward.done += n
            num_tokens -= n


@dataclass(slots=True)
class HeadWindow:
    """The scored predictions of one unit: rows of the last hidden states, targets, and the sum each adds to."""

    rows: torch.Tensor
    targets: torch.Tensor
    owners: torch.Tensor
    """Number of the scored text among those of the micro-batch's streams."""
    reference: bool
    floors: torch.Tensor | None = None
    """Each target's `TokenPair.floors`, where a pair has any."""
    gradient: torch.Tensor | None = None
    """d (sum of its log-probabilities) / d (last hidden state), per row."""

    def split(self, at: int) -> tuple["HeadWindow", "HeadWindow"]:
        """Return the predictions before number `at` and those from it on."""
        first, last = (
            HeadWindow(
                *(self.rows[part], self.targets[part], self.owners[part], self.reference),
                None if self.floors is None else self.floors[part],
            )
            for part in (slice(at), slice(at, None))
        )
        return first, last


def head_windows(micro_batch: MicroBatch, reference: bool, size: int) -> list[HeadWindow]:
    """Cut the scored predictions of the reference's or the policy's streams into windows of at most `size`."""
    rows: list[np.ndarray] = []
    targets: list[np.ndarray] = []
    owners: list[np.ndarray] = []
    floors: list[np.ndarray] = []
    for pair_forward in micro_batch.pair_forwards:
        if pair_forward.reference == reference:
            scored = pair_forward.layout.scored_rows()
            rows += [pair_forward.row + part for part in scored]
            targets += pair_forward.layout.targets()
            owners += [np.full(len(part), owner) for owner, part in enumerate(scored, pair_forward.owner)]
            floors += [np.full(len(part), np.inf) for part in scored]
            if own := pair_forward.pair.floors:
                floors[-len(scored)] = np.array(own[len(own) - len(scored[0]) :])
    if not rows:
        return []
    bits = np.concatenate(floors).view(np.int64)
    tables = upload([*map(np.concatenate, (rows, targets, owners)), bits], micro_batch.last.device)
    floored = any(pair_forward.pair.floors for pair_forward in micro_batch.pair_forwards) and not reference
    return [
        HeadWindow(row, target, owner, reference, floor.view(torch.float64).float() if floored else None)
        for row, target, owner, floor in zip(*(table.split(size) for table in tables), strict=True)
    ]
