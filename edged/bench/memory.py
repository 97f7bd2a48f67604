"""Whether a model fits a box: what the engine's own arithmetic says for a configuration, before anything is loaded.

`edged.engine.model.memory_model` computes them.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoConfig

from edged.engine.model.loading import ModelRefused, pick_dtype
from edged.engine.model.memory_model import BaseShape, needs
from edged.engine.model.quantization import CannotQuantize, form_of_checkpoint, form_of_setting, method_of
from edged.settings.load import Settings

SYSTEM_BYTES = {"cpu": 1 << 30, "cuda": 5 << 29}
"""Kept for the operating system, Python and its libraries, and the context of CUDA: taken to be so, not computed."""


def plan_memory(
    model: Path, settings: Settings, device: Literal["cpu", "cuda"], device_bytes: int, context: int
) -> dict[str, Any]:
    """Bytes by part of serving and training `model` (a directory, or a config.json) in `device_bytes`.

    `context` is how many tokens of K/V must fit. Raises ModelRefused.
    """
    try:
        config = AutoConfig.from_pretrained(str(model), trust_remote_code=False)
        shape = BaseShape.of_config(config, settings.align.target_modules)
    except ModelRefused:
        raise
    except Exception as error:
        raise ModelRefused(f'model "{model}" has no configuration that can be read: {error}') from error
    dtype = pick_dtype(settings.model.dtype, torch.device(device))
    stored, kind = method_of(config), settings.model.quantize
    try:
        if stored and kind:
            raise CannotQuantize(f"it is already quantized ({stored.get('quant_method')}): leave --quantize out")
        cuda = device == "cuda"
        form = form_of_checkpoint(stored, dtype, cuda) if stored else form_of_setting(kind, dtype, cuda)
    except CannotQuantize as error:
        raise ModelRefused(f'model "{model}": {error}') from None
    system = SYSTEM_BYTES[device]
    found = needs(shape, settings, form, dtype, cuda, device_bytes - system)
    parts = {"system": system, **asdict(found)}
    sizes = {name: parts.pop(name) for name in ("kv_per_token", "loaded_adapters", "active_adapters")}
    room, wanted = device_bytes - system - found.total, context * found.kv_per_token
    if room < wanted:
        # Steps compute their layers twice then.
        room, parts["kept_graph"] = room + found.kept_graph, 0
    return {
        "model": str(model),
        "parameters": shape.parameters,
        "quantization": str(stored.get("quant_method")) if stored else kind,
        "device": device,
        "dtype": str(dtype).removeprefix("torch."),
        "device_bytes": device_bytes,
        "parts": parts,
        "kv_bytes_per_1k_tokens": 1000 * sizes.pop("kv_per_token"),
        "adapter": {"rank": settings.align.rank, **sizes},
        "context_tokens": context,
        "context_bytes": wanted,
        "free_bytes": room,
        "kv_tokens": max(0, room) // found.kv_per_token,
        "fits": room >= wanted,
    }
