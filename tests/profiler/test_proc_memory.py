"""Peak memory is seen even after it was given back."""

from __future__ import annotations

import torch

from edged.profiler.proc_memory import peak_bytes, start_peak, used_bytes

CPU = torch.device("cpu")
SIZE = 64 << 20


def test_the_peak_counts_what_was_freed_and_starts_anew() -> None:
    before = used_bytes(CPU)
    start_peak(CPU)
    block = torch.ones(SIZE, dtype=torch.uint8)
    del block
    assert 0.9 * SIZE < peak_bytes(CPU) - before < 1.5 * SIZE
    used_bytes(CPU)
    start_peak(CPU)
    assert peak_bytes(CPU) - before < 0.5 * SIZE
