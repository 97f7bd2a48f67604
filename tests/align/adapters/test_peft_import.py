"""Adapters of other ranks, scalings and targets stay what they are: served, trained, on disk and in exports."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as example_settings
from hypothesis import strategies as st
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from peft.utils.other import get_pattern_key
from safetensors.torch import load_file, save_file

from edged.align.adapters.adapter import AdapterError, AdapterFiles, AdapterState
from edged.align.adapters.form import LoraSpec
from edged.align.adapters.peft_import import CONFIG, WEIGHTS, ImportRefused, _by_linear, read_adapter
from edged.settings.live import Live
from edged.settings.load import Settings
from tests.models import VOCAB, tiny_model

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


def renamed(folder: Path, rename: Any, **more: torch.Tensor) -> Path:
    tensors = load_file(folder / WEIGHTS)
    save_file({rename(name): tensor for name, tensor in tensors.items()} | more, folder / WEIGHTS)
    return folder


BY_HAND = {
    "with the adapter's name": lambda name: name.replace(".weight", ".default.weight"),
    "with another name": lambda name: name.replace(".weight", ".weight_2.weight"),
    "without PEFT's beginning": lambda name: name.removeprefix("base_model.model."),
    "with neither": lambda name: name.removeprefix("base_model.model.").removesuffix(".weight"),
}


@pytest.mark.parametrize("rename", BY_HAND.values(), ids=BY_HAND.keys())
@pytest.mark.parametrize("other", [{}, {"use_dora": True}, {"ia3": True}], ids=["LoRA", "DoRA", "IA3"])
def test_state_dicts_saved_by_hand_are_taken_as_what_they_mean(
    rename: Any, other: dict[str, Any], tmp_path: Path
) -> None:
    if other.pop("ia3", False):
        config = IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])
        get_peft_model(tiny_model(), config).save_pretrained(tmp_path)
    else:
        saved_by_peft(tmp_path, {"r": 4, **other})
    ours = replace(spec(), row_norms=lambda name, a, b, s: torch.ones(b.shape[0]))
    wanted, form = read_adapter(tmp_path, ours)
    found, found_form = read_adapter(renamed(tmp_path, rename), ours)
    assert found_form == form
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def test_two_adapters_in_one_file_are_refused(tmp_path: Path) -> None:
    saved_by_peft(tmp_path, {"r": 4})
    name = next(iter(load_file(tmp_path / WEIGHTS)))
    other = {name.replace(".weight", ".other.weight"): torch.zeros(1)}
    with pytest.raises(ImportRefused, match="are one weight of two adapters: write one of them with peft's save_pre"):
        read_adapter(renamed(tmp_path, lambda name: name, **other), spec())


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "lm_head.base_layer.weight", "lm_head.weight"])
def test_weights_of_the_base_saved_along_are_told_as_such(name: str, tmp_path: Path) -> None:
    saved_by_peft(tmp_path, {"r": 4})
    along = {f"base_model.model.{name}": torch.zeros(VOCAB, 64)}
    with pytest.raises(ImportRefused, match=rf"{name} is no weight of an adapter's linear.*save_embedding_layers=Fal"):
        read_adapter(renamed(tmp_path, lambda name: name, **along), replace(spec(), rank=64))


@given(st.data())
@example_settings(max_examples=200)
def test_keys_of_patterns_fit_as_in_peft(data: st.DataObject) -> None:
    names = [*spec().shapes]
    ends = st.sampled_from(names).flatmap(
        lambda name: st.integers(1, len(name)).map(lambda start: name[-start:]) | st.just(f"^{name}")
    )
    dotted = st.tuples(ends, st.sampled_from(["", "_", "o"])).map(lambda key: key[0].replace(key[1] or "\0", "."))
    keys = data.draw(st.lists(dotted | ends.map(lambda key: key.replace(".", r"\.")), max_size=4, unique=True))
    keys = [key for key in keys if re.fullmatch(r"\^?(\w|\\?\.)+", key)]
    pattern = {key: number + 1.0 for number, key in enumerate(keys)}
    ours = _by_linear({"lora_alpha": 99, "alpha_pattern": pattern}, "lora_alpha", "alpha_pattern")
    assert [ours(name) for name in names] == [pattern.get(get_pattern_key(pattern.keys(), name), 99) for name in names]


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-1", "0", "1e400", "true", "null"])
@pytest.mark.parametrize("field", ["r", "lora_alpha"])
def test_ranks_and_alphas_that_are_no_sizes_are_refused(field: str, number: str, tmp_path: Path) -> None:
    saved_by_peft(tmp_path, {"r": 4})
    config = re.sub(rf'"{field}": \d+', f'"{field}": {number}', (tmp_path / CONFIG).read_text())
    (tmp_path / CONFIG).write_text(config)
    with pytest.raises(ImportRefused, match=f"its {field} is .*: give a number from 0 to 1e"):
        read_adapter(tmp_path, spec())


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 98304\n"


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
def test_an_adapters_file_that_is_a_pointer_of_git_lfs_is_told(name: str, tmp_path: Path) -> None:
    saved_by_peft(tmp_path, {"r": 4})
    (tmp_path / name).write_bytes(POINTER)
    with pytest.raises(ImportRefused, match=f"{name} is a Git LFS pointer, not the file: run `git lfs pull`"):
        read_adapter(tmp_path, spec())


def test_an_adapter_that_broke_off_is_told(tmp_path: Path) -> None:
    saved_by_peft(tmp_path, {"r": 4})
    data = (tmp_path / WEIGHTS).read_bytes()
    for left in (len(data) - 1, len(data) // 2, 100):
        (tmp_path / WEIGHTS).write_bytes(data[:left])
        with pytest.raises(ImportRefused, match=f"{WEIGHTS} broke off: {left:,} of .* bytes are there: download it"):
            read_adapter(tmp_path, spec())
