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
) -> tuple[list[Branches], list[PairForward], list[KeysValues | None], KeysValues | None]:
    """The pairs that a window of a layer covers, their streams, and their earlier KV as autograd leaves.

    Where the layer reads an earlier one's, the leaves have the window's own rows, too, which come last, joined.
    """
    branches, owners, leaves, read = [], [], list[KeysValues | None](), list[KeysValues]()
    reads = decoder.sources[layer] != layer
    for pair_forward in micro_batch.pair_forwards:
        first, last = max(start, pair_forward.kept), min(stop, pair_forward.kept + pair_forward.layout.num_tokens)
        if pair_forward.kept < 0 or first >= last:
            continue
        begin = first - pair_forward.kept
        rows = last - pair_forward.kept if reads else begin
        earlier = decoder.read_kv(layer, pair_forward.pages, rows) if rows else None
        for tensor in earlier or ():
            tensor.requires_grad_(True)
        leaves.append(earlier)
        if reads and earlier is not None:
            # By splits: each slice would have a gradient as large as the whole.
            (keys, own_keys), (values, own_values) = (part.split((begin, rows - begin), dim=1) for part in earlier)
            read.append((own_keys, own_values))
            earlier = (keys, values) if begin else None
        pieces = tuple(pair_forward.layout.pieces(begin, last - pair_forward.kept, decoder.keeps_states))
        branches.append(Branches(first - start, last - start, begin, pieces, earlier, micro_batch.masks))
        owners.append(pair_forward)
    if not reads:
        return branches, owners, leaves, None
    own_keys, own_values = (torch.cat(parts, dim=1) for parts in zip(*read, strict=True))
    return branches, owners, leaves, (own_keys, own_values)


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


def gradients_of(
    outputs: Sequence[torch.Tensor], upstream: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
) -> Iterator[torch.Tensor | None] | None:
    """Back-propagate through a layer; returns None where it has nothing to learn."""
    # Nothing that is learned is behind the first layer's keys, say, where only its queries are adapted.
    learned = [(output, above) for output, above in zip(outputs, upstream, strict=True) if output.requires_grad]
    if not inputs or not learned:
        return None
    outputs, upstream = zip(*learned, strict=True)
    return iter(torch.autograd.grad(outputs, inputs, upstream, allow_unused=True))


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
        self._earlier: dict[int, dict[int, KeysValues]] = {}
        """Gradients of each layer's keys and values that units before left, by pair."""

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
            self._earlier.pop(self._layer, None)
            self._window, self._layer = 0, self._layer - 1

    def _layer_unit(self, layer: int, start: int, stop: int) -> None:
        """Recompute one layer on one window from its kept input and back-propagate through it.

        The output's gradient and the gradients that later windows and layers left on this window's own KV go in; the
        gradients of the input, of the KV that was read and of the layer's LoRA matrices come out.
        """
        assert self._micro_batch.inputs is not None
        hidden = self._micro_batch.inputs.hidden[layer, start:stop].detach().requires_grad_(layer > 0)
        call = self._micro_batch.inputs.window(layer, start, stop)
        with torch.enable_grad():
            branches, owners, leaves, read = branches_of(self._micro_batch, self._decoder, layer, start, stop)
            rows, names = lora_rows(branches, owners, self._leaves), self._decoder.layer_linears(layer)
            out, keys, values = self._decoder.run_branches(layer, hidden, call, branches, rows, read)
        outputs, upstream = [out], [self._upstream[start:stop]]
        totals = self._earlier.get(layer, {})
        if any(pair_forward.row in totals for pair_forward in owners):
            outputs += [keys, values]
            upstream += _own_gradients(branches, owners, keys, totals)
        earlier = [tensor for leaf in leaves for tensor in leaf or ()]
        inputs = [*([hidden] if layer else []), *earlier, *matrices(rows, names)]
        gradients = gradients_of(outputs, upstream, inputs)
        if gradients is None:
            return
        if layer:
            self._upstream[start:stop] = present(next(gradients))
        totals = self._earlier.setdefault(self._decoder.sources[layer], {})
        for leaf, pair_forward in zip(leaves, owners, strict=True):
            if leaf is not None:
                of_keys, of_values = next(gradients), next(gradients)
                # None where all of it is hidden from the window.
                if of_keys is not None and of_values is not None:
                    _add_earlier(totals, pair_forward.row, of_keys, of_values)
        add_gradients(rows, names, map(present, gradients))


