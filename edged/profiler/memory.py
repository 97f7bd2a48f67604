"""The memory plan of a model on a device: what the engine's own arithmetic gives before anything is loaded.

`edged.engine.model.memory_model` computes the sizes.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from edged.engine.attention.paged import IMPLEMENTATION
from edged.engine.model.loading import ModelRefused, pick_dtype, read_config, refusal_of
from edged.engine.model.memory_model import BaseShape, beside_states, kept_bytes, kept_kinds, needs
from edged.engine.model.packed_experts import demand_packed
from edged.engine.model.quantization import (
    MADE_BY,
    CannotQuantize,
    WeightForm,
    dequantizes,
    form_of_checkpoint,
    form_of_setting,
    method_of,
    packed_form,
)
from edged.settings.load import Settings

SYSTEM_BYTES = {"cpu": 1 << 30, "cuda": 5 << 29}
"""Bytes kept for the operating system, Python and its libraries, and the CUDA context: an assumption, not computed."""


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """A model's sizes, in the form in which the device holds it."""

    name: str
    path: str
    architecture: str
    shape: BaseShape
    form: WeightForm
    dtype: torch.dtype
    quantization: str

    @classmethod
    def read(cls, path: Path, settings: Settings, cuda: bool) -> ModelSizes:
        """Read a model's sizes from a directory or a config.json, or its plain checkpoint's from a GGUF file.

        Raises ModelRefused.
        """
        config, _ = read_config(str(path), trust_remote_code=False)
        try:
            shape = BaseShape.of_config(config, settings.align.target_modules)
        except ModelRefused:
            raise
        except Exception as error:
            raise refusal_of(error, str(path), IMPLEMENTATION) from error
        dtype = pick_dtype(settings.model.dtype, torch.device("cuda" if cuda else "cpu"))
        stored, kind = method_of(config), settings.model.quantize
        if stored and kind in MADE_BY and dequantizes(stored):
            stored = None
        method = str(stored.get("quant_method")) if stored else kind
        try:
            # A profile of a quantized checkpoint names the method itself.
            if stored and kind not in ("", method):
                raise CannotQuantize(f"it is already quantized ({method}): leave --quantize out")
            form = form_of_checkpoint(stored, dtype, cuda) if stored else form_of_setting(kind, dtype, cuda)
            if method and not (stored and packed_form(stored) is None):
                banks = demand_packed(config, "" if stored else kind, method if stored else "", dtype)[1]
                shape = replace(shape, banks=tuple(banks.values()))
        except CannotQuantize as error:
            raise ModelRefused(f'model "{path}": {error}') from None
        return cls(
            name=path.stem if path.is_file() else path.name,
            path=str(path),
            architecture=str((config.architectures or [config.model_type])[0]),
            shape=shape,
            form=form,
            dtype=dtype,
            quantization=method,
        )

    @property
    def linear_weights(self) -> int:
        """Weights of the decoder's linears, in all layers."""
        return sum(fan_in * fan_out for fan_in, fan_out in self.shape.linears)

    @property
    def linear_bytes(self) -> int:
        """Bytes of the decoder's linears, in all layers."""
        return sum(self.form.bytes_of(*linear) for linear in self.shape.linears)

    @property
    def dtype_name(self) -> str:
        """The dtype's name without "torch."."""
        return str(self.dtype).removeprefix("torch.")

    def report(self, device: str, context: int) -> dict[str, Any]:
        """Return the model's part of a status report."""
        return {
            "name": self.name,
            "path": self.path,
            "architecture": self.architecture,
            "parameters": self.shape.parameters,
            "weight_bytes": self.shape.bytes_in(self.form, self.dtype),
            "quantization": self.quantization,
            "dtype": self.dtype_name,
            "device": device,
            "max_context_tokens": context,
            "vocab_size": self.shape.vocab_size,
        }


def plan_memory(
    model: Path, settings: Settings, device: Literal["cpu", "cuda"], device_bytes: int, context: int
) -> dict[str, Any]:
    """Return the bytes by part of serving and training `model` (a directory, or a config.json) in `device_bytes`.

    `context` is how many tokens of K/V must fit. Raises ModelRefused.
    """
    cuda, system = device == "cuda", SYSTEM_BYTES[device]
    sizes = ModelSizes.read(model, settings, cuda)
    found = needs(sizes.shape, settings, sizes.form, sizes.dtype, cuda, device_bytes - system)
    parts = {"system": system, **asdict(found)}
    kv_per_token = parts.pop("kv_per_token")
    adapters = {name: parts.pop(name) for name in ("loaded_adapters", "active_adapters")}
    if budget := settings.cache.memory_mb << 20:
        page_bytes = settings.cache.page_size * kv_per_token
        beside_states(sizes.shape, settings, sizes.dtype, found.loaded_adapters, page_bytes, budget)
    room, wanted = device_bytes - system - found.total, context * kv_per_token
    for kind in (*kept_kinds(sizes.shape, settings.align.recompute, cuda)[1:], "full"):
        if room < wanted:
            # Without room for the kept graph, steps compute more of their layers twice.
            less = kept_bytes(sizes.shape, settings, sizes.dtype, kind)
            room, parts["kept_graph"] = room + parts["kept_graph"] - less, less
    return {
        "model": str(model),
        "architecture": sizes.architecture,
        "parameters": sizes.shape.parameters,
        "experts": bool(sizes.shape.experts),
        "quantization": sizes.quantization,
        "device": device,
        "dtype": sizes.dtype_name,
        "device_bytes": device_bytes,
        "parts": parts,
        "kv_bytes_per_1k_tokens": 1000 * kv_per_token,
        "adapter": {"rank": settings.align.rank, "linears": len(sizes.shape.targets), **adapters},
        "context_tokens": context,
        "context_bytes": wanted,
        "free_bytes": room,
        "kv_tokens": max(0, room) // kv_per_token,
        "fits": room >= wanted,
    }
