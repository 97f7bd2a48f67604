"""Llama-like decoder layers, computed by the compiled kernels if rows are few.

A layer's parts are found by name, and a trial must show that the kernels and the layer's own `forward` agree.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from edged.engine.attention.base import AttentionCall
from edged.engine.attention.paged import attention_pass, current_pass
from edged.engine.kv.store import LayerHeads
from edged.engine.lora.linear import LoraLinear, LoraSlots
from edged.engine.model.inspection import AttentionSpy
from edged.engine.model.layer_parts import LayerParts, NotOfThisKind, some_adapter, without_lora
from edged.engine.model.packed_linear import PackedLinear
from edged.engine.model.served_model import ServedModel
from edged.engine.native.library import FEW_ROWS, CGroup, CLayer, LinearParts, group_of, kernels, readable, why_not

_TOLERANCE = 1e-5
"""Largest difference in the trial, relative to the largest number: in fp32 only the order of sums differs."""


class ShortLayer:
    """Replacement of a Llama-like layer's `forward`: norm, q/k/v, rotary positions, attention, o, norm, gate/up, SiLU,
    down, and two residuals. `long` is the layer's own `forward`, for calls that the kernels do not compute."""

    def __init__(
        self, layer: nn.Module, heads: LayerHeads, lora: LoraSlots, call: AttentionCall, scratch: torch.Tensor
    ) -> None:
        """Take over the weights of `layer`; all layers of a model share `scratch`, float32, which grows as they need.

        Raises NotOfThisKind where a part is missing, in another form than plain fp32, or of another size.
        """
        parts = LayerParts.of(layer)
        self.long, self._call, self._lora, self._scratch = layer.forward, call, lora, scratch
        self._kept: list[torch.Tensor | LinearParts] = []
        norms = [_norm(norm) for norm in parts.norms]
        self._norms = [weight for weight, _ in norms]
        self._layer = CLayer(
            qkv=self._group(parts.qkv),
            o=self._group([parts.o]),
            gate_up=self._group(parts.gate_up),
            down=self._group([parts.down]),
            norms=tuple(weight.data_ptr() for weight, _ in norms),
            eps=tuple(eps for _, eps in norms),
            hidden=norms[0][0].numel(),
            heads=heads.heads,
            head_dim=heads.head_dim,
        )
        wide = [self._layer.qkv.linears[index].out for index in range(3)]
        self._layer.kv_heads = wide[1] // heads.head_dim
        self._check(wide)
        self._heads = [heads.heads, self._layer.kv_heads, self._layer.kv_heads]

    def __call__(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Compute what the layer's own `forward` computes, from the same arguments."""
        few, runs = hidden_states.shape[1] <= FEW_ROWS and not torch.is_grad_enabled(), self._lora.runs
        # The kernels add low-rank updates, and know no factors (IA3, DoRA).
        if not few or runs.training or runs.factor_rows is not None or args or kwargs.get("attention_mask") is not None:
            return self.long(hidden_states, *args, **kwargs)
        return self.short(hidden_states[0], *kwargs["position_embeddings"])[None]

    def short(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Compute [rows, hidden] -> [rows, hidden]; `cos` and `sin` [1, rows, head_dim] are of the rows' positions."""
        library, layer, rows = kernels(), ctypes.byref(self._layer), len(x)
        assert library is not None
        slots = self._lora.runs.slots_of(rows)
        own = None if slots is None else slots.data_ptr()
        threads = torch.get_num_threads()
        floats = library.edged_scratch(layer, rows, threads)
        if len(self._scratch) < floats:
            self._scratch.resize_(floats)
        scratch = self._scratch.data_ptr()
        qkv = x.new_empty(sum(self._heads), rows, self._layer.head_dim)
        source, result = x.data_ptr(), torch.empty_like(x)
        library.edged_before_attention(
            layer, source, rows, own, cos.data_ptr(), sin.data_ptr(), qkv.data_ptr(), scratch, threads
        )
        attended = current_pass().attend(self._call, *qkv.split(self._heads)).contiguous()
        library.edged_after_attention(
            layer, source, attended.data_ptr(), rows, own, result.data_ptr(), scratch, threads
        )
        return result

    def fits(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
        """Whether the kernels can read these as a layer's input and angles; the form is the same for all rows."""
        angles = (1, len(x), self._layer.head_dim)
        return readable(x, cos, sin) and x.shape[1] == self._layer.hidden and cos.shape == sin.shape == angles

    def _group(self, linears: Sequence[nn.Module]) -> CGroup:
        parts = [_plain(linear) for linear in linears]
        if len({its.weight.shape[1] for its in parts}) > 1:
            raise NotOfThisKind("linears of one input have inputs of different sizes")
        self._kept += parts
        group = group_of(parts)
        group.rank = self._lora.rank
        for place, linear in zip(group.linears, linears, strict=False):
            if isinstance(linear, LoraLinear):
                place.read_slots(linear.down, linear.up)
                self._kept += [linear.down, linear.up]
        return group

    def _check(self, wide: Sequence[int]) -> None:
        layer = self._layer
        query = layer.heads * layer.head_dim
        same = (
            (self._norms[0].numel(), self._norms[1].numel()),
            (layer.qkv.input, layer.hidden),
            (wide[0], query),
            (wide[1], wide[2]),
            (layer.o.input, query),
            (layer.o.linears[0].out, layer.hidden),
            (layer.gate_up.input, layer.hidden),
            (layer.gate_up.linears[0].out, layer.gate_up.linears[1].out),
            (layer.down.input, layer.gate_up.linears[0].out),
            (layer.down.linears[0].out, layer.hidden),
        )
        if any(a != b for a, b in same) or wide[1] % layer.head_dim or layer.heads % layer.kv_heads:
            raise NotOfThisKind("its parts' sizes do not belong together")


def _plain(linear: nn.Module) -> LinearParts:
    """Return the tensors of a linear inside its wrappers. Raises NotOfThisKind if it is not a plain float32 linear."""
    linear = without_lora(linear)
    plain = linear.base if isinstance(linear, PackedLinear) else linear
    if type(plain) is not nn.Linear or not readable(plain.weight, plain.bias):
        raise NotOfThisKind(f"{type(plain).__name__} is no plain linear in float32")
    return linear.parts if isinstance(linear, PackedLinear) else LinearParts.of(plain)


def _norm(norm: nn.Module) -> tuple[torch.Tensor, float]:
    """Return weight and epsilon of an RMS norm. Raises NotOfThisKind."""
    weight, eps = getattr(norm, "weight", None), getattr(norm, "variance_epsilon", None)
    if not isinstance(weight, torch.Tensor) or not readable(weight) or not isinstance(eps, float):
        raise NotOfThisKind(f"{type(norm).__name__} is not an RMS norm with a variance_epsilon")
    return weight.detach(), eps


def shorten_layers(model: ServedModel) -> str:
    """Let the kernels compute all layers for few rows; return why not, or "". Call it after `attach_lora`."""
    # Layers that cannot be trained may be called in a way that a trial of one alone does not know.
    if reason := why_not(model.device, model.dtype) or model.trainable_error:
        return reason
    if model.states or model.shape.reads_kv:
        return "not every layer attends to keys and values of its own"
    ids = torch.tensor([1, 2, 3], device=model.device) % model.shape.vocab_size
    positions = torch.tensor([0, 1, model.shape.max_positions - 1], device=model.device)
    scratch = torch.empty(0, dtype=torch.float32)
    with torch.inference_mode():
        hidden, calls = model.layer_calls(ids, positions)
        try:
            found = [
                _tried(model, layer, hidden[None], call, scratch)
                for layer, call in zip(model.layers, calls, strict=True)
            ]
        except NotOfThisKind as error:
            return str(error)
    for layer, short in zip(model.layers, found, strict=True):
        layer.forward = short
    return ""


def _tried(
    model: ServedModel, layer: nn.Module, hidden: torch.Tensor, call: dict[str, Any], scratch: torch.Tensor
) -> ShortLayer:
    """Return the `ShortLayer` of `layer` if both agree on `hidden` [1, rows, hidden], whose last two rows have an
    adapter. Raises NotOfThisKind."""
    kind, spy = type(layer).__name__, AttentionSpy()
    with attention_pass(spy), some_adapter(layer), model.lora.packed([(1, hidden.shape[1], 0)]):
        wanted, angles = layer(hidden, **call), call.get("position_embeddings")
        if not isinstance(wanted, torch.Tensor) or angles is None:
            raise NotOfThisKind(f"{kind} is called in another way")
        own = spy.seen[0][0]
        heads = model.shape.layer_heads[own.layer]
        assert heads is not None
        short = ShortLayer(layer, heads, model.lora, own, scratch)
        if not short.fits(hidden[0], *angles):
            raise NotOfThisKind(f"{kind} turns other parts of its heads, or is given other forms")
        got = short(hidden, **call)
    for a, b in zip((got, *spy.seen[1][1:]), (wanted, *spy.seen[0][1:]), strict=True):
        # Not "above": a NaN is above nothing.
        if a.shape != b.shape or not float((a - b).abs().max()) <= _TOLERANCE * float(b.abs().max()):
            raise NotOfThisKind(f"{kind} computes something else")
    return short
