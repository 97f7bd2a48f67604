"""The backward pass of a micro-batch: by units of one layer times one window (FlexLLM Algorithm 2), or a kept graph."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch

from edged.align.dpo.decoder import Branches, Decoder, KeysValues, LoraParameters, LoraRows
from edged.align.dpo.lean import Keep, KeptResults, Recall
from edged.align.dpo.micro_batch import HeadWindow, MicroBatch, PairForward
from edged.tensors.device_copy import upload


def lora_rows(
    branches: Sequence[Branches], pair_forwards: Sequence[PairForward], leaves: Mapping[str, LoraParameters]
) -> list[LoraRows]:
    """The rows that `branches` (of `pair_forwards`) cover, by adapter; an adapter's pairs are adjacent."""
    rows: list[LoraRows] = []
    for branch, pair_forward in zip(branches, pair_forwards, strict=True):
        own, start = leaves[pair_forward.pair.adapter], branch.first
        if rows and rows[-1].leaves is own:
            start = rows.pop().start
        rows.append(LoraRows(start, branch.last, own))
    return rows


def branches_of(
    micro_batch: MicroBatch, decoder: Decoder, layer: int, start: int, stop: int
) -> tuple[list[Branches], list[PairForward], list[torch.Tensor]]:
    """The pairs that a window of a layer covers, their streams, and their earlier KV as autograd leaves."""
    branches, owners, leaves = [], [], []
    for pair_forward in micro_batch.pair_forwards:
        first, last = max(start, pair_forward.kept), min(stop, pair_forward.kept + pair_forward.layout.num_tokens)
        if pair_forward.kept < 0 or first >= last:
            continue
        begin = first - pair_forward.kept
        earlier = decoder.read_kv(layer, pair_forward.pages, begin) if begin else None
        leaves += [tensor.requires_grad_(True) for tensor in earlier or ()]
        pieces = tuple(pair_forward.layout.pieces(begin, last - pair_forward.kept, decoder.keeps_states))
        branches.append(Branches(first - start, last - start, begin, pieces, earlier, micro_batch.masks))
        owners.append(pair_forward)
    return branches, owners, leaves


def matrices(rows: Sequence[LoraRows], names: Sequence[str]) -> list[torch.Tensor]:
    """Weights of those of the linears `names` that are adapted, adapter by adapter."""
    return [matrix for part in rows for name in names for matrix in part.leaves.weights.get(name, ())]


