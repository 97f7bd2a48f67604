"""Tiny checkpoints rewritten in the forms of quantization packages, and the plain twins that they must answer as.

Words are packed as the packages' own documents say: compressed-tensors' `pack-quantized`, GPTQ's and AutoAWQ's `gemm`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

_WEIGHTS = "model.safetensors"
_AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
"""Columns of a word's nibbles, the lowest first."""
_FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def can_rewrite(stored: dict[str, Any]) -> bool:
    """Whether `rewrite` knows a form."""
    forms = ("pack-quantized", "float-quantized", "nvfp4-pack-quantized")
    return stored["quant_method"] in ("gptq", "awq", "fp8", "mxfp4", "modelopt") or stored.get("format") in forms


def rewrite(folder: Path, stored: dict[str, Any]) -> Path:
    """Rewrite a plain checkpoint's linears in the form that `stored` names; return the plain twin's folder."""
    twin = folder.with_name(f"{folder.name}-plain")
    twin.mkdir()
    for file in folder.iterdir():
        (twin / file.name).write_bytes(file.read_bytes())
    plain: dict[str, torch.Tensor] = {}
    packed: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(folder / _WEIGHTS).items():
        parts = {name: tensor}
        if name.endswith(("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight")):
            parts, tensor = _form(name.removesuffix(".weight"), tensor, stored)
        elif "experts" in name and tensor.dim() == 3 and stored["quant_method"] == "mxfp4":
            parts, tensor = _mxfp4(name, tensor)
        packed |= parts
        plain[name] = tensor.contiguous()
    save_file(plain, twin / _WEIGHTS, {"format": "pt"})
    save_file({name: part.contiguous() for name, part in packed.items()}, folder / _WEIGHTS, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": stored}))
    return twin


def _form(name: str, weight: torch.Tensor, stored: dict[str, Any]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return a linear's stored tensors, and the weight that they stand for."""
    method = stored["quant_method"]
    if method == "mxfp4":
        return {f"{name}.weight": weight}, weight
    if method == "modelopt" or stored.get("format") == "nvfp4-pack-quantized":
        return _nvfp4(name, weight, method == "modelopt")
    if method == "fp8" or stored.get("format") == "float-quantized":
        return _fp8(name, weight, stored)
    kind = next(iter(stored.get("config_groups", {"": {"weights": stored}}).values()))["weights"]
    group, symmetric = kind.get("group_size") or -1, kind.get("symmetric", kind.get("sym", False))
    rows, columns = weight.shape
    grouped = weight.view(rows, -1, group if group > 0 else columns)
    low, high = grouped.amin(-1), grouped.amax(-1)
    scale = (torch.maximum(-low, high) / 7 if symmetric else (high - low) / 15).to(torch.bfloat16).float()
    zero = torch.full_like(scale, 8) if symmetric else (-low / scale).round().clamp(0, 15)
    numbers = (grouped / scale[..., None] + zero[..., None]).round().clamp(0, 15)
    exact = ((numbers - zero[..., None]) * scale[..., None]).view_as(weight)
    numbers, zero = numbers.view(rows, columns).int(), zero.int()
    if method == "compressed-tensors":
        parts = {"weight_packed": _words(numbers, 1), "weight_scale": scale, "weight_shape": torch.tensor(weight.shape)}
        parts |= {} if symmetric else {"weight_zero_point": _words(zero, 0)}
    elif method == "gptq":
        order = torch.arange(columns, dtype=torch.int32) // (columns // scale.shape[1])
        parts = {"qweight": _words(numbers.t(), 0), "scales": scale.t(), "g_idx": order}
        parts["qzeros"] = _words(zero.t() - int(stored.get("checkpoint_format") != "gptq_v2"), 1)
    else:
        awq = [_words(part.t().unflatten(1, (-1, 8))[..., _AWQ_COLUMNS].flatten(1), 1) for part in (numbers, zero)]
        parts = {"qweight": awq[0], "qzeros": awq[1], "scales": scale.t()}
    return {f"{name}.{part}": tensor for part, tensor in parts.items()}, exact


def _words(numbers: torch.Tensor, along: int) -> torch.Tensor:
    """Pack eight numbers of 4 bits that follow each other along a dimension into an int32, the first lowest."""
    eights = (numbers.long() & 15).unflatten(along, (-1, 8)).movedim(along + 1, -1)
    return (eights << torch.arange(0, 32, 4)).sum(-1).to(torch.int32)


def _fp8(name: str, weight: torch.Tensor, stored: dict[str, Any]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    blocks, ends = stored.get("weight_block_size"), "weight_scale_inv"
    if stored["quant_method"] == "compressed-tensors":
        scale, ends = weight.abs().amax(1, keepdim=True) / 448, "weight_scale"
        whole = scale
    elif blocks:
        down, across = (-(-size // block) for size, block in zip(weight.shape, blocks, strict=True))
        scale = 0.001 + 0.001 * torch.rand(down, across)
        whole = scale.repeat_interleave(blocks[0], 0).repeat_interleave(blocks[1], 1)[: len(weight), : weight.shape[1]]
    else:
        scale = whole = weight.abs().amax() / 448
    numbers = (weight / whole).to(torch.float8_e4m3fn)
    return {f"{name}.weight": numbers, f"{name}.{ends}": scale}, numbers.float() * whole


def _nvfp4(name: str, weight: torch.Tensor, modelopt: bool) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """torchao's numbers, under the names of ModelOpt or of compressed-tensors, whose scale of all divides."""
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

    whole = per_tensor_amax_to_scale(weight.abs().max())
    made = NVFP4Tensor.to_nvfp4(weight, block_size=16, per_tensor_scale=whole)
    ends = ("weight", "weight_scale_2") if modelopt else ("weight_packed", "weight_global_scale")
    parts = dict(zip(ends, (made.qdata, whole if modelopt else 1 / whole), strict=True))
    parts |= {"weight_scale": made.scale, "input_scale": torch.ones(())}
    return {f"{name}.{part}": tensor for part, tensor in parts.items()}, made.dequantize(torch.float32)


def _mxfp4(name: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Experts [n, in, out] as blocks [n, out, in / 32, 16] of two numbers a byte, and their exponents."""
    turned = weight.mT.unflatten(-1, (-1, 32))
    exponent = (turned.abs().amax(-1, keepdim=True) / 6).log2().ceil()
    scaled = turned / exponent.exp2()
    code = (scaled.abs()[..., None] - _FP4).abs().argmin(-1)
    exact = (_FP4[code] * scaled.sign() * exponent.exp2()).flatten(-2).mT
    code = (code + 8 * (scaled < 0)).to(torch.uint8)
    blocks = code[..., ::2] | code[..., 1::2] << 4
    return {f"{name}_blocks": blocks, f"{name}_scales": (exponent[..., 0] + 127).to(torch.uint8)}, exact
