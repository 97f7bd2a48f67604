"""Runs of packed rows that one adapter answers, and their tiles for Triton's kernels."""

from dataclasses import dataclass

import torch

Run = tuple[int, int, int]
"""(start, stop, slot) of consecutive packed rows that one adapter answers."""


@dataclass(frozen=True, slots=True)
class LoraTiles:
    """Runs cut into tiles of at most `rows` rows, for `triton_lora`: `table` [tiles, 3] of (first row, rows, slot)."""

    table: torch.Tensor
    rows: int
