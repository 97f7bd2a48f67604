"""Checkpoints in the forms of quantization packages, read tensor by tensor without these packages.

Weights of 4 bits (W4A16 of compressed-tensors, GPTQ, AWQ) stay packed: each becomes torchao's int4, with the numbers of
the checkpoint. Floats of 8 and 4 bits (FP8, MXFP4, NVFP4) are dequantized, each while it is loaded, so that what
`model.quantize` makes of them is the only copy of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open

from edged.engine.model.quantization import INT4_GROUPS, CannotQuantize, PackedForm, int4_words, nibbles, packed_form

_SCALES = ("_scale_inv", "_scale")
"""Behind a tensor's name: its scales."""
_OF_INPUTS = (".activation_scale", ".input_scale", ".input_global_scale", ".k_scale", ".v_scale")
"""Ends of the names of what quantizes a linear's inputs, or keys and values."""
_FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
"""The numbers of FP4 (E2M1) without a sign."""
_NVFP4 = {".weight_packed": ("_global_scale", True), ".weight": ("_scale_2", False)}
"""By how the names of NVFP4's numbers end: how that of the scale of all does, and whether it divides (of
compressed-tensors, then of ModelOpt)."""
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where AWQ's eight numbers of a word lie in it."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a plain model, which is made when transformers slices it."""

    make: Callable[[], torch.Tensor]

    def __getitem__(self, _whole: Any) -> torch.Tensor:
        return self.make()


def stored_tensors_of(
    directory: Path, stored: dict[str, Any], packs: Callable[[str], bool], dtype: torch.dtype, device: torch.device
) -> dict[str, StoredTensor]:
    """Return the tensors of a checkpoint as a plain one has them, for `from_pretrained(None, state_dict=...)`.

    Weights of 4 bits become torchao's int4 where `packs` says so of their names and its kernels can multiply them;
    others are dequantized, as all other forms are, to `dtype`. Raises CannotQuantize with the name of a tensor that
    lacks.
    """
    slices = {name: opened.get_slice(name) for opened in _opened(directory) for name in opened.keys()}  # noqa: SIM118
    form = packed_form(stored)
    return dict(_dequantized(slices, stored, dtype) if form is None else _packed(slices, form, packs, dtype, device))


def _opened(directory: Path) -> Iterator[Any]:
    for file in sorted(directory.glob("*.safetensors")):
        yield safe_open(file, framework="pt")


# -- weights of 4 bits -------------------------------------------------------------------------------------------------


def _packed(
    slices: dict[str, Any], form: PackedForm, packs: Callable[[str], bool], dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, StoredTensor]]:
    words, *others = (f".{part}" for part in form.parts)
    for name, each in slices.items():
        owner = name.removesuffix(words)
        if owner != name:
            parts = [each, *(_needed(slices, owner + part) for part in others[: 1 + form.zeros])]
            _check_order(owner, parts[1], form, slices.get(f"{owner}.{form.order}"))
            group = _kernel_group(form, *parts[:2]) if packs(f"{owner}.weight") else 0
            into = partial(_to_int4, group=group, device=device) if group else _to_floats
            yield f"{owner}.weight", StoredTensor(partial(_unpacked, form, parts, into, dtype))
        elif not name.endswith((*others, f".{form.order}", ".weight_shape")):
            yield name, StoredTensor(partial(each.__getitem__, ...))


