"""The parts of a Llama-like decoder layer, found by their names in transformers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from edged.engine.lora.linear import LoraLinear


class NotOfThisKind(ValueError):
    """A layer is not of the kind that the kernels compute."""


@dataclass(frozen=True, slots=True)
class LayerParts:
    """Modules of a layer: norm, q/k/v, attention, o, norm, gate/up, activation, down, and two residuals."""

    norms: tuple[nn.Module, nn.Module]
    """The norms before attention and before the MLP."""
    post_norms: tuple[nn.Module | None, nn.Module | None]
    """The norms behind attention and MLP, before the residual is added (Gemma)."""
    head_norms: tuple[nn.Module | None, nn.Module | None]
    """The norms of each head of queries and keys (Qwen3, Gemma 3)."""
    qkv: tuple[nn.Module, ...]
    o: nn.Module
    gate_up: tuple[nn.Module, ...]
    down: nn.Module
    activation: nn.Module | None

    @classmethod
    def of(cls, layer: nn.Module) -> LayerParts:
        """Find the parts. Raises NotOfThisKind where one is missing."""
        attention, mlp = _child(layer, "self_attn"), _child(layer, "mlp")
        behind = hasattr(layer, "pre_feedforward_layernorm")
        names = ("input_layernorm", "pre_feedforward_layernorm" if behind else "post_attention_layernorm")
        post = ("post_attention_layernorm", "post_feedforward_layernorm")
        return cls(
            norms=(_child(layer, names[0]), _child(layer, names[1])),
            post_norms=(_child(layer, post[0]), _child(layer, post[1])) if behind else (None, None),
            head_norms=(getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)),
            qkv=tuple(_child(attention, name) for name in ("q_proj", "k_proj", "v_proj")),
            o=_child(attention, "o_proj"),
            gate_up=tuple(_child(mlp, name) for name in ("gate_proj", "up_proj")),
            down=_child(mlp, "down_proj"),
            activation=getattr(mlp, "act_fn", None),
        )


def _child(parent: nn.Module, name: str) -> nn.Module:
    found = getattr(parent, name, None)
    if not isinstance(found, nn.Module):
        raise NotOfThisKind(f"{type(parent).__name__} has no {name}")
    return found


def without_lora(linear: nn.Module) -> nn.Module:
    """Return the linear that LoRA wraps, or the module itself."""
    while isinstance(linear, LoraLinear):
        linear = linear.base
    return linear


@contextmanager
def some_adapter(layer: nn.Module) -> Iterator[None]:
    """Put random matrices into slot 0 of a layer's linears, and restore it afterwards."""
    adapted = [module for module in layer.modules() if isinstance(module, LoraLinear)]
    slots = [side[0] for linear in adapted for side in (linear.down, linear.up)]
    before = [slot.clone() for slot in slots]
    try:
        for number, slot in enumerate(slots):
            generator = torch.Generator(slot.device).manual_seed(number)
            slot.normal_(0.0, len(slot) ** -0.5, generator=generator)
        yield
    finally:
        for slot, own in zip(slots, before, strict=True):
            slot.copy_(own)
