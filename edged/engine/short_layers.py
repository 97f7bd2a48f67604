"""Decoder layers of the commonest kind, computed for few rows in half of the operations.

Owns the second way through a layer, and the trial that decides whether a model may take it. Must not know what is
attended or which adapters there are. With few rows the processor's caches are full of weights whenever a small
operation begins: each costs its start from memory, whatever its size, and a layer of transformers' has about 65.

The layer is Llama's: norm, q/k/v, rotary positions, attention, o, norm, gate/up, activation, down, and two residuals.
What a layer is is not read from its class: its parts are found by name, and both ways must agree on the same rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from edged import logs
from edged.engine.attention import attention_pass, current_pass
from edged.engine.linear import PackedLinear
from edged.engine.lora import LoraLinear, updates_of
from edged.engine.lora_updates import LoraRuns
from edged.engine.model import ServedModel

_MOST_ROWS = 16
_TOLERANCE = 1e-5
"""Of the largest number, in the trial: both ways do the same in fp32, but for the order of a few sums."""


class _NotOfThisKind(ValueError):
    """A layer is not what this module computes."""


class _Together:
    """Linears of one input as one product, with the adapters' updates of each."""

    def __init__(self, parent: nn.Module, names: Sequence[str]) -> None:
        linears = [getattr(parent, name, None) for name in names]
        bases = [linear.base if isinstance(linear, LoraLinear) else linear for linear in linears]
        packed = [base for base in bases if isinstance(base, PackedLinear)]
        if len(packed) < len(names):
            raise _NotOfThisKind(f"{type(parent).__name__} has no packed {', '.join(names)}")
        self._product = packed[0].product
        if any(linear.product is not self._product for linear in packed) or len(self._product.sizes) != len(names):
            raise _NotOfThisKind(f"{', '.join(names)} of {type(parent).__name__} are not one product")
        self._updates = updates_of(linears)

    def whole(self, x: torch.Tensor, runs: LoraRuns) -> torch.Tensor:
        """[rows, in] -> [rows, the outputs one after the other]"""
        out = self._product.whole(x)
        if runs.single or runs.together is not None:
            parts = out.split(self._product.sizes, -1)
            for indices, updates in self._updates:
                updates.add(x, [parts[index] for index in indices])
        return out

    def parts(self, x: torch.Tensor, runs: LoraRuns) -> tuple[torch.Tensor, ...]:
        """As `whole`, by linear."""
        return self.whole(x, runs).split(self._product.sizes, -1)


