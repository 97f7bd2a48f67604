"""The import of PEFT adapters: safetensors files, checked against the served model before they are used.

Pickles are never opened: a file that is not safetensors is refused by its name, before any of it is read as data.
"""

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from edged.align.adapters.adapter import LoraSpec

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PICKLES = ("adapter_model.bin", "adapter_model.pt", "adapter_model.pth", "pytorch_model.bin")
_MOST_CONFIG_BYTES = 1 << 20
_HEADER_BYTES = 8 << 20
"""Most bytes that a safetensors file may hold beside its tensors."""
_DTYPES = ("F32", "F16", "BF16")


class ImportRefused(ValueError):
    """An adapter that cannot be imported; the message gives the problem and the way out."""


def read_adapter(folder: Path, spec: LoraSpec) -> dict[str, torch.Tensor]:
    """Read a PEFT folder's weights by PEFT's names, in fp32, all finite and fitting `spec`. Raises ImportRefused."""
    for name in _PICKLES:
        if (folder / name).exists() and not (folder / WEIGHTS).exists():
            way_out = "convert it where you trust it, with peft's model.save_pretrained(DIRECTORY)"
            pickle = f"{name} is a pickle, which can run any code when it is loaded"
            raise ImportRefused(f"{pickle}: only {WEIGHTS} is read; {way_out}")
    _check_config(_config(folder / CONFIG), spec)
    return _weights(folder / WEIGHTS, spec)


def most_bytes(spec: LoraSpec) -> int:
    """Size in bytes of the largest weights file that fits `spec`: all weights in fp32, and a header."""
    values = sum(spec.rank * (fan_in + fan_out) for fan_in, fan_out in spec.shapes.values())
    return 4 * values + _HEADER_BYTES


def _config(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _MOST_CONFIG_BYTES:
            raise ImportRefused(f"{path.name} has {path.stat().st_size} bytes: that is no adapter's configuration")
        config = json.loads(path.read_text())
    except FileNotFoundError:
        raise ImportRefused(f"there is no {path.name}: give what peft's save_pretrained wrote") from None
    except (OSError, ValueError) as error:
        raise ImportRefused(f"{path.name} cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise ImportRefused(f"{path.name} is not a JSON object")
    return config


def _check_config(config: dict[str, Any], spec: LoraSpec) -> None:
    """Raise ImportRefused for an adapter of another kind or size than the served ones."""
    if config.get("peft_type") != "LORA":
        raise ImportRefused(f"peft_type is {config.get('peft_type')!r}: only LORA is served")
    for name in ("use_dora", "use_rslora", "modules_to_save", "rank_pattern", "alpha_pattern", "fan_in_fan_out"):
        if config.get(name):
            raise ImportRefused(f"{name} = {json.dumps(config[name])[:80]} is not supported: train one without it")
    if config.get("bias", "none") != "none":
        raise ImportRefused(f"bias = {config['bias']!r} is not supported: train one with bias none")
    if config.get("r") != spec.rank:
        raise ImportRefused(f"its rank is {config.get('r')!r}, align.rank is {spec.rank}: both must be equal")
    alpha = config.get("lora_alpha")
    if not isinstance(alpha, int | float) or not math.isclose(alpha, spec.alpha):
        raise ImportRefused(f"its lora_alpha is {alpha!r}, align.alpha is {spec.alpha:g}: both must be equal")


def _weights(path: Path, spec: LoraSpec) -> dict[str, torch.Tensor]:
    wanted = spec.peft_shapes()
    try:
        size = path.stat().st_size
        if size > most_bytes(spec):
            raise ImportRefused(f"{path.name} has {size} bytes, at most {most_bytes(spec)} can fit this model")
        with safe_open(path, "pt") as file:
            _check_names(set(file.keys()), set(wanted))
            for name, shape in wanted.items():
                part = file.get_slice(name)
                if (found := tuple(part.get_shape())) != shape:
                    needed = f"this model needs {shape}: it was trained for another model"
                    raise ImportRefused(f"{name} has the shape {found}, {needed}")
                if (dtype := part.get_dtype()) not in _DTYPES:
                    raise ImportRefused(f"{name} is of the type {dtype}: give one of {', '.join(_DTYPES)}")
            tensors = {name: file.get_tensor(name).float() for name in wanted}
    except FileNotFoundError:
        raise ImportRefused(f"there is no {path.name}: give what peft's save_pretrained wrote") from None
    except (OSError, SafetensorError) as error:
        raise ImportRefused(f"{path.name} is not a safetensors file: {error}") from None
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise ImportRefused(f"{name} holds values that are not finite")
    return tensors


def _check_names(found: set[str], wanted: set[str]) -> None:
    if missing := sorted(wanted - found):
        why = "it was trained with other target_modules or for another model"
        raise ImportRefused(f"{missing[0]} is missing ({len(missing)} of {len(wanted)} tensors): {why}")
    if more := sorted(found - wanted):
        raise ImportRefused(f"{more[0][:200]} is no part of this model's adapters (align.target_modules)")
