"""LoRA segments of a packed batch: the slot of each run of rows, and the implementation that multiplies it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from edged.align.dpo.decoder import LoraRows
from edged.engine.lora.runs import LoraTiles, Run
from edged.engine.native import library
from edged.tensors.device_copy import upload

NO_SLOT = -1
"""The slot of tokens that the base model answers."""
LoraKernel = Literal["torch", "native", "triton"]
"""Implementation of the updates: torch, one run at a time or `together`; the compiled kernels, if rows are few; or
Triton's kernels, in `tiles`."""

_FEW_ROWS = 16
"""Longest run that is multiplied together with others, padded to the longest of them; longer ones are alone."""
_ALONE_ROWS = 16
"""Most rows that one CPU core multiplies faster than two cores synchronize."""
_NATIVE_ROWS = 64
"""Most rows in all for which the compiled kernels are at least as fast as torch."""
_HIGHEST_NATIVE_RANK = 1024
"""Highest rank of the compiled kernels, of which a thread keeps two rows on its stack."""
_MAX_SPARE = 2
"""Most neighbouring slots that are multiplied together, for each slot that is used."""


@dataclass(frozen=True, slots=True)
class ShortRuns:
    """Short runs as one batched product over the slots [low, high): `gather` [slots * width] are rows of the packed
    batch, padded with any row; `rows` [n] those with an adapter, and `places` [n] their places in `gather`."""

    low: int
    high: int
    gather: torch.Tensor
    rows: torch.Tensor
    places: torch.Tensor
    span: slice | None
    """`rows` as a slice, if they are contiguous."""
    even: bool
    """Whether `gather` equals `span` (runs of one length, of neighbouring slots), so that nothing is copied."""


class LoraSegments:
    """The present runs and their implementation, shared by all LoRA linears of a model."""

    def __init__(self) -> None:
        self.single: list[Run] = []
        """Runs that are multiplied one by one; rows in no run get the base model's output."""
        self.together: ShortRuns | None = None
        self.kernel: LoraKernel = "torch"
        self.few = False
        """Whether the compiled kernels add the updates of the present runs."""
        self.tiles: LoraTiles | None = None
        self.training: Sequence[LoraRows] = ()
        """Adapters of all rows, with autograd, while a fine-tune unit runs; else empty."""
        self.factor_rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None] | None = None
        """Rows whose adapter has factors, their slots, and `LoraSlots.spares_bias` of each; None: there are none."""
        self._all: list[Run] = []
        self._slots: torch.Tensor | None = None
        """Slots by row, made from `_all` on first use."""
        self.threads = 0
        """Number of threads to restore after updates too small for several cores; 0: they are not too small."""

    def set(self, runs: list[Run], device: torch.device, tiles: LoraTiles | None = None) -> None:
        """Set the runs of the coming forward; `tiles` are the same for Triton's kernels, if already on the device."""
        self._all, self._slots = runs, None
        if self.kernel == "triton":
            from edged.engine.lora import triton as triton_lora  # triton is slow to import, and not everywhere

            self.tiles = tiles if tiles is not None or not runs else triton_lora.cut(runs, device)
            return
        rows_in_runs = sum(stop - start for start, stop, _ in runs)
        self.few = self.kernel == "native" and 0 < rows_in_runs <= _NATIVE_ROWS
        if self.few:
            self.single, self.together = [], None
            return
        self.threads = torch.get_num_threads() if device.type == "cpu" and rows_in_runs <= _ALONE_ROWS else 0
        few = [run for run in runs if run[1] - run[0] <= _FEW_ROWS]
        slots = [slot for _, _, slot in few]
        if len(few) < 2 or max(slots) + 1 - min(slots) > _MAX_SPARE * len(few):
            self.single, self.together = runs, None
            return
        self.single = [run for run in runs if run[1] - run[0] > _FEW_ROWS]
        low, high = min(slots), max(slots) + 1
        width = max(stop - start for start, stop, _ in few)
        gather = np.zeros((high - low, width), np.int64)
        rows = np.concatenate([np.arange(start, stop) for start, stop, _ in few])
        places = np.concatenate([(slot - low) * width + np.arange(stop - start) for start, stop, slot in few])
        gather.reshape(-1)[places] = rows
        first, last = int(rows[0]), int(rows[-1]) + 1
        span = slice(first, last) if last - first == len(rows) else None
        even = span is not None and np.array_equal(gather.reshape(-1), rows)
        tables = upload([gather.reshape(-1), rows, places], device)
        self.together = ShortRuns(low, high, tables[0], tables[1], tables[2], span, even)

    @contextmanager
    def only(self, part: LoraSegments) -> Iterator[None]:
        """Apply the runs of `part` in the place of the present ones, while some of the rows are computed alone."""
        own, self.__dict__ = self.__dict__, part.__dict__
        try:
            yield
        finally:
            self.__dict__ = own

    def slots_of(self, rows: int) -> torch.Tensor | None:
        """Return the slot of each of the forward's `rows`, -1 for the base model; None if no row has an adapter."""
        if not self._all:
            return None
        if self._slots is None or len(self._slots) != rows:
            self._slots = slots_of_rows(self._all, rows)
        return self._slots


def slots_of_rows(runs: list[Run], rows: int) -> torch.Tensor:
    """Return the slot of each row, [rows]; -1 for rows in no run."""
    slots = torch.full((rows,), -1)
    for start, stop, slot in runs:
        slots[start:stop] = slot
    return slots


def why_no_updates(kernel: LoraKernel, device: torch.device, dtype: torch.dtype, rank: int) -> str:
    """Return why `kernel` cannot add updates of such slots; "" when it can."""
    if kernel == "triton":
        from edged.engine.lora import triton as triton_lora

        return triton_lora.why_not(device, dtype, rank)
    if rank > _HIGHEST_NATIVE_RANK:
        return f"the compiled kernels are for ranks up to {_HIGHEST_NATIVE_RANK}, not for {rank}"
    return library.why_not(device, dtype)


class NativeUpdates:
    """The low-rank updates of one linear by the compiled kernels, in one call for all adapters."""

    def __init__(self, down: torch.Tensor, up: torch.Tensor) -> None:
        """`down` [slots, in_features, rank] and `up` [slots, rank, out_features] must pass `why_no_updates`."""
        assert library.readable(down, up)
        self._kept = down, up
        self._linear = library.CLinear(out=up.shape[2])
        self._linear.read_slots(down, up)

    def add(self, x: torch.Tensor, out: torch.Tensor, slots: torch.Tensor) -> None:
        """Add to `out` [rows, out_features] the updates of `x` [rows, in_features] by `slots` [rows], -1 for none.

        Rows of either may have a stride, but a row's features must be contiguous.
        """
        compiled, rows = library.kernels(), len(x)
        assert compiled is not None
        assert x.stride(1) == out.stride(1) == 1
        assert x.dtype == out.dtype == torch.float32
        assert len(slots) == rows
        size_in, rank = self._kept[0].shape[1:]
        given, added = (x.data_ptr(), x.stride(0), rows), (slots.data_ptr(), out.data_ptr(), out.stride(0))
        compiled.edged_add_updates(ctypes.byref(self._linear), size_in, rank, *given, *added, torch.get_num_threads())
