"""Through layers that keep a state, too, the units' gradient is the gradient of TRL's DPO loss by autograd."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from edged.align.dpo.step_plan import Recompute
from edged.align.feedback.pair import TokenPair
from tests.align.dpo.test_dpo_exact import make_pairs, slow, take_step, trl_gradients, unit_gradients, worst_error
from tests.models import STATEFUL, tiny_model

ROUNDING = 4e-5
"""Largest share of a gradient that the orders of fp32 sums differ by: delta rules invert a matrix in each chunk."""
WAYS: list[tuple[int, int, Recompute]] = [(16, 5, "full"), (500, 1000, "none"), (500, 1, "selective")]


def short_pairs() -> list[TokenPair]:
    """A prompt shorter than the convolutions, answers of one token, and no prompt at all."""
    (first, second), (bare, _) = make_pairs(2, seed=2), make_pairs(0, seed=3)
    return [
        replace(first, chosen=first.chosen[:1]),
        replace(second, prompt=second.prompt[:1], rejected=second.rejected[:1]),
        bare,
    ]


@pytest.mark.parametrize(("window", "chunk", "recompute"), WAYS)
@pytest.mark.parametrize("kind", [*(slow(kind) for kind in STATEFUL if kind != "qwen3_5_text"), "qwen3_5_text"])
def test_gradients_equal_trls(kind: str, window: int, chunk: int, recompute: Recompute, tmp_path: Path) -> None:
    pairs = [*make_pairs(19), *short_pairs()]
    got, step, weights = unit_gradients(tiny_model(kind), pairs, window, chunk, recompute=recompute)
    targets = sorted({name.rpartition(".")[2] for name in got})
    wanted, loss = trl_gradients(tiny_model(kind), pairs, weights, tmp_path, targets=targets)
    assert step.loss == pytest.approx(loss, rel=1e-4)
    assert worst_error(got, wanted) <= ROUNDING


@pytest.mark.parametrize("kind", ["lfm2", slow("nemotron_h"), slow("qwen3_5_text")])
def test_lost_pages_leave_the_bits_of_an_undisturbed_step(kind: str) -> None:
    pairs = {"ann": make_pairs(19), "ben": [replace(pair, adapter="ben") for pair in short_pairs()]}
    how = {"window": 16, "chunk": 7, "cut_to": lambda: 3}
    wanted = take_step(tiny_model(kind), pairs, **how).gradients
    shaken = take_step(tiny_model(kind), pairs, preempt_at=(1, 3, 5, 9, 12, 20), **how).gradients
    assert worst_error(shaken["ann"], wanted["ann"]) == worst_error(shaken["ben"], wanted["ben"]) == 0.0
    turns = iter([True, False] * 100)
    ahead = take_step(tiny_model(kind), pairs, preempt_at=(9,), ahead=lambda: next(turns), **how).gradients
    assert max(worst_error(ahead[name], wanted[name]) for name in pairs) <= ROUNDING