def add_gradients(rows: Sequence[LoraRows], names: Sequence[str], gradients: Iterator[torch.Tensor]) -> None:
    """Add the gradients of `matrices` to each adapter's totals."""
    by_scaling: dict[float, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for part in rows:
        for name in names:
            totals = part.leaves.gradients.get(name, ())
            for place, total in enumerate(totals, 1):
                scaling = part.leaves.scalings[name] if place == len(totals) else 1.0
                into, own = by_scaling.setdefault(scaling, ([], []))
                into.append(total)
                own.append(next(gradients))
    for scaling, (into, own) in by_scaling.items():
        torch._foreach_add_(into, own, alpha=scaling)


def upstream_of(
    micro_batch: MicroBatch, heads: Sequence[HeadWindow], coefficients: Sequence[float], decoder: Decoder
) -> torch.Tensor:
    """d loss / d (last layer's output) [kept rows, hidden]: the heads' gradients times each answer's coefficient."""
    device = decoder.device
    kept_rows = np.full(micro_batch.rows, -1, np.int64)
    for pair_forward in micro_batch.pair_forwards:
        if pair_forward.kept >= 0:
            rows = np.arange(pair_forward.kept, pair_forward.kept + pair_forward.layout.num_tokens)
            kept_rows[pair_forward.row : pair_forward.row + pair_forward.layout.num_tokens] = rows
    kept_row, bits = upload([kept_rows, np.array(coefficients, np.float64).view(np.int64)], device)
    scale = bits.view(torch.float64).float()
    out = torch.zeros(micro_batch.kept_rows, decoder.hidden_size, dtype=torch.float32, device=device)
    for head in heads:
        if head.gradient is not None:
            weighted = head.gradient.float() * scale.index_select(0, head.owners)[:, None]
            out.index_add_(0, kept_row.index_select(0, head.rows), weighted)
            head.gradient = None
    return out.to(decoder.dtype)


class RecomputeBackward:
    """The backward pass that recomputes every layer.

    Its units go from the last layer to the first, and in each from the last window to the first. A pair's rows use the
    LoRA matrices of its adapter.
    """

    def __init__(
        self,
        micro_batch: MicroBatch,
        windows: Sequence[tuple[int, int]],
        upstream: torch.Tensor,
        decoder: Decoder,
        leaves: Mapping[str, LoraParameters],
    ) -> None:
        self._micro_batch, self._windows, self._upstream, self._decoder = micro_batch, list(windows), upstream, decoder
        self._leaves = leaves
        self._layer, self._window, self._done = decoder.layer_count - 1, 0, 0
        self._earlier: dict[int, KeysValues] = {}

    def run_unit(self, rows: int) -> None:
        """Run one layer on the last `rows` of the next window, or on those that the units before left of it."""
        start, stop = self._windows[self._window]
        stop -= self._done
        self._layer_unit(self._layer, stop - rows, stop)
        if self._done or stop - rows > start:
            # A layer that is cut elsewhere has no use for these masks.
            self._micro_batch.masks.clear()
        self._done += rows
        if stop - rows > start:
            return
        self._window, self._done = self._window + 1, 0
        if self._window == len(self._windows):
            self._window, self._layer, self._earlier = 0, self._layer - 1, {}

    def _layer_unit(self, layer: int, start: int, stop: int) -> None:
        """Recompute one layer on one window from its kept input and back-propagate through it.

        The output's gradient and the gradient that later windows left on this window's own KV go in; the gradients of
        the input, of the earlier KV and of the layer's LoRA matrices come out.
        """
        assert self._micro_batch.inputs is not None
        branches, owners, earlier = branches_of(self._micro_batch, self._decoder, layer, start, stop)
        rows, names = lora_rows(branches, owners, self._leaves), self._decoder.layer_linears(layer)
        hidden = self._micro_batch.inputs.hidden[layer, start:stop].detach().requires_grad_(layer > 0)
        call = self._micro_batch.inputs.window(layer, start, stop)
        with torch.enable_grad():
            out, keys, values = self._decoder.run_branches(layer, hidden, call, branches, rows)
        outputs, upstream = [out], [self._upstream[start:stop]]
        if any(pair_forward.row in self._earlier for pair_forward in owners):
            outputs += [keys, values]
            upstream += self._own_gradients(branches, owners, keys)
        inputs = [*([hidden] if layer else []), *earlier, *matrices(rows, names)]
        # Nothing that is learned is behind the first layer's keys, say, where only its queries are adapted.
        learned = [(output, above) for output, above in zip(outputs, upstream, strict=True) if output.requires_grad]
        if not inputs or not learned:
            return
        outputs, upstream = map(list, zip(*learned, strict=True))
        gradients = iter(torch.autograd.grad(outputs, inputs, upstream, allow_unused=True))
        if layer:
            self._upstream[start:stop] = present(next(gradients))
        for branch, pair_forward in zip(branches, owners, strict=True):
            if branch.earlier is not None:
                keys, values = next(gradients), next(gradients)
                # None where all of it is hidden from the window.
                if keys is not None and values is not None:
                    self._add_earlier(pair_forward.row, keys, values)
        add_gradients(rows, names, map(present, gradients))

    def _own_gradients(
        self, branches: Sequence[Branches], owners: Sequence[PairForward], keys: torch.Tensor
    ) -> list[torch.Tensor]:
        """Gradients of this window's own keys and values from the attention of later windows."""
        both = [torch.zeros_like(keys), torch.zeros_like(keys)]
        for branch, pair_forward in zip(branches, owners, strict=True):
            if pair_forward.row in self._earlier:
                rows = slice(branch.start, branch.start + branch.last - branch.first)
                for into, total in zip(both, self._earlier[pair_forward.row], strict=True):
                    into[:, branch.first : branch.last] = total[:, rows]
        return both

    def _add_earlier(self, row: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Add a window's gradients of its pair's earlier KV to the accumulators (fp32, one layer at a time)."""
        if row not in self._earlier:
            self._earlier[row] = keys.to(torch.float32, copy=True), values.to(torch.float32, copy=True)
            return
        for total, gradient in zip(self._earlier[row], (keys, values), strict=True):
            total[:, : gradient.shape[1]] += gradient


class FullGraphBackward:
    """The policy's forward and backward of a micro-batch, with its autograd graph, or the results of its products and
    attention, kept layer by layer in between.

    It computes what the packed forward and `RecomputeBackward` compute, with every product run once instead of twice,
    for the memory of what is kept. A unit is one layer over all kept rows, each of which uses the LoRA matrices
    of its adapter: forward units from the first layer to the last; then, from an upstream gradient, backward ones.
    """

    def __init__(
        self, micro_batch: MicroBatch, decoder: Decoder, leaves: Mapping[str, LoraParameters], lean: bool
    ) -> None:
        """With `lean` no more is kept of a layer than `KeptResults`, from which its backward makes the graph again."""
        self._micro_batch, self._decoder, self._lean = micro_batch, decoder, lean
        self._branches, pair_forwards, _ = branches_of(micro_batch, decoder, 0, 0, micro_batch.kept_rows)
        self._rows = lora_rows(self._branches, pair_forwards, leaves)
        positions = [
            np.arange(piece.position, piece.position + piece.stop - piece.start)
            for branch in self._branches
            for piece in branch.pieces
        ]
        ranks = (len(own[0]) for part in self._rows for own in part.leaves.weights.values() if len(own) > 1)
        self._rank = max(ranks, default=0)
        tables = [
            np.concatenate([pair_forward.layout.ids for pair_forward in pair_forwards]),
            np.concatenate(positions),
        ]
        self._hidden, self._calls = decoder.begin(*upload(tables, decoder.device))
        self._layers: list[tuple[torch.Tensor, torch.Tensor | KeptResults]] = []
        """Input of each layer, and its output with the graph between them, or the results that are kept instead."""
        self.upstream: torch.Tensor | None = None
        """The gradient [kept rows, hidden] at the output of the next layer to go back through; set it to begin."""

    def forward_unit(self) -> None:
        """Compute the next layer."""
        layer = len(self._layers)
        hidden = self._hidden.detach().requires_grad_(layer > 0)
        kept = KeptResults(self._rank) if self._lean else None
        out = self._run(layer, hidden, Keep(kept) if kept else nullcontext())
        self._layers.append((hidden, kept or out))
        self._hidden = out.detach()
        if len(self._layers) == self._decoder.layer_count:
            for pair_forward in self._micro_batch.pair_forwards:
                if pair_forward.kept >= 0:
                    rows = slice(pair_forward.kept, pair_forward.kept + pair_forward.layout.num_tokens)
                    self._micro_batch.last[pair_forward.row : pair_forward.row + pair_forward.layout.num_tokens] = (
                        self._hidden[rows]
                    )

    def _run(self, layer: int, hidden: torch.Tensor, mode: AbstractContextManager[Any]) -> torch.Tensor:
        with torch.enable_grad(), mode:
            return self._decoder.run_branches(layer, hidden, self._calls[layer], self._branches, self._rows)[0]

    def run_unit(self, _rows: int) -> None:
        """Back-propagate through one layer, all its rows, and free what is kept of it."""
        hidden, out = self._layers.pop()
        layer = len(self._layers)
        if isinstance(out, KeptResults):
            out = self._run(layer, hidden, Recall(out))
        names = self._decoder.layer_linears(layer)
        inputs = [*([hidden] if layer else []), *matrices(self._rows, names)]
        if not inputs:
            return
        gradients = map(present, torch.autograd.grad([out], inputs, [self.upstream], allow_unused=True))
        if layer:
            self.upstream = next(gradients)
        add_gradients(self._rows, names, gradients)


def present(gradient: torch.Tensor | None) -> torch.Tensor:
    """Return a gradient, which the graph must have produced. Raises RuntimeError where it is None."""
    if gradient is None:
        raise RuntimeError("a decoder layer ignored its input or its LoRA matrices: its gradient cannot be computed")
    return gradient
