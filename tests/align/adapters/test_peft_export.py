"""Adapters of a wrapper's text decoder leave with the wrapper's names, and come back with either's."""

from __future__ import annotations

import io
import json
import re
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from benchmarks.support.architectures import ARCHITECTURES
from edged.align.adapters.adapter import AdapterFiles, AdapterState, Snapshot
from edged.align.adapters.form import LoraSpec
from edged.align.adapters.peft_export import exported
from edged.align.adapters.peft_import import CONFIG, WEIGHTS, ImportRefused, read_adapter
from edged.engine.build import lora_spec
from edged.engine.model.loading import load_pretrained, target_linears
from edged.settings.live import Live
from edged.settings.load import AlignSettings, ModelSettings, Settings

KNOWN = {each.name: each for each in ARCHITECTURES if each.text}
ALIGN = AlignSettings(rank=4, alpha=8.0)
NEW, OLD = "model.language_model.", "language_model.model."
"""Beginnings of the text decoder's names in wrappers, since transformers 4.52 and before."""
IDS = torch.arange(3, 60)[None]


def base(folder: Path, name: str) -> tuple[Any, LoraSpec]:
    """The text decoder that is served of a tiny wrapper, and its adapters' configuration."""
    KNOWN[name].save(folder)
    model, wrapper = load_pretrained(str(folder), ModelSettings(device="cpu"), "eager")
    linears = {
        target: model.get_submodule(target) for target in target_linears(model, "all-linear") if ".layers." in target
    }
    shapes = {target: (linear.in_features, linear.out_features) for target, linear in linears.items()}
    return model, lora_spec(shapes, "tiny", str(folder), "f", ALIGN, wrapper=wrapper)


def whole(folder: Path) -> Any:
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def unpacked(folder: Path, version: Path, spec: LoraSpec) -> Path:
    with tarfile.open(fileobj=io.BytesIO(b"".join(exported(version, spec)))) as tar:
        tar.extractall(folder, filter="data")
    return folder


