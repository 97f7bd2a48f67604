"""Forms of adapters: which linears an adapter changes, with which weights, and what PEFT calls that."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class AdapterForm:
    """An adapter's form. Its linears have their weights one after the other, each the same number of them."""

    scalings: Mapping[str, float]
    """LoRA's scaling factor of each linear that is adapted, in the order of the weights; 1 for IA3."""
    shapes: Mapping[str, tuple[int, ...]]
    """Shapes of the weights by PEFT's names: A [rank, in] and B [out, rank] of each linear, or the vector of IA3 that
    scales its inputs [1, in] or its outputs [out, 1]."""
    config: Mapping[str, Any]
    """The fields of PEFT's configuration that say so."""
    imported: bool = False
    """Whether it came with the adapter, and not from the settings."""

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


def peft_name(linear: str, part: str = "") -> str:
    """PEFT's name of a linear's matrix A or B, or, without a part, of its IA3 vector."""
    return f"base_model.model.{linear}." + (f"lora_{part}.weight" if part else "ia3_l")
