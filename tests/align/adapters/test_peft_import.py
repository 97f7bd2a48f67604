"""Adapters of other ranks, scalings and targets are imported as adapters of ours that answer the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from edged.align.adapters.adapter import AdapterState, LoraSpec, peft_name
from edged.align.adapters.peft_import import read_adapter
from edged.settings.live import Live
from edged.settings.load import Settings
from tests.models import tiny_model

OTHERS: dict[str, dict[str, Any]] = {
    "a lower rank": {"r": 3, "lora_alpha": 5},
    "another alpha": {"r": 8, "lora_alpha": 1},
    "rsLoRA": {"r": 4, "lora_alpha": 16, "use_rslora": True},
    "patterns": {
        "r": 2,
        "lora_alpha": 4,
        "rank_pattern": {"q_proj": 8, "layers.1.mlp.up_proj": 5},
        "alpha_pattern": {"v_proj": 3, r"layers\.0\.mlp\.down_proj": 7},
    },
    "few targets": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
}


def spec() -> LoraSpec:
    linears = {
        name: (module.in_features, module.out_features)
        for name, module in tiny_model().named_modules()
        if isinstance(module, torch.nn.Linear) and name != "lm_head"
    }
    return LoraSpec(linears, 8, 16.0, "base", "f", tuple(linears))


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS.keys())
def test_an_import_changes_every_linear_as_peft_does(other: dict[str, Any], tmp_path: Path) -> None:
    model: Any = get_peft_model(tiny_model(), LoraConfig(**{"target_modules": "all-linear"} | other))
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0.0, 0.3, generator=generator)
    model.save_pretrained(tmp_path)
    ours, adapted = spec(), 0
    weights = read_adapter(tmp_path, ours)
    for linear in ours.shapes:
        a, b = (weights[peft_name(linear, part)] for part in "AB")
        theirs = model.get_submodule(f"base_model.model.{linear}")
        if hasattr(theirs, "lora_A"):
            adapted += 1
            torch.testing.assert_close(ours.scaling * b @ a, theirs.get_delta_weight("default"), atol=1e-6, rtol=1e-5)
        else:
            assert not a.any()
            assert not b.any()
    assert adapted == (6 if "target_modules" in other else 21)


def test_what_an_import_filled_with_zeros_stays_zero_while_it_learns(tmp_path: Path) -> None:
    get_peft_model(tiny_model(), LoraConfig(**OTHERS["few targets"])).save_pretrained(tmp_path)
    ours = spec()
    state = AdapterState("ann", ours, Live(Settings()), torch.device("cpu"))
    state.restore(read_adapter(tmp_path, ours), 1)
    for turn in range(3):
        generator = torch.Generator().manual_seed(turn)
        gradients = {}
        for name, (a, b) in state.weights.items():
            # d loss / d (B A), and what it makes of both.
            upstream = torch.empty(b.shape[0], a.shape[1]).normal_(generator=generator)
            gradients[name] = ((b.t() @ upstream).detach(), (upstream @ a.t()).detach())
        state.step(gradients, 1)
    learned = 0
    for name, (a, b) in state.weights.items():
        adapted = name.endswith(("q_proj", "v_proj"))
        assert not a[4:].any()
        assert not b[:, 4:].any()
        assert bool(b[:, :4].any()) is adapted
        learned += adapted
    assert learned == 6
