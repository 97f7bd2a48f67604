"""The compiled kernels: found, loaded, and their structures.

Owns the interface to `kernels.c`. Must not know models or batches.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_float, c_int64, c_void_p
from functools import cache
from typing import Any

import torch

from edged import logs
from edged.engine.native import shared_library

log = logging.getLogger("edged.engine")
_INTERFACE = "edged_interface_1"
"""Named in `kernels.c`; a library without it is older or newer."""
FEW_ROWS = 16
"""Up to so many rows are computed by the kernels, more by torch."""


class CLinear(Structure):
    """`linear_t`: pointers, outputs, and steps between an adapter's rows and between slots, in floats."""

    _fields_ = (
        *((name, c_void_p) for name in ("weight", "bias", "down", "up")),
        *((name, c_int64) for name in ("out", "down_row", "down_slot", "up_slot")),
    )


class CGroup(Structure):
    """`group_t`: up to three linears of one input."""

    _fields_ = (("linears", CLinear * 3), ("count", c_int64), ("input", c_int64), ("rank", c_int64))


class CLayer(Structure):
    """`layer_t`."""

    _fields_ = (
        *((name, CGroup) for name in ("qkv", "o", "gate_up", "down")),
        ("norms", c_void_p * 2),
        ("eps", c_float * 2),
        *((name, c_int64) for name in ("hidden", "heads", "kv_heads", "head_dim")),
    )


class CPages(Structure):
    """`pages_t`: a layer's K/V and where the rows of a batch's decodes lie in it."""

    _fields_ = (
        *((name, c_void_p) for name in ("keys", "values", "tables", "context", "slabs", "counts", "offsets")),
        *((name, c_int64) for name in ("n", "width", "page_size", "kv_heads", "head_dim", "heads", "window")),
        ("scaling", c_float),
        ("softcap", c_float),
    )


_SIGNATURES: dict[str, tuple[Any, Sequence[Any]]] = {
    "edged_before_attention": (None, (POINTER(CLayer), c_void_p, c_int64, *[c_void_p] * 5)),
    "edged_after_attention": (None, (POINTER(CLayer), c_void_p, c_void_p, c_int64, *[c_void_p] * 3)),
    "edged_scratch": (c_int64, (POINTER(CLayer), c_int64)),
    "edged_product": (None, (POINTER(CGroup), c_void_p, c_int64, c_void_p, c_int64)),
    "edged_decode": (
        None,
        (POINTER(CPages), c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_int64, c_int64, *[c_void_p] * 3),
    ),
}


@cache
def kernels() -> ctypes.CDLL | None:
    """The functions of `kernels.c`; None where it was not compiled. Their OpenMP threads are torch's."""
    path = shared_library()
    if path is None:
        return None
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        log.warning("the compiled kernels cannot be loaded: %s", logs.first_line(error))
        return None
    if not hasattr(library, _INTERFACE):
        log.warning("the compiled kernels are of another version of edged: install edged again")
        return None
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def group_of(weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]) -> CGroup:
    """Linears of one input with no adapters; the tensors must outlive it."""
    group = CGroup(count=len(weights), input=weights[0].shape[1])
    for linear, weight, bias in zip(group.linears, weights, biases, strict=False):
        linear.weight, linear.out = weight.data_ptr(), weight.shape[0]
        linear.bias = None if bias is None else bias.data_ptr()
    return group
