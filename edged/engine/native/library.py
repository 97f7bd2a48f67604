"""The library of compiled kernels: loading it, its functions and its structures."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_float, c_int64, c_void_p
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import nn

from edged.engine.native import shared_library, why_not_built
from edged.engine.native.fp16_weights import Fp16Weights
from edged.runtime import logs

FEW_ROWS = 32
"""Most rows that the kernels compute; torch computes more."""


class CLinear(Structure):
    """C's `linear_t`: pointers, the narrow weight's form, outputs, and steps between an adapter's rows and slots."""

    _fields_ = (
        *((name, c_void_p) for name in ("weight", "narrow", "bias", "down", "up")),
        *((name, c_int64) for name in ("form", "out", "down_row", "down_slot", "up_slot")),
    )

    def read_slots(self, down: torch.Tensor, up: torch.Tensor) -> None:
        """Set adapters' A's [slots, in, rank], whose rows may have a stride, and B's [slots, rank, out]; both must
        outlive this structure."""
        self.down, self.down_slot, self.down_row = down.data_ptr(), down.stride(0), down.stride(1)
        self.up, self.up_slot = up.data_ptr(), up.stride(0)


class CGroup(Structure):
    """C's `group_t`: up to three linears of one input."""

    _fields_ = (("linears", CLinear * 3), ("count", c_int64), ("input", c_int64), ("rank", c_int64))


class CLayer(Structure):
    """C's `layer_t`: a Llama-like decoder layer."""

    _fields_ = (
        *((name, CGroup) for name in ("qkv", "o", "gate_up", "down")),
        ("norms", c_void_p * 2),
        ("eps", c_float * 2),
        *((name, c_int64) for name in ("hidden", "heads", "kv_heads", "head_dim")),
    )


class CPages(Structure):
    """C's `pages_t`: a layer's K/V and the locations of a batch's decodes in it."""

    _fields_ = (
        *((name, c_void_p) for name in ("keys", "values", "tables", "context", "slabs", "counts", "offsets", "sinks")),
        *((name, c_int64) for name in ("n", "width", "page_size", "kv_heads", "head_dim", "heads", "window")),
        ("scaling", c_float),
        ("softcap", c_float),
    )


class CSlots(Structure):
    """C's `slots_t`: states by slot, and the slots of a batch's decodes."""

    _fields_ = (*((name, c_void_p) for name in ("states", "before", "after")), ("n", c_int64), ("size", c_int64))


_P, _N = c_void_p, c_int64
_SIGNATURES: dict[str, tuple[Any, Sequence[Any]]] = {
    "edged_before_attention": (None, (POINTER(CLayer), _P, _N, _P, _P, _P, _P, _P, _N)),
    "edged_after_attention": (None, (POINTER(CLayer), _P, _P, _N, _P, _P, _P, _N)),
    "edged_scratch": (_N, (POINTER(CLayer), _N, _N)),
    "edged_product": (None, (POINTER(CGroup), _P, _N, _P, _N, _N)),
    "edged_add_updates": (None, (POINTER(CLinear), _N, _N, _P, _N, _N, _P, _P, _N, _N)),
    "edged_keep_nucleus": (None, (_P, _N, _N, _P, c_float, _P, _N)),
    "edged_decode": (None, (POINTER(CPages), _P, _N, _N, _P, _P, _N, _N, _P, _P, _P, _N)),
    "edged_delta_rule": (None, (POINTER(CSlots), *[_N] * 4, _P, _N, _P, _N, _P, _N, _P, _P, _N, _P, _N)),
    "edged_convolution": (None, (POINTER(CSlots), _N, _N, _P, _P, _N, _P, _N, _P, _N)),
}
"""Result and arguments of each function."""


def kernels() -> ctypes.CDLL | None:
    """Return the compiled functions; None if there are none."""
    return _loaded()[0]


def why_no_kernels() -> str:
    """Return why `kernels` are missing; "" if they are there."""
    return _loaded()[1]


def why_not(device: torch.device, dtype: torch.dtype) -> str:
    """Return why no kernel can compute on `device` in `dtype`; "" if they can."""
    if device.type != "cpu" or dtype != torch.float32:
        return f"the compiled kernels are for float32 on the CPU, not for {dtype} on {device.type}"
    return why_no_kernels()


@cache
def _loaded() -> tuple[ctypes.CDLL | None, str]:
    reason, path = why_not_built(), shared_library()
    if reason or path is None:
        return None, reason
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        return None, f"the compiled kernels cannot be loaded: {logs.first_line(error)}"
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library, ""


def readable(*tensors: torch.Tensor | None) -> bool:
    """Whether the kernels can read these tensors: float32 on the CPU, contiguous."""
    return all(
        tensor is None or (tensor.dtype == torch.float32 and tensor.device.type == "cpu" and tensor.is_contiguous())
        for tensor in tensors
    )


class LinearParts(NamedTuple):
    """A linear's tensors for the kernels; `weight` [out, in] and `bias` [out] are `readable`."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    narrow: Fp16Weights | None = None
    """The same numbers as `weight` in 16 bits, read instead."""

    @classmethod
    def of(cls, linear: nn.Linear) -> LinearParts:
        """Take a linear's own weight and bias."""
        return cls(linear.weight.detach(), None if linear.bias is None else linear.bias.detach())


def group_of(parts: Sequence[LinearParts]) -> CGroup:
    """Build the structure of up to three linears of one input without adapters; their tensors must outlive it."""
    assert len(parts) <= 3
    group = CGroup(count=len(parts), input=parts[0].weight.shape[1])
    for linear, (weight, bias, narrow) in zip(group.linears, parts, strict=False):
        linear.weight, linear.out = weight.data_ptr(), weight.shape[0]
        linear.bias = None if bias is None else bias.data_ptr()
        if narrow is not None:
            linear.narrow, linear.form = narrow.words.data_ptr(), narrow.form
    return group
