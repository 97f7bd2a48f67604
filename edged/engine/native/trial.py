"""Which of a model's layers the compiled kernels compute for few rows: those for which both ways agree.

Owns the trial, and the stand-in for a layer's `forward`. Must not know what is attended or which adapters there are.
What a layer is is not read from its class: its parts are found by name, and both ways must agree on the same rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from edged.engine.attention import attention_pass, current_pass
from edged.engine.lora import LoraLinear
from edged.engine.lora_updates import LoraRuns
from edged.engine.model import ServedModel
from edged.engine.native.layers import NativeLayer, NotOfThisKind, Scratch
from edged.engine.native.library import FEW_ROWS, why_no_kernels

_TOLERANCE = 1e-5
"""Of the largest number, in the trial: both ways do the same in fp32, but for the order of sums."""


@dataclass(slots=True)
class _Call:
    """What a layer hands to attention beside query, key and value."""

    layer: int
    scaling: float
    window: int | None
    softcap: float | None


class ShortLayer:
    """Stands for a layer's `forward`; `long` is the layer's own, for all that the kernels do not compute."""

    def __init__(self, layer: nn.Module, call: _Call, native: NativeLayer, runs: LoraRuns) -> None:
        self.long, self._call, self._native, self._runs = layer.forward, call, native, runs

    def __call__(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """As the layer's own `forward`, whose keyword arguments the model gives."""
        few = hidden_states.shape[1] <= FEW_ROWS and not torch.is_grad_enabled() and not self._runs.training
        if not few or args or kwargs.get("attention_mask") is not None:
            return self.long(hidden_states, *args, **kwargs)
        return self.short(hidden_states[0], *kwargs["position_embeddings"])[None]

    def short(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] -> [rows, hidden]; `cos` and `sin` [1, rows, head_dim] of the rows' positions."""
        return self._native(x, cos, sin, self._attend)

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        call = self._call
        return current_pass().attend(call.layer, query, key, value, call.scaling, call.window, call.softcap)


class _Witness:
    """An attention pass that records what it is asked, and answers every row with its own query."""

    def __init__(self) -> None:
        self.tensors: tuple[torch.Tensor, ...] = ()
        self.call: _Call

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """See `AttentionPass.attend`."""
        self.tensors, self.call = (query, key, value), _Call(layer, scaling, window, softcap)
        return query.transpose(0, 1).clone()


def shorten_layers(model: ServedModel) -> str:
    """Let the kernels compute all layers for few rows; why not, or "". To be called after `attach_lora`."""
    assert model.lora is not None
    if model.device.type != "cpu" or model.dtype != torch.float32:
        return f"the compiled kernels are for float32 on the CPU, not for {model.dtype} on {model.device.type}"
    if reason := why_no_kernels():
        return reason
    ids = torch.tensor([[1, 2, 3]], device=model.device) % model.shape.vocab_size
    positions = torch.tensor([[0, 1, model.shape.max_positions - 1]], device=model.device)
    scratch, found = Scratch(), []
    with torch.inference_mode():
        hidden, calls = model.layer_calls(ids, positions)
        for layer, call in zip(model.layers, calls, strict=True):
            try:
                found.append(_tried(model, layer, hidden[None], call, scratch))
            except NotOfThisKind as error:
                return str(error)
    for layer, short in zip(model.layers, found, strict=True):
        layer.forward = short
    return ""


@contextmanager
def _some_adapter(layer: nn.Module) -> Iterator[None]:
    """Random matrices in slot 0 of a layer's linears; afterwards it holds what it did."""
    generator = torch.Generator().manual_seed(0)
    slots = [linear.get_buffer(side)[0] for linear in _adapted(layer) for side in ("down", "up")]
    before = [slot.clone() for slot in slots]
    try:
        for slot in slots:
            slot.normal_(0.0, len(slot) ** -0.5, generator=generator)
        yield
    finally:
        for slot, own in zip(slots, before, strict=True):
            slot.copy_(own)


def _adapted(layer: nn.Module) -> list[LoraLinear]:
    return [module for module in layer.modules() if isinstance(module, LoraLinear)]


def _tried(
    model: ServedModel, layer: nn.Module, hidden: torch.Tensor, call: dict[str, Any], scratch: Scratch
) -> ShortLayer:
    """`layer` the short way, if both ways agree on `hidden` [1, rows, hidden], of which the last two rows have an
    adapter. Raises NotOfThisKind."""
    assert model.lora is not None
    lora, shape, kind = model.lora, model.shape, type(layer).__name__
    witness = _Witness()
    with attention_pass(witness), _some_adapter(layer), lora.packed([(1, hidden.shape[1], 0)]):
        wanted = layer(hidden, **call)
        wanted_parts = (wanted[0], *witness.tensors)
        angles = call.get("position_embeddings")
        if not isinstance(wanted, torch.Tensor) or angles is None:
            raise NotOfThisKind(f"{kind} is called in another way")
        native = NativeLayer(layer, shape.heads, shape.head_dim, lora.rank, lora.runs, scratch)
        if not native.fits(hidden[0], *angles):
            raise NotOfThisKind(f"{kind} turns other parts of its heads, or is given other forms")
        short = ShortLayer(layer, witness.call, native, lora.runs)
        got = short(hidden, **call)
    for a, b in zip((got[0], *witness.tensors), wanted_parts, strict=True):
        # Not "above": a NaN is above nothing.
        if a.shape != b.shape or not float((a - b).abs().max()) <= _TOLERANCE * float(b.abs().max()):
            raise NotOfThisKind(f"{kind} computes something else")
    return short
