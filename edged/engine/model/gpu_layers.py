"""Llama-like decoder layers that decodes pass with few launches on a GPU: merged products, and Triton kernels between.

A layer has 11 launches, with LoRA 15: norm; q/k/v; rotation and K/V; attention (2); o; residual and norm; gate/up;
activation; down; residual. A trial must show that the layer's own `forward` computes the same; others are left alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from edged.engine.attention.base import AttentionCall
from edged.engine.attention.packed_batch import Segment, pack
from edged.engine.attention.paged import (
    DecodePath,
    PagedAttention,
    attention_over,
    attention_pass,
    pass_under_way,
)
from edged.engine.kv.store import KvStore, LayerHeads
from edged.engine.lora import triton as triton_lora
from edged.engine.lora.linear import LoraLinear, LoraSlots
from edged.engine.lora.segments import NO_SLOT
from edged.engine.model import triton
from edged.engine.model.inspection import AttentionSpy
from edged.engine.model.layer_parts import LayerParts, NotOfThisKind, some_adapter, without_lora
from edged.engine.model.quantization import is_quantized
from edged.engine.model.served_model import ServedModel
from edged.runtime import logs

_ROUNDINGS = 4
"""Largest difference in the trial, in roundings of the largest change that the layer makes."""
_LEAST_TOLERANCE = 1e-5
"""The same as a share, where sums of another order differ by more than roundings (float32)."""


class MergedLinears:
    """Linears of one input as one product; their weights become views of the one that is multiplied."""

    def __init__(self, linears: Sequence[nn.Module], dtype: torch.dtype) -> None:
        """Take linears, which may have LoRA slots. Raises NotOfThisKind if one is no plain frozen linear in `dtype`."""
        own = [without_lora(linear) for linear in linears]
        plain = [each for each in own if type(each) is nn.Linear and not is_quantized(each)]
        if len(plain) < len(own) or any(each.weight.dtype != dtype or each.weight.requires_grad for each in plain):
            kinds = ", ".join(sorted({type(each).__name__ for each in own}))
            raise NotOfThisKind(f"its linears ({kinds}) are not plain and frozen, in {dtype}")
        self._linears = plain
        if len({each.in_features for each in self._linears}) > 1:
            raise NotOfThisKind("linears of one input have inputs of different sizes")
        self.sizes = [each.out_features for each in self._linears]
        self.weight, self._bias = self._linears[0].weight, self._linears[0].bias
        self._slots = [linear if isinstance(linear, LoraLinear) else None for linear in linears]

    def merge(self) -> None:
        """Let the linears share one tensor, once it is known that the layer is of the kind."""
        if len(self._linears) == 1:
            return
        weight = torch.cat(tuple(each.weight for each in self._linears))
        for each, part in zip(self._linears, weight.split(self.sizes), strict=True):
            each.weight = nn.Parameter(part, requires_grad=False)
        self.weight = nn.Parameter(weight, requires_grad=False)
        if any(each.bias is not None for each in self._linears):
            none = weight.new_zeros(max(self.sizes))
            biases = (none[: each.out_features] if each.bias is None else each.bias for each in self._linears)
            self._bias = nn.Parameter(torch.cat(tuple(biases)), requires_grad=False)

    def __call__(self, x: torch.Tensor, lora: LoraSlots) -> tuple[torch.Tensor, triton.Updates | None]:
        """Return the products [rows, all outputs] of `x` [rows, in], and the updates that are to be added to them."""
        y, tiles = F.linear(x, self.weight, self._bias), lora.runs.tiles
        adapted = [linear for linear in self._slots if linear is not None]
        if tiles is None or not adapted:
            return y, None
        # A linear without slots shares another's, which no kernel adds for it.
        filled = [adapted[0] if linear is None else linear for linear in self._slots]
        low = triton_lora.shrink(x, [linear.down for linear in filled], tiles)
        bits = sum(1 << number for number, linear in enumerate(self._slots) if linear is not None)
        return y, triton.Updates(low, [linear.up for linear in filled], bits, tiles)


class FusedLayer:
    """Replacement of a Llama-like layer's `forward`. `long` is the layer's own, for all that is no batch of decodes."""

    def __init__(
        self, layer: nn.Module, heads: LayerHeads, lora: LoraSlots, call: AttentionCall, dtype: torch.dtype
    ) -> None:
        """Take over the weights of `layer`, in `dtype`. Raises NotOfThisKind if a part is missing or another."""
        parts = LayerParts.of(layer)
        self.long, self.call, self._lora = layer.forward, call, lora
        groups = (parts.qkv, [parts.o], parts.gate_up, [parts.down])
        self._qkv, self._o, self._gate_up, self._down = (MergedLinears(group, dtype) for group in groups)
        self._norms = [_norm_of(norm, dtype) for norm in parts.norms]
        self._post_norms = [None if norm is None else _norm_of(norm, dtype) for norm in parts.post_norms]
        head_norms = [_norm_of(norm, dtype) for norm in parts.head_norms if norm is not None]
        self._head_norms = (head_norms[0], head_norms[1]) if len(head_norms) == 2 else None
        self._activation = _activation_of(parts.activation, self._o.weight.device)
        self._check(heads, len(head_norms))
        for linears in (self._qkv, self._gate_up):
            linears.merge()

    def _check(self, heads: LayerHeads, head_norms: int) -> None:
        size, kv = heads.head_dim, heads.kv_heads * heads.head_dim
        hidden = self._qkv.weight.shape[1]
        norms = [*self._norms, *(norm for norm in self._post_norms if norm is not None)]
        together = (
            self._qkv.sizes == [heads.heads * size, kv, kv]
            and self._o.sizes == self._down.sizes == [hidden]
            and len(set(self._gate_up.sizes)) == 1
            and all(norm.factors.numel() == hidden for norm in norms)
            and all(norm.factors.numel() == size for norm in self._head_norms or ())
        )
        if not together or size % 2 or head_norms % 2 or heads.source != self.call.layer or hidden > triton.MAX_HIDDEN:
            raise NotOfThisKind("its parts' sizes do not belong together, or are too large")

    def __call__(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Compute what the layer's own `forward` computes, from the same arguments."""
        backend, runs = pass_under_way(), self._lora.runs
        asked = not args and kwargs.get("attention_mask") is None and not torch.is_grad_enabled()
        # The kernels add low-rank updates by tiles, and know no factors (IA3, DoRA).
        apart = runs.few or runs.single or runs.together is not None or runs.factor_rows is not None
        asked = asked and not apart and not runs.training and hidden_states.shape[1] <= triton.MAX_ROWS
        if asked and isinstance(backend, PagedAttention) and backend.decodes_in_place:
            return self.fused(hidden_states[0], kwargs["position_embeddings"], backend)[None]
        return self.long(hidden_states, *args, **kwargs)

    def fused(
        self, x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor], attention: PagedAttention
    ) -> torch.Tensor:
        """Compute [rows, hidden] -> [rows, hidden] for decodes; cosine and sine [1, rows, head_dim] are of the rows'
        positions."""
        batch, lora = attention.batch, self._lora
        _, normed = triton.add_and_norm(x, pre=self._norms[0])
        qkv, updates = self._qkv(normed, lora)
        at = attention.kv, self.call.layer, batch.pages, batch.offsets
        query = triton.rotate_and_store(qkv, angles, self._head_norms, *at, updates)
        attended = attention.decode(self.call, query).flatten(1)
        out, updates = self._o(attended, lora)
        x, normed = triton.add_and_norm(out, x, self._post_norms[0], self._norms[1], updates)
        gate_up, updates = self._gate_up(normed, lora)
        active = triton.activate(gate_up, self._activation, updates)
        out, updates = self._down(active, lora)
        return triton.add_and_norm(out, x, self._post_norms[1], updates=updates)[0]


