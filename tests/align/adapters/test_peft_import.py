"""Adapters of other ranks, scalings and targets stay what they are: served, trained, on disk and in exports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from edged.align.adapters.adapter import AdapterError, AdapterFiles, AdapterState
from edged.align.adapters.form import LoraSpec
from edged.align.adapters.peft_import import CONFIG, read_adapter
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


def spec(rank: int = 8) -> LoraSpec:
    linears = {
        name: (module.in_features, module.out_features)
        for name, module in tiny_model().named_modules()
        if isinstance(module, torch.nn.Linear) and name != "lm_head"
    }
    return LoraSpec(linears, rank, 16.0, "base", "f", tuple(linears))


def saved_by_peft(folder: Path, other: dict[str, Any]) -> Any:
    """A PEFT model whose adapter, which is saved in `folder`, changes its answers."""
    model: Any = get_peft_model(tiny_model(), LoraConfig(**{"target_modules": "all-linear"} | other)).eval()
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0.0, 0.3, generator=generator)
    model.save_pretrained(folder)
    return model


def imported(folder: Path, ours: LoraSpec) -> AdapterState:
    weights, form = read_adapter(folder, ours)
    state = AdapterState("ann", form, Live(Settings()), torch.device("cpu"), begin=False)
    state.restore(weights, 1)
    return state


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS.keys())
def test_an_import_is_exported_as_it_is_and_answers_the_same_in_peft(other: dict[str, Any], tmp_path: Path) -> None:
    model = saved_by_peft(tmp_path / "theirs", other)
    ours = spec()
    state = imported(tmp_path / "theirs", ours)
    for linear, (a, b) in state.weights.items():
        theirs = model.get_submodule(f"base_model.model.{linear}").get_delta_weight("default")
        torch.testing.assert_close(state.form.scalings[linear] * b @ a, theirs, atol=1e-6, rtol=1e-5)
    files = AdapterFiles(tmp_path / "ours", ours, keep=3)
    path, _ = files.save(state.copied().snapshot())
    wanted, found = (LoraConfig.from_pretrained(folder) for folder in (tmp_path / "theirs", path))
    for field in ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules"):
        assert getattr(found, field) == getattr(wanted, field), field
    ids = torch.arange(20)[None]
    exported = PeftModel.from_pretrained(tiny_model(), path).eval()
    torch.testing.assert_close(exported(ids).logits, model(ids).logits, atol=0, rtol=0)
    again = files.load("ann", 1)
    assert again.form == state.form
    assert all(torch.equal(again.weights[name], value) for name, value in state.tensors().items())


def test_of_patterns_the_first_that_fits_is_the_first_in_an_export_too(tmp_path: Path) -> None:
    saved_by_peft(tmp_path / "theirs", {"r": 2})
    config = json.loads((tmp_path / "theirs" / CONFIG).read_text())
    config["alpha_pattern"] = {"layers.0.mlp.down_proj": 4, "down_proj": 8}
    (tmp_path / "theirs" / CONFIG).write_text(json.dumps(config))
    state = imported(tmp_path / "theirs", spec())
    path, _ = AdapterFiles(tmp_path / "ours", spec(), keep=3).save(state.copied().snapshot())
    assert state.form.scalings["model.layers.0.mlp.down_proj"] == 2.0
    assert read_adapter(path, spec())[1].scalings == state.form.scalings


def test_a_version_that_settings_no_longer_admit_is_not_served(tmp_path: Path) -> None:
    saved_by_peft(tmp_path / "theirs", OTHERS["a lower rank"])
    snapshot = imported(tmp_path / "theirs", spec()).copied().snapshot()
    AdapterFiles(tmp_path / "ours", spec(), keep=3).save(snapshot)
    assert AdapterFiles(tmp_path / "ours", spec(rank=16), keep=3).newest("ann") == (1, [])
    with pytest.raises(AdapterError, match=r"imported under other settings: its rank is 3, align\.rank is 2"):
        AdapterFiles(tmp_path / "ours", spec(rank=2), keep=3).load("ann", 1)


def test_an_import_learns_in_its_own_rank_and_linears(tmp_path: Path) -> None:
    get_peft_model(tiny_model(), LoraConfig(**OTHERS["few targets"])).save_pretrained(tmp_path)
    state = imported(tmp_path, spec())
    before = state.tensors()
    gradients = {name: (torch.ones_like(a), torch.ones_like(b)) for name, (a, b) in state.weights.items()}
    state.step(gradients, 1)
    assert {name.rpartition(".")[2] for name in state.weights} == {"q_proj", "v_proj"}
    assert {a.shape[0] for a, _ in state.weights.values()} == {4}
    assert not any(torch.equal(before[name], value) for name, value in state.tensors().items())
