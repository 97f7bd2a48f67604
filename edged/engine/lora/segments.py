"""Low-rank updates of a packed batch: which rows see which slot at present, and what multiplies them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from edged.align.dpo.decoder import LoraRows
from edged.tensors.device_copy import upload

NO_SLOT = -1
"""The slot of tokens that the base model answers."""
Run = tuple[int, int, int]
"""(start, stop, slot) of consecutive packed rows that one adapter answers."""

_FEW_ROWS = 16
"""Runs up to so many rows are multiplied together, padded to the longest of them; longer ones one by one."""
_ALONE_ROWS = 16
"""Up to so many rows one CPU core multiplies an update sooner than two of them meet."""
_NATIVE_ROWS = 64
"""Up to so many rows in all the compiled kernels multiply updates at least as soon as torch."""
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
        self.kernel: Literal["torch", "native", "triton"] = "torch"
        """What multiplies the runs: torch, one by one or `together`; the compiled kernels, where there are few rows;
        or Triton's kernels, in `tiles`."""
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