class _Turns:
    """Cosines and signed sines of an iteration's positions, made for its first layer."""

    def __init__(self) -> None:
        self._cos: torch.Tensor | None = None
        self._made: tuple[torch.Tensor, torch.Tensor]

    def of(self, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """From the model's, [1, rows, d]: both [rows, 1, 2, d / 2], the first half of the sines negated."""
        if cos is not self._cos:
            signed = sin.view(-1, 1, 2, sin.shape[-1] // 2).clone()
            signed[:, :, 0].neg_()
            self._cos, self._made = cos, (cos.view(signed.shape), signed)
        return self._made


@dataclass(slots=True)
class _Call:
    """What a layer hands to attention beside query, key and value."""

    layer: int
    scaling: float
    window: int | None
    softcap: float | None


class _ShortLayer:
    """Stands for a layer's `forward`; `long` is the layer's own, for all that this does not compute."""

    def __init__(self, layer: nn.Module, call: _Call, head_dim: int, heads: int, turns: _Turns, runs: LoraRuns) -> None:
        attention, mlp = _child(layer, "self_attn"), _child(layer, "mlp")
        self.long = layer.forward
        self._call, self._turns, self._runs = call, turns, runs
        self._qkv, self._o = _Together(attention, ("q_proj", "k_proj", "v_proj")), _Together(attention, ("o_proj",))
        self._gate_up, self._down = _Together(mlp, ("gate_proj", "up_proj")), _Together(mlp, ("down_proj",))
        self._act = _child(mlp, "act_fn")
        self._norms = [_norm(_child(layer, name)) for name in ("input_layernorm", "post_attention_layernorm")]
        self._head_dim, self._heads = head_dim, heads

    def __call__(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """As the layer's own `forward`, whose keyword arguments the model gives."""
        few = hidden_states.shape[1] <= _MOST_ROWS and not torch.is_grad_enabled() and not self._runs.training
        if not few or args or kwargs.get("attention_mask") is not None:
            return self.long(hidden_states, *args, **kwargs)
        return self.short(hidden_states[0], *kwargs["position_embeddings"])[None]

    def short(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] -> [rows, hidden]; `cos` and `sin` [1, rows, head_dim] of the rows' positions."""
        runs = self._runs
        (first, first_eps), (second, second_eps) = self._norms
        attended = self._attend(torch.rms_norm(x, first.shape, first, first_eps), cos, sin)
        middle = self._o.whole(attended, runs).add_(x)
        normed = torch.rms_norm(middle, second.shape, second, second_eps)
        gate, up = self._gate_up.parts(normed, runs)
        return self._down.whole(self._act(gate).mul_(up), runs).add_(middle)

    def _attend(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] -> [rows, heads * head_dim]. Queries and keys lie side by side and are turned at once."""
        cos, sin = self._turns.of(cos, sin)
        rows, d, call = len(x), self._head_dim, self._call
        heads = self._qkv.whole(x, self._runs).view(rows, -1, 2, d // 2)
        keys = heads.shape[1] - (heads.shape[1] - self._heads) // 2
        plain = heads[:, :keys]
        # rotate_half by a flip; its minus is in the sines.
        turned = (plain * cos).addcmul_(plain.flip(2), sin).view(rows, keys, d).transpose(0, 1)
        values = heads[:, keys:].reshape(rows, -1, d).transpose(0, 1)
        query, key = turned[: self._heads], turned[self._heads :]
        out = current_pass().attend(call.layer, query, key, values, call.scaling, call.window, call.softcap)
        return out.reshape(rows, -1)


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
    """Let few rows pass all layers the short way; why not, or "". To be called after `pack_weights`."""
    assert model.lora is not None
    ids = torch.tensor([[1, 2, 3]], device=model.device) % model.shape.vocab_size
    positions = torch.tensor([[0, 1, model.shape.max_positions - 1]], device=model.device)
    turns, found = _Turns(), []
    with torch.inference_mode():
        hidden, calls = model.layer_calls(ids, positions)
        for layer, call in zip(model.layers, calls, strict=True):
            try:
                found.append(_tried(model, layer, hidden[None], call, turns))
            except _NotOfThisKind as error:
                return str(error)
    for layer, short in zip(model.layers, found, strict=True):
        layer.forward = short
    return ""


def _tried(
    model: ServedModel, layer: nn.Module, hidden: torch.Tensor, call: dict[str, Any], turns: _Turns
) -> _ShortLayer:
    """`layer` the short way, if both ways agree on `hidden` [1, rows, hidden]. Raises _NotOfThisKind."""
    assert model.lora is not None
    witness = _Witness()
    with attention_pass(witness):
        wanted = layer(hidden, **call)
    if not isinstance(wanted, torch.Tensor) or call.get("position_embeddings") is None:
        raise _NotOfThisKind(f"{type(layer).__name__} is called in another way")
    wanted_parts = (wanted[0], *witness.tensors)
    short = _ShortLayer(layer, witness.call, model.shape.head_dim, model.shape.heads, turns, model.lora.runs)
    try:
        with attention_pass(witness):
            got = short(hidden, **call)
    except (RuntimeError, TypeError, ValueError) as error:
        raise _NotOfThisKind(f"{type(layer).__name__} has other shapes: {logs.first_line(error)}") from None
    for a, b in zip((got[0], *witness.tensors), wanted_parts, strict=True):
        # Not "above": a NaN is above nothing.
        if a.shape != b.shape or not float((a - b).abs().max()) <= _TOLERANCE * float(b.abs().max()):
            raise _NotOfThisKind(f"{type(layer).__name__} computes something else")
    return short


def _child(parent: nn.Module, name: str) -> nn.Module:
    child = getattr(parent, name, None)
    if not isinstance(child, nn.Module):
        raise _NotOfThisKind(f"{type(parent).__name__} has no {name}")
    return child


def _norm(norm: nn.Module) -> tuple[torch.Tensor, float]:
    """Weight and epsilon of an RMS norm."""
    weight, eps = getattr(norm, "weight", None), getattr(norm, "variance_epsilon", None)
    if not isinstance(weight, torch.Tensor) or not isinstance(eps, float):
        raise _NotOfThisKind(f"{type(norm).__name__} is not an RMS norm with a variance_epsilon")
    return weight.detach(), eps