def _norm_of(norm: nn.Module, dtype: torch.dtype) -> triton.RmsNorm:
    """Return the factors of an RMS norm, which are its weight, or 1 and its weight. Raises NotOfThisKind."""
    weight: Any = getattr(norm, "weight", None)
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if isinstance(weight, torch.Tensor) and isinstance(eps, float):
        x = torch.linspace(-3.0, 3.0, 2 * weight.numel(), device=weight.device).sin().view(2, -1).to(dtype)
        wanted, factors = norm(x), weight.detach().float()
        ways = {F.rms_norm(x.float(), weight.shape, each, eps): each for each in (factors, 1.0 + factors)}
        nearest = min(ways, key=lambda got: float((got - wanted).abs().sum()))
        if _agree(nearest, wanted, wanted):
            return triton.RmsNorm(ways[nearest], eps)
    raise NotOfThisKind(f"{type(norm).__name__} is no RMS norm with a weight and an epsilon")


def _activation_of(activation: nn.Module | None, device: torch.device) -> str:
    """Return the name of an activation in `triton.ACTIVATIONS`. Raises NotOfThisKind."""
    # In float32: rounded to 16 bits, some differ by little.
    x = torch.linspace(-6.0, 6.0, 97, device=device)
    for name, own in triton.ACTIVATIONS.items():
        if activation is not None and _agree(own(x), activation(x), x):
            return name
    raise NotOfThisKind(f"{type(activation).__name__} is none of {', '.join(triton.ACTIVATIONS)}")


