"""The kernels that compute a model's layers: edged's own where they fit, or torch's alone."""

import os
from collections.abc import Mapping
from typing import Literal

from pydantic import ValidationError

from edged.settings.access import Section, setting
from edged.settings.load import ConfigError, ModelSettings
from edged.settings.wrong import demand


class Kernels(Section):
    """The ways that layers are computed. `EDGED_KERNELS` changes single ones, for comparisons: "pack_weights=off"."""

    pack_weights: bool = setting(True, "CPU, float32: a packed copy of the weights, for prompts and larger batches")
    cpu_kernels: bool = setting(True, "CPU, float32: few tokens pass products, layers and states by compiled kernels")
    fp16_weights: bool = setting(
        True, "CPU, float32: few tokens read weights that are 16-bit numbers from a copy of half the size; same results"
    )
    decode_attention: Literal["auto", "padded", "ragged", "native", "triton"] = setting(
        "auto", "native, ragged (CPU) and triton (CUDA) read K/V in place; padded copies it"
    )
    prefill_attention: Literal["auto", "gathered", "triton"] = setting(
        "auto", "triton (CUDA) reads the K/V before a chunk in place; gathered copies it"
    )
    lora_kernel: Literal["auto", "torch", "native", "triton"] = setting(
        "auto", "native (CPU, float32; beside cpu_kernels) and triton (CUDA) add all adapters' updates at once"
    )
    fused_layers: bool = setting(
        True, "CUDA: decodes pass common layers and states with few launches, by merged products and Triton's kernels"
    )


_TORCH = {
    **dict.fromkeys(("pack_weights", "cpu_kernels", "fp16_weights", "fused_layers"), False),
    **{"decode_attention": "padded", "prefill_attention": "gathered", "lora_kernel": "torch"},
}


def kernels_of(model: ModelSettings, environ: Mapping[str, str] = os.environ) -> Kernels:
    """Return the kernels by the setting `model.kernels`, and by `EDGED_KERNELS`. Raises ConfigError."""
    named = [each.partition("=")[::2] for each in environ.get("EDGED_KERNELS", "").split(",") if each]
    try:
        return Kernels.model_validate((_TORCH if model.kernels == "torch" else {}) | dict(named))
    except ValidationError as error:
        wrong = [f"{item['loc'][0]} = {item['input']!r}: {demand(item)}" for item in error.errors()]
        raise ConfigError("EDGED_KERNELS: " + "; ".join(wrong)) from None
