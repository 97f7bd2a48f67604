"""The policy's forward of a group with its autograd graph kept, layer by layer, and the way back through it.

It computes what the packed forward and `RecomputeBackward` compute, with every layer run once instead of twice, for the
memory of all layers' activations.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from edged.align.dpo.decoder import Branches, Decoder, LoraParameters
from edged.align.dpo.micro_batch import MicroBatch
from edged.align.dpo.recompute import add_gradients, lora_rows, matrices, present
from edged.tensors.device_copy import upload


class FullGraphBackward:
    """Forward units from the first layer to the last; then, from an upstream gradient, backward units the other way.

    A unit is one layer over all kept rows, each of which sees the leaves of its pair's adapter.
    """

    def __init__(
        self,
        group: MicroBatch,
        decoder: Decoder,
        leaves: Mapping[str, LoraParameters],
    ) -> None:
        self._group, self._decoder = group, decoder
        streams = [stream for stream in group.streams if stream.kept >= 0]
        self._branches = [
            Branches(
                stream.kept,
                stream.kept + stream.layout.tokens,
                0,
                tuple(stream.layout.pieces(0, stream.layout.tokens)),
                None,
            )
            for stream in streams
        ]
        self._rows = lora_rows(self._branches, streams, leaves)
        positions = [
            np.arange(piece.position, piece.position + piece.stop - piece.start)
            for branch in self._branches
            for piece in branch.pieces
        ]
        ids, places = upload(
            [np.concatenate([s.layout.ids for s in streams]), np.concatenate(positions)], decoder.device
        )
        self._hidden, self._calls = decoder.begin(ids, places)
        self._layers: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Input and output of each layer, with the graph between them."""
        self._upstream: torch.Tensor | None = None

    @property
    def forward_left(self) -> int:
        """Layers that are still to compute."""
        return 0 if self._upstream is not None else self._decoder.layer_count - len(self._layers)

    def forward_unit(self) -> int:
        """Compute the next layer; the rows it covered."""
        layer = len(self._layers)
        hidden = self._hidden.detach().requires_grad_(layer > 0)
        with torch.enable_grad():
            out, _, _ = self._decoder.run_branches(layer, hidden, self._calls[layer], self._branches, self._rows)
        self._layers.append((hidden, out))
        self._hidden = out.detach()
        if not self.forward_left:
            for stream in self._group.streams:
                if stream.kept >= 0:
                    rows = slice(stream.kept, stream.kept + stream.layout.tokens)
                    self._group.last[stream.row : stream.row + stream.layout.tokens] = self._hidden[rows]
        return self._group.kept_rows

    def start_backward(self, upstream: torch.Tensor) -> None:
        """The gradient [kept rows, hidden] at the last layer's output is known."""
        self._upstream = upstream

    @property
    def finished(self) -> bool:
        """Whether all layers are done."""
        return self._upstream is not None and not self._layers

    def sizes_left(self) -> list[int]:
        """Rows of the backward units that are left."""
        return [self._group.kept_rows] * len(self._layers)

    def run_unit(self) -> int:
        """Go back through one layer, and let its graph go; the rows it covered."""
        hidden, out = self._layers.pop()
        layer = len(self._layers)
        names = self._decoder.layer_linears(layer)
        inputs = [*([hidden] if layer else []), *matrices(self._rows, names)]
        gradients = map(present, torch.autograd.grad([out], inputs, [self._upstream], allow_unused=True))
        if layer:
            self._upstream = next(gradients)
        add_gradients(self._rows, names, gradients)
        return self._group.kept_rows
