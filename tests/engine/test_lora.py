"""Rows of a packed batch see their own adapter, however the runs of rows are multiplied."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from edged.engine.lora import LoraSlots, Run

SLOTS, RANK, WIDE_IN, WIDE_OUT = 12, 4, 24, 40


def wrapped() -> tuple[nn.Linear, nn.Module, LoraSlots, dict[int, tuple[torch.Tensor, torch.Tensor]]]:
    """A linear, the model around it, its slots, and what was loaded into each."""
    torch.manual_seed(0)
    base = nn.Linear(WIDE_IN, WIDE_OUT)
    model = nn.Sequential(base).requires_grad_(False)
    slots = LoraSlots(model, ["0"], SLOTS, RANK, torch.float32)
    loaded = {slot: (torch.randn(RANK, WIDE_IN), torch.randn(WIDE_OUT, RANK)) for slot in range(SLOTS)}
    for slot, (a, b) in loaded.items():
        slots.load(slot, {"0": (a, b)}, scaling=0.5)
    return base, model, slots, loaded


CASES = {
    "one adapter": [(0, 7, 3)],
    "a base row first": [(1, 3, 0), (3, 4, 1), (4, 9, 2)],
    "decodes of many": [(row, row + 1, row) for row in range(10)],
    "gaps between slots": [(0, 1, 2), (1, 3, 4), (3, 6, 5)],
    "slots far apart": [(0, 1, 0), (1, 2, 11)],
    "a prompt among decodes": [(0, 1, 0), (1, 31, 1), (31, 33, 2), (33, 34, 3)],
    "prompts alone": [(0, 20, 5), (20, 40, 6)],
    "nobody": [],
}


@pytest.mark.parametrize("runs", CASES.values(), ids=CASES.keys())
def test_each_row_gets_the_update_of_its_own_slot(runs: list[Run]) -> None:
    base, model, slots, loaded = wrapped()
    x = torch.randn(1, 42, WIDE_IN)
    wanted = base(x)[0].detach().clone()
    for start, stop, slot in runs:
        a, b = loaded[slot]
        wanted[start:stop] += 0.5 * x[0, start:stop] @ a.t() @ b.t()
    with torch.inference_mode(), slots.packed(runs):
        got = model(x)[0]
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)
    with torch.inference_mode():
        torch.testing.assert_close(model(x)[0], base(x)[0])
