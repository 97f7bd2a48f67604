"""Adapters of other forms (IA3, DoRA, rsLoRA, other ranks) get TRL's gradients in one step with those of ours."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftConfig, PeftModel, get_peft_model
from transformers import PreTrainedModel

from edged.align.adapters.adapter import AdapterFiles, AdapterState
from edged.align.adapters.form import LoraSpec
from edged.align.adapters.peft_import import read_adapter
from edged.align.dpo.step_plan import Recompute
from edged.engine.lora.linear import LoraSlots
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
    "dora": {
        "ann": LoraConfig(r=4, lora_alpha=6, target_modules="all-linear", use_dora=True),
        "bob": LoraConfig(r=2, target_modules=["q_proj", "down_proj"], use_dora=True, use_rslora=True),
        "cyd": IA3Config(target_modules=["v_proj", "down_proj"], feedforward_modules=["down_proj"]),
    },
}


def base_model() -> PreTrainedModel:
    """A model whose queries, keys and values have biases."""
    model, generator = tiny_model("qwen2"), torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.normal_(0.0, 0.5, generator=generator)
    return model


def lora_spec(made: Callable[[], PreTrainedModel] = base_model) -> LoraSpec:
    base = made().to(DEVICE)
    shapes = {
        key: (module.in_features, module.out_features)
        for key, module in base.named_modules()
        if isinstance(module, torch.nn.Linear) and ".layers." in key
    }
    norms = LoraSlots(base, list(shapes), 1, 4, torch.float32).row_norms
    return LoraSpec(shapes, 4, 8.0, "base", "f", tuple(shapes), row_norms=norms)


def imported(
    name: str, config: PeftConfig, folder: Path, made: Callable[[], PreTrainedModel] = base_model
) -> AdapterState:
    """An adapter of the model `made` that PEFT wrote, with random weights."""
    align = AlignSettings(rank=4, alpha=8.0, beta=BETA, loss_threshold=0.0, sft_weight=0.0)
    model = get_peft_model(made(), config)
    generator = torch.Generator().manual_seed(sum(name.encode()))
    for key, parameter in model.named_parameters():
        if "lora_" in key or "ia3_l" in key:
            parameter.data += torch.empty(parameter.shape).normal_(0.0, 0.1, generator=generator)
    model.save_pretrained(folder / name)
    spec = lora_spec(made)
    weights, form = read_adapter(folder / name, spec)
    state = AdapterState(name, form, Live(Settings(align=align)), DEVICE, begin=False, row_norms=spec.row_norms)
    state.restore(weights, 1)
    return state


@WAYS
@pytest.mark.parametrize("forms", FORMS.values(), ids=FORMS.keys())
def test_adapters_of_any_form_get_trls_gradients_in_one_step(
    forms: dict[str, PeftConfig], window: int, recompute: Recompute, tmp_path: Path
) -> None:
    pairs = three_users()
    states = {name: imported(name, config, tmp_path) for name, config in forms.items()}
    made = take_step(base_model(), pairs, window, 50, preempt_at=(5, 17), recompute=recompute, begun=states)
    for name, own in pairs.items():
        scored = scored_by_base(base_model(), own)
        wanted, loss = trl_gradients(base_model(), scored, made.before[name], tmp_path, config=forms[name])
        assert made.adapter_steps[name].loss == pytest.approx(loss, rel=1e-5)
        assert made.gradients[name].keys() == wanted.keys()
        assert worst_error(made.gradients[name], wanted) <= ROUNDING
        assert made.moved(name).any()


def test_a_dora_adapter_that_learned_is_served_as_peft_answers_and_learns_on_from_disk_as_if_it_had_stayed(
    tmp_path: Path,
) -> None:
    state, pairs = imported("ann", FORMS["dora"]["ann"], tmp_path), three_users()["ann"]
    take_step(base_model(), {"ann": pairs}, 16, 50, begun={"ann": state})
    files = AdapterFiles(tmp_path / "ours", lora_spec(), keep=3)
    path, _ = files.save(state.copied().snapshot())
    peft_model = PeftModel.from_pretrained(base_model(), path).eval()
    for name, norm in state.norms.items():
        layer = peft_model.get_submodule(f"base_model.model.{name}")
        direct = (layer.base_layer.weight + layer.get_delta_weight("default")).norm(dim=1)
        torch.testing.assert_close(norm.cpu(), direct, atol=0, rtol=1e-5)
    found = files.load("ann", 2)
    again = AdapterState("ann", found.form, state.settings, DEVICE, begin=False, row_norms=lora_spec().row_norms)
    again.restore(found.weights, 2, found.optimizer)
    for each in (state, again):
        take_step(base_model(), {"ann": pairs}, 16, 50, begun={"ann": each})
    assert all(torch.equal(again.tensors()[name], value) for name, value in state.tensors().items())
    assert all(torch.equal(again.norms[name], value) for name, value in state.norms.items())