def _agree(got: torch.Tensor, wanted: torch.Tensor, size: torch.Tensor) -> bool:
    """Whether two results differ by a few roundings of the largest number of `size`, and by one or two of their own."""
    eps, got, wanted = torch.finfo(wanted.dtype).eps, got.float(), wanted.float()
    bound = max(_ROUNDINGS * eps, _LEAST_TOLERANCE) * float(size.abs().max()) + 2 * eps * float(wanted.abs().max())
    # Not "above": a NaN is above nothing.
    return got.shape == wanted.shape and float((got - wanted).abs().max()) <= bound


# -- the trial ---------------------------------------------------------------------------------------------------------


def fuse_layers(model: ServedModel, page_size: int) -> str:
    """Let decodes pass layers with few launches; return why a layer is left alone, or "".

    Call it after `attach_lora`, and once the implementation of LoRA updates is chosen. The trial runs over pages of
    `page_size` rows.
    """
    if model.states:
        return "not every layer attends"
    if model.trainable_error:
        # Its layers may be called in a way that a trial of one alone does not know.
        return model.trainable_error
    ids = torch.tensor([1, 2, 3], device=model.device) % model.shape.vocab_size
    positions = torch.tensor([0, 1, model.shape.max_positions - 1], device=model.device)
    reason, fused = "", list[tuple[nn.Module, FusedLayer]]()
    try:
        hidden, calls = model.layer_calls(ids, positions)
        kv = model.new_kv(5, page_size)
        if not isinstance(kv, KvStore):
            return "layers have heads of unlike shapes"
        for layer, call in zip(model.layers, calls, strict=True):
            try:
                fused.append((layer, _tried(model, layer, hidden[None], call, kv)))
            except NotOfThisKind as error:
                reason = reason or str(error)
    except Exception as error:
        # Triton, its compiler and the device raise what they like.
        return f"its kernels do not run here: {logs.first_line(error)}"
    for layer, short in fused:
        layer.forward = short
    return reason


def _tried(model: ServedModel, layer: nn.Module, hidden: torch.Tensor, call: dict[str, Any], kv: KvStore) -> FusedLayer:
    """Return the `FusedLayer` of `layer` if both agree on `hidden` [1, 3, hidden], with adapters and without.

    Raises NotOfThisKind.
    """
    kind, spy = type(layer).__name__, AttentionSpy()
    with torch.inference_mode(), attention_pass(spy):
        out, angles = layer(hidden, **call), call.get("position_embeddings")
    if not isinstance(out, torch.Tensor) or not isinstance(angles, tuple) or len(spy.seen) != 1:
        raise NotOfThisKind(f"{kind} is called in another way")
    own = spy.seen[0][0]
    heads = model.shape.layer_heads[own.layer]
    assert heads is not None
    if any(each.shape != (1, hidden.shape[1], heads.head_dim) for each in angles):
        raise NotOfThisKind(f"{kind} turns other parts of its heads")
    # Not in inference mode: units read the weights that are merged here.
    fused = FusedLayer(layer, heads, model.lora, own, model.dtype)
    adapters = [NO_SLOT, 0] if model.lora.runs.kernel == "triton" and model.lora.linears else [NO_SLOT]
    with torch.inference_mode(), some_adapter(layer):
        agreed = [_same(model, layer, fused, hidden, call, kv, slot) for slot in adapters]
    if not all(agreed):
        raise NotOfThisKind(f"{kind} computes something else")
    return fused


def _same(
    model: ServedModel, layer: nn.Module, fused: FusedLayer, hidden: torch.Tensor, call: Any, kv: KvStore, slot: int
) -> bool:
    """Whether both ways change three decodes' hidden states alike, of which two have the adapter of `slot`, and store
    the same keys and values."""
    contexts, slots = (0, 1, kv.page_size), (NO_SLOT, slot, slot)
    pages = [np.array(own) for own in ([1], [2], [3, 4])]
    decodes = [Segment([0], *each) for each in zip(contexts, pages, slots, strict=True)]
    batch = pack(decodes, kv, model.device, lora=slot != NO_SLOT)
    rows, results = kv.row_index(batch.pages, batch.offsets), []
    paths: tuple[tuple[Any, DecodePath], ...] = ((layer, "padded"), (fused, "triton"))
    for way, path in paths:
        with attention_pass(attention_over(batch, kv, path)), model.lora.packed(batch.runs, batch.lora_tiles):
            out = way(hidden, **call)
        results.append([out, *(part[rows] for part in kv.rows(fused.call.layer))])
    wanted, got = results
    changes = [wanted[0] - hidden, *wanted[1:]]
    return all(_agree(*each) for each in zip(got, wanted, changes, strict=True))
