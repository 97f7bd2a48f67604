"""Through layers that read the keys and values of earlier ones (Gemma 4 E2B), too, the units' gradient is that of
TRL's DPO loss by autograd."""

from __future__ import annotations

from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from peft import IA3Config, LoraConfig, PeftConfig

from edged.align.dpo.step_plan import Recompute
from tests.align.dpo.test_dpo_exact import (
    make_pairs,
    scored_by_base,
    slow,
    take_step,
    three_users,
    trl_gradients,
    unit_gradients,
    worst_error,
)
from tests.align.dpo.test_forms_exact import imported
from tests.align.dpo.test_states_exact import short_pairs
from tests.models import READING, tiny_model

ROUNDING = 4e-5
"""Largest share of a gradient that the orders of fp32 sums differ by."""
reading_model = partial(tiny_model, "gemma4_text", **READING)
KV = ["k_proj", "v_proj"]
FORMS: dict[str, PeftConfig] = {
    "ann": IA3Config(target_modules=[*KV, "down_proj"], feedforward_modules=["down_proj"]),
    "bob": LoraConfig(r=4, lora_alpha=8, target_modules=KV),
    "cyd": LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj", *KV, "per_layer_projection"], use_dora=True),
}


@pytest.mark.parametrize(
    ("window", "chunk", "recompute"),
    [(16, 23, "full"), (500, 1000, "none"), (500, 1000, "selective"), slow(1, 23, "full"), slow(500, 1, "full")],
)
def test_gradients_equal_trls(window: int, chunk: int, recompute: Recompute, tmp_path: Path) -> None:
    pairs = [*make_pairs(19), short_pairs()[1]]
    got, step, weights = unit_gradients(reading_model(), pairs, window, chunk, recompute=recompute)
    linears = {name.removeprefix("model.layers.") for name in got}
    assert {"2.self_attn.k_proj", "3.self_attn.q_proj", "3.per_layer_input_gate"} <= linears
    assert not {"3.self_attn.k_proj", "3.self_attn.v_proj"} & linears
    targets = sorted({name.rpartition(".")[2] for name in linears})
    wanted, loss = trl_gradients(reading_model(), pairs, weights, tmp_path, targets=targets)
    assert step.loss == pytest.approx(loss, rel=1e-5)
    assert worst_error(got, wanted) <= ROUNDING


@pytest.mark.parametrize(("window", "recompute"), [slow(60, "full"), (500, "none"), slow(500, "selective")])
def test_adapters_of_any_form_get_trls_gradients_in_one_step(window: int, recompute: Recompute, tmp_path: Path) -> None:
    pairs = three_users()
    states = {name: imported(name, config, tmp_path, reading_model) for name, config in FORMS.items()}
    made = take_step(reading_model(), pairs, window, 50, preempt_at=(5, 17), recompute=recompute, begun=states)
    for name, own in pairs.items():
        scored = scored_by_base(reading_model(), own)
        wanted, loss = trl_gradients(reading_model(), scored, made.before[name], tmp_path, config=FORMS[name])
        assert made.adapter_steps[name].loss == pytest.approx(loss, rel=1e-5)
        assert made.gradients[name].keys() == wanted.keys()
        assert worst_error(made.gradients[name], wanted) <= ROUNDING


@pytest.mark.parametrize("recompute", ["full", "none", slow("selective")])
def test_pages_that_are_lost_before_every_unit_leave_the_bits_of_an_undisturbed_step(recompute: Recompute) -> None:
    # Before its first unit, its second one, and so on.
    window, lost = 40 if recompute == "full" else 500, tuple(accumulate(range(1, 40)))
    calm, step, _ = unit_gradients(reading_model(), make_pairs(19)[:1], window, 70, recompute=recompute)
    got, shaken, _ = unit_gradients(
        reading_model(), make_pairs(19)[:1], window, 70, recompute=recompute, preempt_at=lost
    )
    assert worst_error(got, calm) == 0.0
    assert shaken.loss == step.loss


@pytest.mark.slow
@pytest.mark.parametrize("cut", [1, 7, 48])
def test_cut_units_and_forwards_ahead_change_no_gradient(cut: int) -> None:
    calm, _, _ = unit_gradients(reading_model(), make_pairs(19), 500, 50)
    ahead = iter([True, False] * 1000)
    how: dict[str, Any] = {"cut_to": lambda: cut, "ahead": lambda: next(ahead), "preempt_at": (9,)}
    got, _, _ = unit_gradients(reading_model(), make_pairs(19), 16, 50, **how)
    assert worst_error(got, calm) <= ROUNDING
