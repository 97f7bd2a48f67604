"""Adapters of other forms (IA3, rsLoRA, other ranks and linears) get TRL's gradients in one step with those of ours."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftConfig, get_peft_model

from edged.align.adapters.adapter import AdapterState
from edged.align.adapters.form import LoraSpec
from edged.align.adapters.peft_import import read_adapter
from edged.align.dpo.step_plan import Kept
from edged.settings.live import Live
from edged.settings.load import AlignSettings, Settings
from tests.align.dpo.test_dpo_exact import (
    BETA,
    ROUNDING,
    WAYS,
    scored_by_base,
    take_step,
    three_users,
    trl_gradients,
    worst_error,
)
from tests.models import DEVICE, tiny_model

INPUTS = ["down_proj", "q_proj", "layers.1.mlp.up_proj"]
FORMS: dict[str, dict[str, PeftConfig]] = {
    "ia3": {
        "ann": IA3Config(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]),
        "bob": IA3Config(target_modules=[*INPUTS, "o_proj", "gate_proj"], feedforward_modules=INPUTS),
        "cyd": LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"),
    },
    "lora": {
        "ann": LoraConfig(r=2, lora_alpha=3, target_modules=["q_proj", "down_proj"], use_rslora=True),
        "bob": LoraConfig(
            r=4,
            lora_alpha=6,
            target_modules=["layers.1.self_attn.v_proj", "layers.2.mlp.up_proj"],
            rank_pattern={"up_proj": 1},
            alpha_pattern={"v_proj": 9},
        ),
        "cyd": IA3Config(target_modules=["layers.2.self_attn.v_proj"], feedforward_modules=[]),
    },
}


def imported(name: str, config: PeftConfig, folder: Path) -> AdapterState:
    """An adapter that PEFT wrote, with random weights."""
    align = AlignSettings(rank=4, alpha=8.0, beta=BETA, loss_threshold=0.0, sft_weight=0.0)
    model = get_peft_model(tiny_model(), config)
    generator = torch.Generator().manual_seed(sum(name.encode()))
    for key, parameter in model.named_parameters():
        if "lora_" in key or "ia3_l" in key:
            parameter.data += torch.empty(parameter.shape).normal_(0.0, 0.1, generator=generator)
    model.save_pretrained(folder / name)
    shapes = {
        key: (module.in_features, module.out_features)
        for key, module in tiny_model().named_modules()
        if isinstance(module, torch.nn.Linear) and key != "lm_head"
    }
    weights, form = read_adapter(folder / name, LoraSpec(shapes, 4, 8.0, "base", "f", tuple(shapes)))
    state = AdapterState(name, form, Live(Settings(align=align)), DEVICE, begin=False)
    state.restore(weights, 1)
    return state


@WAYS
@pytest.mark.parametrize("forms", FORMS.values(), ids=FORMS.keys())
def test_adapters_of_any_form_get_trls_gradients_in_one_step(
    forms: dict[str, PeftConfig], window: int, keep: Kept, tmp_path: Path
) -> None:
    pairs = three_users()
    states = {name: imported(name, config, tmp_path) for name, config in forms.items()}
    made = take_step(tiny_model(), pairs, window, 50, preempt_at=(5, 17), keep=keep, begun=states)
    for name, own in pairs.items():
        scored = scored_by_base("llama", own)
        wanted, loss = trl_gradients(tiny_model(), scored, made.before[name], tmp_path, config=forms[name])
        assert made.members[name].loss == pytest.approx(loss, rel=1e-5)
        assert made.gradients[name].keys() == wanted.keys()
        assert worst_error(made.gradients[name], wanted) <= ROUNDING
        assert made.moved(name).any()
