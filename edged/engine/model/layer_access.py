"""Access of fine-tune units to the served model: single layers, K/V by page, and the head."""

import time
from collections import defaultdict
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from edged.align.dpo.decoder import Branches, KeysValues, LoraRows
from edged.align.dpo.micro_batch import LayerInputs
from edged.engine.attention.paged import BranchAttention, attention_pass
from edged.engine.kv.store import PagedKv
from edged.engine.model.served_model import ServedModel, layer_call
from edged.tensors.device_copy import upload


class PagedDecoder:
    """The served model as `edged.align.dpo.decoder.Decoder`."""

    def __init__(self, model: ServedModel, kv: PagedKv) -> None:
        self._model, self._kv = model, kv
        self.layer_count, self.hidden_size = model.shape.layers, model.shape.hidden_size
        self.vocab_size, self.device, self.dtype = model.shape.vocab_size, model.device, model.dtype
        self.begin, self.logits, self.keeps_states = model.layer_calls, model.logits, bool(model.states)
        self.sources, self._reads_kv = model.shape.kv_sources, model.shape.reads_kv
        paths = {module: f"{path}." for path, module in model.model.named_modules()}
        self._linears = [
            [name for name in model.lora.linears if name.startswith(paths[layer])] for layer in model.layers
        ]

    def layer_linears(self, layer: int) -> list[str]:
        """See `Decoder`."""
        return self._linears[layer]

    def read_kv(self, layer: int, pages: np.ndarray, rows: int) -> KeysValues:
        """See `Decoder`."""
        (used,) = upload([pages[: -(-rows // self._kv.page_size)]], self.device)
        store, own = self._kv.store_of_layer(layer)
        keys, values = store.read(own, store.block_index(used[None]), 1)
        return keys[0, :, :rows], values[0, :, :rows]

    def run_branches(
        self,
        layer: int,
        hidden: torch.Tensor,
        call: Mapping[str, Any],
        branches: Sequence[Branches],
        rows: Sequence[LoraRows],
        read: KeysValues | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See `Decoder`."""
        attention = BranchAttention(branches)
        if self._reads_kv:
            call = _passing_on(call, read)
        with self._model.lora.training(rows), attention_pass(attention):
            out = self._model.layers[layer](hidden[None], **call)
        return (out[0] if isinstance(out, tuple) else out).squeeze(0), attention.keys, attention.values


def _passing_on(call: Mapping[str, Any], read: KeysValues | None = None) -> dict[str, Any]:
    """Return a layer's call with new mappings in the place of those by which layers pass on their keys and values.

    They have what is `read` under every name, so that the names are the model's own.
    """
    passed = read and tuple(part.unsqueeze(0) for part in read)
    return {
        name: defaultdict(lambda: passed) if isinstance(value, MutableMapping) else value
        for name, value in call.items()
    }


@dataclass(frozen=True, slots=True)
class CapturePlan:
    """The rows of a packed forward that one micro-batch keeps.

    `rows` [n] of the batch go to rows `last_rows` of `last`; the layers' calls for `kept_rows` [m], a run
    of the micro-batch's kept rows that starts at `kept_start`, are kept in `inputs`.
    """

    last: torch.Tensor
    rows: torch.Tensor
    last_rows: torch.Tensor
    inputs: LayerInputs | None
    kept_rows: torch.Tensor | None
    kept_start: int


class LayerTap:
    """Hooks that copy, during a packed forward, what fine-tune rows need: layers' calls and the last hidden states."""

    def __init__(self, model: ServedModel) -> None:
        self._takes: list[CapturePlan] = []
        self._checks, self._reads_kv = False, model.shape.reads_kv
        self.broken: torch.Tensor | None = None
        """Whether each row of the latest forward is not finite, [tokens]; None if it was not checked."""
        self.reached_s = 0.0
        """When a forward last began a layer (monotonic clock)."""
        self._handles = [
            layer.register_forward_pre_hook(partial(self._keep_call, index), with_kwargs=True)
            for index, layer in enumerate(model.layers)
        ]
        self._handles.append(model.norm.register_forward_pre_hook(self._norm_hook))

    def remove(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()

    def arm(self, takes: list[CapturePlan], checks: bool = False) -> None:
        """Set what the next forward keeps, and whether it `checks` that its rows are finite."""
        self._takes, self._checks, self.broken = takes, checks, None

    def disarm(self) -> None:
        """Let the following forwards keep nothing."""
        self._takes, self._checks = [], False

    def _keep_call(self, layer: int, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.reached_s = time.monotonic()
        for take in self._takes:
            if take.inputs is not None and take.kept_rows is not None:
                hidden, call = layer_call(module, args, kwargs)
                # The whole batch's keys and values are not kept.
                call = _passing_on(call) if self._reads_kv else call
                take.inputs.keep(layer, take.kept_start, hidden, call, take.kept_rows)

    def _norm_hook(self, _module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        if self._checks:
            # Values that were not finite in any layer have stayed in the residual stream.
            self.broken = args[0][0].isfinite().all(-1).logical_not_()
        for take in self._takes:
            take.last.index_copy_(0, take.last_rows, args[0][0].index_select(0, take.rows))
