"""Low-rank updates of a packed batch: which rows see which slot at present, and what multiplies them."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from edged.align.dpo.decoder import LoraRows
from edged.engine.native import library
from edged.tensors.device_copy import upload

NO_SLOT = -1
"""The slot of tokens that the base model answers."""
Run = tuple[int, int, int]
"""(start, stop, slot) of consecutive packed rows that one adapter answers."""
LoraKernel = Literal["torch", "native", "triton"]
"""What multiplies the runs: torch, one by one or `together`; the compiled kernels, where there are few rows; or
Triton's kernels, in `tiles`."""

_FEW_ROWS = 16
"""Runs up to so many rows are multiplied together, padded to the longest of them; longer ones one by one."""
_ALONE_ROWS = 16
"""Up to so many rows one CPU core multiplies an update sooner than two of them meet."""
_NATIVE_ROWS = 64
"""Up to so many rows in all the compiled kernels multiply updates at least as soon as torch."""
_HIGHEST_NATIVE_RANK = 1024
"""Of which a thread of the compiled kernels keeps two rows on its stack."""
_MOST_SPARE = 2
"""Slots multiplied together lie side by side; at most so many times as many as are used."""


@dataclass(frozen=True, slots=True)
class ShortRuns:
    """Short runs as one batched product over the slots [low, high): `gather` [slots * width] rows of the packed batch,
    padded with any row; `rows` [n] are those with an adapter and `places` [n] where they are among the gathered."""

    low: int
    high: int
    gather: torch.Tensor
    rows: torch.Tensor
    places: torch.Tensor
    span: slice | None
    """`rows`, where they lie side by side."""
    even: bool
    """Whether `gather` is `span`: runs of one length, of neighbouring slots. Then nothing is copied."""


@dataclass(frozen=True, slots=True)
class LoraTiles:
    """Runs cut into tiles of at most `rows` rows, for `triton_lora`: `table` [tiles, 3] of (first row, rows, slot)."""

    table: torch.Tensor
    rows: int


class LoraSegments:
    """What the wrapped linears of one model do at present; shared by all of them."""

    def __init__(self) -> None:
        self.single: list[Run] = []
        """Runs that are multiplied one by one; rows in no run see the base model."""
        self.together: ShortRuns | None = None
        self.kernel: LoraKernel = "torch"
        self.few = False
        """Whether the compiled kernels add the updates of the present runs."""
        self.tiles: LoraTiles | None = None
        self.training: Sequence[LoraRows] = ()
        """Who sees which weights, with autograd, while a fine-tune unit runs; together they are all rows."""
        self._all: list[Run] = []
        self._slots: torch.Tensor | None = None
        """Of `_all`, made when it is first asked for."""
        self.threads = 0
        """Threads to go back to after updates that are too small to be shared between cores; 0: they are not."""

    def set(self, runs: list[Run], device: torch.device, tiles: LoraTiles | None = None) -> None:
        """The runs of the coming forward; `tiles` are the same for Triton's kernels, if they are on the device."""
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
        if len(few) < 2 or max(slots) + 1 - min(slots) > _MOST_SPARE * len(few):
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

    def slots_of(self, rows: int) -> torch.Tensor | None:
        """The slot of each of the forward's `rows`, -1 for the base model; None where no row has an adapter."""
        if not self._all:
            return None
        if self._slots is None or len(self._slots) != rows:
            self._slots = slots_of_rows(self._all, rows)
        return self._slots


def slots_of_rows(runs: list[Run], rows: int) -> torch.Tensor:
    """[rows], -1 for those in no run."""
    slots = torch.full((rows,), -1)
    for start, stop, slot in runs:
        slots[start:stop] = slot
    return slots


def why_no_updates(kernel: LoraKernel, device: torch.device, dtype: torch.dtype, rank: int) -> str:
    """Why `kernel` cannot add updates of slots like these; "" when it can."""
    if kernel == "triton":
        from edged.engine.lora import triton as triton_lora

        return triton_lora.why_not(device, dtype, rank)
    if rank > _HIGHEST_NATIVE_RANK:
        return f"the compiled kernels are for ranks up to {_HIGHEST_NATIVE_RANK}, not for {rank}"
    return library.why_not(device, dtype)


class NativeUpdates:
    """The low-rank updates of one linear by the compiled kernels, those of all adapters in one call."""

    def __init__(self, down: torch.Tensor, up: torch.Tensor) -> None:
        """A's [slots, in_features, rank] and B's [slots, rank, out_features], of `why_no_updates` = ""."""
        assert library.readable(down, up)
        self._kept = down, up
        self._linear = library.CLinear(out=up.shape[2])
        self._linear.read_slots(down, up)

    def add(self, x: torch.Tensor, out: torch.Tensor, slots: torch.Tensor) -> None:
        """Add to `out` [rows, out_features] the updates of `x` [rows, in_features] by `slots` [rows], -1 for none.

        Rows of either may lie apart, but not a row's features.
        """
        compiled, rows = library.kernels(), len(x)
        assert compiled is not None
        assert x.stride(1) == out.stride(1) == 1
        assert x.dtype == out.dtype == torch.float32
        assert len(slots) == rows
        size_in, rank = self._kept[0].shape[1:]
        given, added = (x.data_ptr(), x.stride(0), rows), (slots.data_ptr(), out.data_ptr(), out.stride(0))
        compiled.edged_add_updates(ctypes.byref(self._linear), size_in, rank, *given, *added, torch.get_num_threads())
