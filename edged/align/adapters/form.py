"""Forms of adapters: which linears an adapter changes, with which weights, and what PEFT calls that."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

LoraLeaves = Mapping[str, tuple[torch.Tensor, ...]]
"""Name of a linear that is adapted -> (A [rank, in], B [out, rank]), with DoRA's magnitude or factors of outputs [out]
between them, or its IA3 vector ([1, in] or [out, 1],)."""
RowNorms = Callable[[str, torch.Tensor, torch.Tensor, float], torch.Tensor]
"""A linear's name, A, B and s -> the norms [out] of the rows of W + sBA."""


@dataclass(frozen=True, slots=True)
class AdapterForm:
    """An adapter's form. Its linears have their weights one after the other, each the same number of them."""

    scalings: Mapping[str, float]
    """LoRA's scaling factor of each linear that is adapted, in the order of the weights; 1 for IA3."""
    shapes: Mapping[str, tuple[int, ...]]
    """Shapes of the weights by PEFT's names: of each linear A [rank, in], DoRA's magnitude [out] and B [out, rank], or
    the vector of IA3 that scales its inputs [1, in] or its outputs [out, 1]."""
    config: Mapping[str, Any]
    """The fields of PEFT's configuration that say so."""
    imported: bool = False
    """Whether it came with the adapter, and not from the settings."""

    @property
    def kind(self) -> str:
        """The name of such adapters: LoRA, DoRA or IA3."""
        if self.config["peft_type"] == "IA3":
            return "IA3"
        return "DoRA" if self.config.get("use_dora") else "LoRA"

    def by_linear(self, parts: Sequence[torch.Tensor]) -> dict[str, tuple[torch.Tensor, ...]]:
        """Return one tensor for each of `shapes`, in their order, by linear."""
        each = len(self.shapes) // len(self.scalings) if self.scalings else 1
        return dict(zip(self.scalings, zip(*[iter(parts)] * each, strict=True), strict=True))


@dataclass(frozen=True, slots=True)
class LoraSpec:
    """The LoRA configuration of one base model's adapters; `shapes` maps a linear to (in_features, out_features)."""

    shapes: Mapping[str, tuple[int, int]]
    rank: int
    alpha: float
    base_model: str
    fingerprint: str
    """Identifier of the base model's weights: adapters and reference log-probabilities of another base are not used."""
    peft_targets: tuple[str, ...]
    """`target_modules` as written to PEFT's config."""
    base_source: str = ""
    """The base model as PEFT finds it again, a directory or a hub name; "": its name here."""
    row_norms: RowNorms | None = None
    """The norms that DoRA needs; None where the base's weights cannot be read, as quantized ones."""
    dtype: torch.dtype = torch.float32
    """The slots' type."""
    wrapper: str = ""
    """What the checkpoint's own class calls the text decoder, "model.language_model."; "" where that is all of it."""

    def exported(self, linear: str) -> str:
        """Return what the checkpoint's own class calls a linear."""
        return self.wrapper + linear.partition(".")[2] if self.wrapper else linear

    @property
    def form(self) -> AdapterForm:
        """The form of adapters that begin here."""
        shapes: dict[str, tuple[int, ...]] = {}
        for name, (fan_in, fan_out) in self.shapes.items():
            shapes[peft_name(name, "A")], shapes[peft_name(name, "B")] = (self.rank, fan_in), (fan_out, self.rank)
        return AdapterForm(
            dict.fromkeys(self.shapes, self.alpha / self.rank),
            shapes,
            lora_config(self.rank, self.alpha, self.peft_targets),
        )


def lora_config(rank: float, alpha: float, targets: Sequence[str], **more: Any) -> dict[str, Any]:
    """Return the fields of a LoRA in PEFT's configuration; of `more` those that are set."""
    always = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "lora_dropout": 0.0, "bias": "none"}
    return {**always, "target_modules": list(targets), **{name: value for name, value in more.items() if value}}


_PEFT_NAMES = {"A": "lora_A.weight", "B": "lora_B.weight", "magnitude": "lora_magnitude_vector", "": "ia3_l"}


def peft_name(linear: str, part: str = "") -> str:
    """PEFT's name of a linear's matrix A or B, its magnitude, or, without a part, its IA3 vector."""
    return f"base_model.model.{linear}.{_PEFT_NAMES[part]}"


def measured(weights: LoraLeaves, scalings: Mapping[str, float], find: RowNorms | None) -> dict[str, torch.Tensor]:
    """Return the norms of the rows of W + sBA, of each linear with a magnitude."""
    return {
        name: find(name, own[0], own[2], scalings[name])
        for name, own in weights.items()
        if find is not None and len(own) == 3
    }


def served(weights: LoraLeaves, norms: Mapping[str, torch.Tensor]) -> LoraLeaves:
    """Return each linear's weights as slots and steps have them, but for LoRA's scaling.

    Of IA3 it is what the vector has over 1: near 1 the steps of 16 bits are coarse. Of DoRA, whose output but for the
    bias is g (Wx + sBAx) with g = magnitude / norm, it is A, what g has over 1, and gB.
    """
    found = dict(weights)
    for name, own in weights.items():
        if len(own) == 1:
            found[name] = (own[0] - 1.0,)
        elif len(own) == 3:
            factor = own[1] / norms[name]
            found[name] = own[0], factor - 1.0, own[2] * factor[:, None]
    return found


def master_gradients(gradients: LoraLeaves, weights: LoraLeaves, norms: Mapping[str, torch.Tensor]) -> LoraLeaves:
    """Return the gradients of an adapter's weights from those of `served`; the norms of DoRA are constants in it."""
    found = dict(gradients)
    for name, norm in norms.items():
        (_, magnitude, up), (down, factor, up_gradient) = weights[name], gradients[name]
        factor = factor + (up_gradient * up).sum(1)
        found[name] = down, factor / norm, up_gradient * (magnitude / norm)[:, None]
    return found