def _check_order(name: str, scales: Any, form: PackedForm, order: Any) -> None:
    """Check that the columns of a weight are in the order of their groups. Raises CannotQuantize."""
    if order is None:
        return
    own, groups = order[...].long(), scales.get_shape()[1 if form.method == "compressed-tensors" else 0]
    if not torch.equal(own, torch.arange(len(own)) // (len(own) // groups)):
        raise CannotQuantize(
            f"{name} has its columns in an order of their own (desc_act, actorder): give a checkpoint without it"
        )


def _needed(slices: dict[str, Any], name: str) -> Any:
    if name not in slices:
        raise CannotQuantize(f"its checkpoint has no {name}: download it again")
    return slices[name]


def _unpacked(
    form: PackedForm, parts: Sequence[Any], into: Callable[..., torch.Tensor], dtype: torch.dtype
) -> torch.Tensor:
    """Read a weight's numbers [out, in] from 0 to 15, scales and zero points [out, groups]; make `into` of them."""
    words, scales, *zeros = (part[...] for part in parts)
    rows, order = form.method == "compressed-tensors", _AWQ_ORDER if form.method == "awq" else None
    numbers = nibbles(words, 0 if form.method == "gptq" else 1, order)
    points = torch.full_like(scales, 8.0, dtype=torch.float32)
    if zeros and zeros[0].dtype == torch.int32:
        points = nibbles(zeros[0], 0 if rows else 1, order).float() + form.zero_offset
    elif zeros:
        points = zeros[0].float() + 8.0
    found = (part if rows else part.t() for part in (numbers, scales.float(), points))
    return into(*found, dtype=dtype)


def _to_floats(numbers: torch.Tensor, scales: torch.Tensor, points: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    group = numbers.shape[1] // scales.shape[1]
    scales, points = (part.repeat_interleave(group, dim=1) for part in (scales, points))
    return ((numbers - points) * scales).to(dtype)


def _kernel_group(form: PackedForm, words: Any, scales: Any) -> int:
    """Return how many weights share a scale in the kernels that can multiply a weight; 0 if none can."""
    (first, second), rows = words.get_shape(), form.method == "compressed-tensors"
    fan_in, fan_out = (8 * first, second) if form.method == "gptq" else (first, 8 * second)
    fan_in, fan_out = (8 * second, first) if rows else (fan_in, fan_out)
    stored = fan_in // scales.get_shape()[1 if rows else 0]
    return 0 if fan_out % 16 else next((size for size in INT4_GROUPS if stored % size == 0), 0)


def _to_int4(
    numbers: torch.Tensor,
    scales: torch.Tensor,
    points: torch.Tensor,
    dtype: torch.dtype,
    group: int,
    device: torch.device,
) -> torch.Tensor:
    """Return torchao's int4 weight of these numbers, in the layout of the kernels of `device`.

    They multiply (number - 8) * scale + zero. Raises CannotQuantize where a GPU's give wrong numbers.
    """
    from torchao.quantization.utils import pack_tinygemm_scales_and_zeros

    numbers, scales, points = (part.to(device) for part in (numbers, scales, points))
    (fan_out, fan_in), more = numbers.shape, numbers.shape[1] // group // scales.shape[1]
    scale, zero = (part.repeat_interleave(more, dim=1).to(dtype) for part in (scales, (8.0 - points) * scales))
    how: Any = [1, group], numbers.shape
    if device.type == "cpu":
        from torchao.prototype.quantization.int4.int4_opaque_tensor import Int4OpaqueTensor

        return Int4OpaqueTensor(int4_words(numbers), pack_tinygemm_scales_and_zeros(scale, zero, dtype), *how)
    from torchao.quantization.quantize_.workflows.int4.int4_tile_packed_to_4d_tensor import Int4TilePackedTo4dTensor

    # The kernels' tiles are whole: the numbers beyond the weight meet inputs of 0.
    right, below = -fan_in % 1024, -fan_out % 8
    whole = F.pad(numbers, (0, right, 0, below))
    scale, zero = (F.pad(part, (0, right // group, 0, below)) for part in (scale, zero))
    made = Int4TilePackedTo4dTensor(int4_words(whole), pack_tinygemm_scales_and_zeros(scale, zero, dtype), *how)
    row = torch.ones(1, fan_in, dtype=dtype, device=device)
    got, wanted = F.linear(row, made), F.linear(row, _to_floats(numbers, scales, points, dtype))
    # Not "above": a NaN is above nothing.
    if not (got - wanted).norm() <= 0.05 * wanted.norm():
        raise CannotQuantize("torchao's int4 kernels give wrong numbers here")
    return made


# -- floats of 8 and 4 bits --------------------------------------------------------------------------------------------


def _dequantized(
    slices: dict[str, Any], stored: dict[str, Any], dtype: torch.dtype
) -> Iterator[tuple[str, StoredTensor]]:
    kinds = [group.get("weights") or {} for group in (stored.get("config_groups") or {}).values()]
    blocks = stored.get("weight_block_size") or next((kind.get("block_structure") for kind in kinds), None)
    scaled: set[str] = set()
    for name, each in slices.items():
        if name.endswith("_blocks"):
            owner = name.removesuffix("_blocks")
            scaled.add(f"{owner}_scales")
            scales = _needed(slices, f"{owner}_scales")
            yield owner, StoredTensor(partial(_from_mxfp4, each, scales, dtype))
        elif each.get_dtype() == "U8" and (end := next((end for end in _NVFP4 if name.endswith(end)), "")):
            owner, (whole, divides) = name.removesuffix(end) + ".weight", _NVFP4[end]
            parts = [each, *(_needed(slices, owner + part) for part in (_SCALES[1], whole))]
            scaled |= {name, owner + _SCALES[1], owner + whole}
            yield owner, StoredTensor(partial(_from_nvfp4, parts, divides, dtype))
        elif each.get_dtype() == "F8_E4M3" and not name.endswith(_SCALES):
            scale = name + next((end for end in _SCALES if name + end in slices), _SCALES[0])
            scaled.add(scale)
            yield name, StoredTensor(partial(_from_fp8, each, _needed(slices, scale), blocks, dtype))
    for name, each in slices.items():
        if not (name in scaled or each.get_dtype() == "F8_E4M3" or name.endswith(("_blocks", *_OF_INPUTS))):
            yield name, StoredTensor(partial(each.__getitem__, ...))


def _from_mxfp4(blocks: Any, scales: Any, dtype: torch.dtype) -> torch.Tensor:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    return convert_moe_packed_tensors(blocks[...], scales[...], dtype=dtype).cpu()


def _from_nvfp4(parts: Sequence[Any], divides: bool, dtype: torch.dtype) -> torch.Tensor:
    """Return the numbers [out, in] of two a byte, the first in its lower half, with a scale for sixteen of a row."""
    numbers, scales, whole = (part[...] for part in parts)
    codes = nibbles(numbers).long()
    scales = scales.float() / whole.float() if divides else scales.float() * whole.float()
    return (torch.cat((_FP4, -_FP4))[codes] * scales.repeat_interleave(16, dim=-1)).to(dtype)


def _from_fp8(weight: Any, scale: Any, blocks: Sequence[int] | None, dtype: torch.dtype) -> torch.Tensor:
    """Return numbers times their scale: one for all, or one for each block of the last two dimensions."""
    numbers, scales = weight[...].float(), scale[...].float()
    if scales.numel() > 1:
        for dim in (-2, -1):
            size = numbers.shape[dim]
            block = blocks[dim] if blocks else -(-size // scales.shape[dim])
            # The last block may be cut.
            scales = scales.repeat_interleave(block, dim=dim).narrow(dim, 0, size)
    return (numbers * scales).to(dtype)
