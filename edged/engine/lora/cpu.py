"""The low-rank updates of a packed batch's rows by the compiled kernels, all adapters in one call."""

from __future__ import annotations

import ctypes

import torch

from edged.engine.native.library import CLinear, kernels, readable, why_not

_HIGHEST_RANK = 1024
"""Of which a thread keeps two rows on its stack."""


def why_no_native_updates(device: torch.device, dtype: torch.dtype, rank: int) -> str:
    """Why the kernels cannot add updates of slots like these; "" when they can."""
    if rank > _HIGHEST_RANK:
        return f"the compiled kernels are for ranks up to {_HIGHEST_RANK}, not for {rank}"
    return why_not(device, dtype)


class NativeUpdates:
    """The updates of one linear."""

    def __init__(self, down: torch.Tensor, up: torch.Tensor) -> None:
        """A's [slots, in_features, rank] and B's [slots, rank, out_features], of `why_no_native_updates` = ""."""
        assert readable(down, up)
        self._kept = down, up
        self._linear = CLinear(out=up.shape[2])
        self._linear.read_slots(down, up)

    def add(self, x: torch.Tensor, out: torch.Tensor, slots: torch.Tensor) -> None:
        """Add to `out` [rows, out_features] the updates of `x` [rows, in_features] by `slots` [rows], -1 for none.

        Rows of either may lie apart, but not a row's features.
        """
        library, rows = kernels(), len(x)
        assert library is not None
        assert x.stride(1) == out.stride(1) == 1
        assert x.dtype == out.dtype == torch.float32
        assert len(slots) == rows
        size_in, rank = self._kept[0].shape[1:]
        given, added = (x.data_ptr(), x.stride(0), rows), (slots.data_ptr(), out.data_ptr(), out.stride(0))
        library.edged_add_updates(ctypes.byref(self._linear), size_in, rank, *given, *added, torch.get_num_threads())