def answers(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits


def trained(files: AdapterFiles, spec: LoraSpec) -> tuple[AdapterState, Path]:
    """An adapter as if it had learned, and the folder of its version on disk."""
    state = AdapterState("ann", spec.form, Live(Settings(align=ALIGN)), torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _, b in state.weights.values():
            b.copy_(torch.empty(b.shape).normal_(0.0, 0.3, generator=generator))
    state.version = 1
    path, _ = files.save(state.copied().snapshot())
    return state, path


def with_updates(model: Any, state: AdapterState) -> torch.Tensor:
    """Logits of the text decoder with W + sBA in each linear."""
    with torch.no_grad():
        for name, (a, b) in state.weights.items():
            model.get_submodule(name).weight += ALIGN.alpha / ALIGN.rank * b @ a
    return answers(model)


@pytest.mark.parametrize("name", ["gemma3 (with towers)", "qwen3_vl", "smolvlm", "gemma4 (as released)"])
def test_peft_loads_an_export_over_the_released_class_with_the_answers_that_are_served(
    tmp_path: Path, name: str, recwarn: pytest.WarningsRecorder
) -> None:
    model, spec = base(tmp_path / "base", name)
    state, version = trained(AdapterFiles(tmp_path / "files", spec, 3), spec)
    folder = unpacked(tmp_path / "export", version, spec)
    plain, peft = whole(tmp_path / "base"), PeftModel.from_pretrained(whole(tmp_path / "base"), folder)
    assert not [str(each.message) for each in recwarn if "missing adapter keys" in str(each.message)]
    # Of the towers, which have linears of the same names, none is adapted.
    assert {key.partition(".lora_")[0] for key in peft.state_dict() if ".lora_" in key} == {
        f"base_model.model.{spec.exported(linear)}" for linear in spec.shapes
    }
    served = with_updates(model, state)
    assert (answers(peft) - served).abs().max() < 1e-4
    assert (answers(plain) - served).abs().max() > 0.1
    again, form = read_adapter(folder, spec)
    assert not form.imported
    assert again.keys() == state.tensors().keys()
    assert all(torch.equal(again[key], tensor) for key, tensor in state.tensors().items())


OTHERS = {
    "patterns": LoraConfig(
        r=2,
        lora_alpha=4,
        rank_pattern={"^model.language_model.layers.0.self_attn.q_proj": 4, "layers.1.mlp.up_proj": 3},
        alpha_pattern={r"model\.language_model\.layers\.1\.self_attn\.v_proj": 3.0, "down_proj": 1.0},
        target_modules=r".*language_model.*(q_proj|v_proj|up_proj|down_proj)",
    ),
    "IA3": IA3Config(
        target_modules=r".*language_model.*(k_proj|v_proj|down_proj)",
        feedforward_modules=r".*language_model.*down_proj",
    ),
}


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LoraSpec]:
    folder = tmp_path_factory.mktemp("llava")
    return folder, base(folder, "llava")[1]


def saved_by_peft(folder: Path, model_dir: Path, config: Any, beginning: str) -> torch.Tensor:
    """Save an adapter of the wrapper with other `beginning`s of its names; return its logits."""
    peft: Any = get_peft_model(whole(model_dir), config)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in peft.named_parameters():
        if "lora_B" in name or "ia3" in name:
            parameter.data.normal_(1.0 if "ia3" in name else 0.0, 0.3, generator=generator)
    peft.save_pretrained(folder)
    told, tensors = json.loads((folder / CONFIG).read_text()), load_file(folder / WEIGHTS)
    for field in ("rank_pattern", "alpha_pattern"):
        patterns = json.dumps(told.get(field)).replace(NEW, beginning)
        told[field] = json.loads(patterns.replace(*(json.dumps(re.escape(each))[1:-1] for each in (NEW, beginning))))
    (folder / CONFIG).write_text(json.dumps(told))
    assert all(f".{NEW}" in key for key in tensors)
    renamed = {key.replace(NEW, beginning): tensor for key, tensor in tensors.items()}
    save_file(renamed, folder / WEIGHTS, {"format": "pt"})
    return answers(peft)


@pytest.mark.parametrize(
    ("kind", "beginning"), [("patterns", NEW), ("patterns", "model."), ("patterns", OLD), ("IA3", OLD)]
)
def test_an_import_takes_names_of_wrappers_and_of_the_text_decoder_and_an_export_loads_again(
    tmp_path: Path, llava: tuple[Path, LoraSpec], kind: str, beginning: str
) -> None:
    model_dir, spec = llava
    wanted = saved_by_peft(tmp_path / "peft", model_dir, OTHERS[kind], beginning)
    weights, form = read_adapter(tmp_path / "peft", spec)
    files = AdapterFiles(tmp_path / "files", spec, 3)
    version, _ = files.save(Snapshot("ann", 1, weights, {}, form))
    files.check("ann", 1)
    loaded: Any = PeftModel.from_pretrained(whole(model_dir), unpacked(tmp_path / "back", version, spec))
    assert (answers(loaded) - wanted).abs().max() < 1e-4
    assert (answers(whole(model_dir)) - wanted).abs().max() > 0.01


def test_a_tower_in_an_adapter_is_refused_by_its_name(tmp_path: Path, llava: tuple[Path, LoraSpec]) -> None:
    model_dir, spec = llava
    peft: Any = get_peft_model(whole(model_dir), LoraConfig(r=2, target_modules=["q_proj"]))
    peft.save_pretrained(tmp_path)
    named = r"base_model\.model\.model\.vision_tower.*q_proj\.lora_A\.weight is no part of this model's adapters"
    with pytest.raises(ImportRefused, match=named):
        read_adapter(tmp_path, spec)


def test_a_model_that_is_no_wrapper_leaves_as_it_lies_on_disk(tmp_path: Path) -> None:
    spec = LoraSpec({"model.layers.0.q_proj": (8, 8)}, 4, 8.0, "tiny", "f", ("q_proj",))
    _, version = trained(AdapterFiles(tmp_path / "files", spec, 3), spec)
    folder = unpacked(tmp_path / "export", version, spec)
    for name in (CONFIG, WEIGHTS):
        assert (folder / name).read_bytes() == (version / name).read_bytes()