def _own_gradients(
    branches: Sequence[Branches], owners: Sequence[PairForward], keys: torch.Tensor, totals: Mapping[int, KeysValues]
) -> list[torch.Tensor]:
    """Gradients of a window's own keys and values from the attention of later windows and layers."""
    both = [torch.zeros_like(keys), torch.zeros_like(keys)]
    for branch, pair_forward in zip(branches, owners, strict=True):
        if pair_forward.row in totals:
            rows = slice(branch.start, branch.start + branch.last - branch.first)
            for into, total in zip(both, totals[pair_forward.row], strict=True):
                into[:, branch.first : branch.last] = total[:, rows]
    return both


def _add_earlier(totals: dict[int, KeysValues], row: int, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Add a window's gradients of the KV that a pair had read to the `totals` of their layer (fp32).

    The first have the most rows: units go from a pair's end to its beginning.
    """
    if row not in totals:
        totals[row] = keys.to(torch.float32, copy=True), values.to(torch.float32, copy=True)
        return
    for total, gradient in zip(totals[row], (keys, values), strict=True):
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
        self._branches, pair_forwards, *_ = branches_of(micro_batch, decoder, 0, 0, micro_batch.kept_rows)
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
        self._layers: list[tuple[torch.Tensor, list[torch.Tensor] | KeptResults]] = []
        """Input of each layer, and its `_outputs` with the graph between them, or the results that are kept instead."""
        self._read: dict[int, list[torch.Tensor]] = {}
        """Keys and values that later layers read, as autograd leaves, by the layer that makes them."""
        self._totals: dict[int, list[torch.Tensor]] = {}
        """Their gradients so far, in fp32."""
        self.upstream: torch.Tensor | None = None
        """The gradient [kept rows, hidden] at the output of the next layer to go back through; set it to begin."""

    def forward_unit(self) -> None:
        """Compute the next layer."""
        layer = len(self._layers)
        hidden = self._hidden.detach().requires_grad_(layer > 0)
        kept = KeptResults(self._rank) if self._lean else None
        outputs = self._outputs(layer, hidden, Keep(kept) if kept else nullcontext())
        self._layers.append((hidden, kept or outputs))
        self._hidden, *read = (output.detach() for output in outputs)
        if read:
            self._read[layer] = [part.requires_grad_() for part in read]
        if len(self._layers) == self._decoder.layer_count:
            for pair_forward in self._micro_batch.pair_forwards:
                if pair_forward.kept >= 0:
                    rows = slice(pair_forward.kept, pair_forward.kept + pair_forward.layout.num_tokens)
                    self._micro_batch.last[pair_forward.row : pair_forward.row + pair_forward.layout.num_tokens] = (
                        self._hidden[rows]
                    )

    def _outputs(self, layer: int, hidden: torch.Tensor, mode: AbstractContextManager[Any]) -> list[torch.Tensor]:
        """Compute a layer's output and, where later layers read them, its keys and values."""
        sources, call = self._decoder.sources, self._calls[layer]
        read = None if sources[layer] == layer else (self._read[sources[layer]][0], self._read[sources[layer]][1])
        with torch.enable_grad(), mode:
            outputs = self._decoder.run_branches(layer, hidden, call, self._branches, self._rows, read)
        return [*outputs] if layer in sources[layer + 1 :] else [outputs[0]]

    def run_unit(self, _rows: int) -> None:
        """Back-propagate through one layer, all its rows, and free what is kept of it."""
        hidden, outputs = self._layers.pop()
        layer = len(self._layers)
        if isinstance(outputs, KeptResults):
            outputs = self._outputs(layer, hidden, Recall(outputs))
        names, source = self._decoder.layer_linears(layer), self._decoder.sources[layer]
        assert self.upstream is not None
        above = [self.upstream, *(total.to(self.upstream.dtype) for total in self._totals.pop(layer, ()))]
        self._read.pop(layer, None)
        leaves = self._read[source] if source != layer else []
        inputs = [*([hidden] if layer else []), *leaves, *matrices(self._rows, names)]
        found = gradients_of(outputs, above, inputs)
        if found is None:
            return
        gradients = map(present, found)
        if layer:
            self.upstream = next(gradients)
        if leaves and source not in self._totals:
            self._totals[source] = [torch.zeros_like(each, dtype=torch.float32) for each in leaves]
        for total in self._totals[source] if leaves else ():
            total += next(gradients)
        add_gradients(self._rows, names, gradients)


def present(gradient: torch.Tensor | None) -> torch.Tensor:
    """Return a gradient, which the graph must have produced. Raises RuntimeError where it is None."""
    if gradient is None:
        raise RuntimeError("a decoder layer ignored its input or its LoRA matrices: its gradient cannot be computed")
    return gradient
