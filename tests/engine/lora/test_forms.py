"""IA3 and DoRA adapters in one packed batch with LoRA ones and the base: each answers as PEFT does, on every path."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import IA3Config, LoraConfig, PeftConfig, PeftModel, get_peft_model
from transformers import PreTrainedModel

from edged.align.adapters.adapter import AdapterFiles, AdapterState
from edged.align.adapters.form import LoraSpec, served
from edged.align.adapters.peft_import import ImportRefused, read_adapter
from edged.align.dpo.decoder import LoraParameters, LoraRows, with_scaling
from edged.engine.attention.packed_batch import Segment, pack
from edged.engine.attention.paged import IMPLEMENTATION, attention_over, attention_pass
from edged.engine.attention.selection import Backends
from edged.engine.lora.linear import LoraSlots
from edged.engine.lora.segments import NO_SLOT
from edged.engine.model.cpu_layers import ShortLayer, shorten_layers
from edged.engine.model.served_model import ServedModel
from edged.engine.native.library import kernels, why_no_kernels
from edged.settings.live import Live
from edged.settings.load import AlignSettings, Settings
from tests.models import DEVICE, tiny_model

INPUTS = ["down_proj", "q_proj", "layers.1.mlp.up_proj"]
ADAPTERS: dict[str, PeftConfig] = {
    "usual": IA3Config(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "lora": LoraConfig(r=3, lora_alpha=8, target_modules="all-linear"),
    "other": IA3Config(target_modules=[*INPUTS, "o_proj", "layers.0.mlp.gate_proj"], feedforward_modules=INPUTS),
    "dora": LoraConfig(r=4, lora_alpha=6, target_modules="all-linear", use_dora=True),
    "rsdora": LoraConfig(r=2, lora_alpha=3, target_modules=["k_proj", "down_proj"], use_dora=True, use_rslora=True),
}
TEXTS = {
    "usual": list(range(20, 50)),
    "lora": list(range(90, 99)),
    None: list(range(60, 77)),
    "other": [7, 9, 11, 200],
    "dora": list(range(3, 17)),
    "rsdora": list(range(120, 145)),
}
"""A prompt for each adapter, and one for the base."""


def base() -> PreTrainedModel:
    """A model whose queries, keys and values have biases."""
    model, generator = tiny_model("qwen2"), torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.normal_(0.0, 0.5, generator=generator)
    return model


def by_peft(name: str, folder: Path) -> Any:
    """A PEFT model of the base, whose adapter is saved in `folder`."""
    model: Any = get_peft_model(base(), ADAPTERS[name]).eval()
    generator = torch.Generator().manual_seed(sum(name.encode()))
    for key, parameter in model.named_parameters():
        if "lora_" in key or "ia3_l" in key:
            parameter.data += torch.empty(parameter.shape).normal_(0.0, 0.3, generator=generator)
    model.save_pretrained(folder)
    return model


def spec() -> LoraSpec:
    model = base().to(DEVICE)
    linears = {
        name: (module.in_features, module.out_features)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name != "lm_head"
    }
    slots = LoraSlots(model, list(linears), 1, 4, torch.float32)
    return LoraSpec(linears, 4, 8.0, "base", "f", tuple(linears), row_norms=slots.row_norms)


def imported(folder: Path) -> AdapterState:
    ours = spec()
    weights, form = read_adapter(folder, ours)
    state = AdapterState("ann", form, Live(Settings()), DEVICE, begin=False, row_norms=ours.row_norms)
    state.restore(weights, 1)
    return state


def loaded(folder: Path) -> ServedModel:
    """The model with each of `ADAPTERS` in a slot, in which adapters of other forms were before."""
    own = base().requires_grad_(False).to(DEVICE)
    own.set_attn_implementation(IMPLEMENTATION)
    model = ServedModel(own)
    model.attach_lora(AlignSettings(rank=4), len(ADAPTERS))
    for slot, name in enumerate(ADAPTERS):
        earlier = AdapterState("earlier", spec().form, Live(Settings()), DEVICE)
        with torch.no_grad():
            for _, b in earlier.weights.values():
                b.fill_(0.1)
        former = [imported(folder / other) for other in ("usual", "other", "dora") if other != name]
        for state in (earlier, *former, imported(folder / name)):
            model.lora.load(slot, state.served, state.form.scalings)
    return model


def last_logits(
    model: ServedModel, paths: Backends, texts: dict[str | None, list[int]] = TEXTS
) -> dict[str | None, torch.Tensor]:
    """Logits after each text, whose last token is a decode of its own; all in one batch."""
    kv = model.new_kv(5 * len(TEXTS), 8)
    slots = {name: slot for slot, name in enumerate(ADAPTERS)}
    with torch.inference_mode():
        for last in (False, True):
            segments = []
            for index, (name, ids) in enumerate(texts.items()):
                own = slice(len(ids) - 1, None) if last else slice(0, len(ids) - 1)
                pages, slot = np.arange(1, 5) + 4 * index, slots.get(name or "", NO_SLOT)
                segments.append(Segment(ids[own], own.start, pages, slot, own.start, samples=True))
            batch = pack(segments, kv, DEVICE, paths.tile_tokens, lora=paths.decode == "triton")
            attention = attention_pass(attention_over(batch, kv, paths.decode))
            with attention, model.lora.packed(batch.runs, batch.lora_tiles):
                logits = model.forward(batch.input_ids, batch.position_ids, batch.logit_rows).cpu()
    return dict(zip(texts, logits, strict=True))


@pytest.mark.parametrize("path", ["torch", "native", "packed", "triton"])
def test_adapters_of_all_forms_answer_as_peft_does_in_one_batch(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (path == "triton") != (DEVICE.type == "cuda"):
        pytest.skip("Triton is for a GPU, the other paths for the CPU")
    if path in ("native", "packed") and kernels() is None:
        pytest.skip(why_no_kernels())
    theirs = {name: by_peft(name, tmp_path / name) for name in ADAPTERS}
    model, shortened = loaded(tmp_path), []
    model.lora.runs.kernel = "native" if path == "packed" else path  # type: ignore[assignment]
    if path == "packed":
        assert model.pack_weights() == shorten_layers(model) == ""
        monkeypatch.setattr(ShortLayer, "short", lambda *_: shortened.append(1))
    paths = Backends("triton", 8) if path == "triton" else Backends()
    got = last_logits(model, paths)
    for name, ids in TEXTS.items():
        peft_model = theirs[name] if name else base()
        wanted = peft_model(input_ids=torch.tensor([ids])).logits[0, -1]
        torch.testing.assert_close(got[name], wanted, atol=2e-4, rtol=1e-4)
        if name and path != "packed":
            alone = last_logits(model, paths, {name: ids})[name]
            torch.testing.assert_close(alone, got[name], atol=5e-5, rtol=1e-5)
    assert not shortened, "whole layers by the compiled kernels scale nothing"


@pytest.mark.parametrize("form", ["inputs", "outputs", "dora"])
def test_in_16_bits_factors_near_1_are_trained_as_they_are_served(form: str) -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(64, 64, bias=False).to(torch.bfloat16).requires_grad_(False)
    model = torch.nn.Sequential(linear)
    slots = LoraSlots(model, ["0"], 1, 4, torch.bfloat16)
    norms = linear.weight.float().norm(dim=1)
    matrices = torch.randn(4, 64), 1e-6 * torch.randn(64, 4)
    forms = {
        "inputs": (torch.full((1, 64), 1.003),),
        "outputs": (torch.full((64, 1), 1.003),),
        "dora": (matrices[0], 1.003 * norms, matrices[1]),
    }
    weights = served({"0": forms[form]}, {"0": slots.row_norms("0", *matrices, 1.0)})
    slots.load(0, weights, {"0": 1.0})
    x = torch.randn(1, 4096, 64).to(torch.bfloat16)
    leaves = LoraParameters(with_scaling(weights, {"0": 1.0}, torch.bfloat16), {"0": 1.0}, {})
    plain = linear(x).float()
    with torch.inference_mode(), slots.packed([(0, 4096, 0)]):
        answered = model(x).float()
    with slots.training([LoraRows(0, 4096, leaves)]):
        trained = model(x).float()
    for got in (answered, trained):
        assert float((got * plain).sum() / plain.square().sum()) == pytest.approx(1.003, abs=5e-4)


def test_norms_are_those_of_the_merged_weights(tmp_path: Path) -> None:
    model = by_peft("dora", tmp_path)
    state = imported(tmp_path)
    assert len(state.norms) == len(spec().shapes)
    for name, norm in state.norms.items():
        layer = model.get_submodule(f"base_model.model.{name}")
        direct = (layer.base_layer.weight + layer.get_delta_weight("default")).norm(dim=1)
        torch.testing.assert_close(norm.cpu(), direct, atol=0, rtol=1e-5)


def test_rows_that_nearly_cancel_have_their_norms() -> None:
    torch.manual_seed(0)
    linear, (a, b) = torch.nn.Linear(600, 600, bias=False), (torch.randn(8, 600), torch.randn(600, 8))
    linear.weight.data = b @ a
    slots = LoraSlots(torch.nn.Sequential(linear), ["0"], 1, 8, torch.float32)
    norms = slots.row_norms("0", a, -(1 - 1e-4) * b / 2, 2.0)
    torch.testing.assert_close(norms, 1e-4 * linear.weight.detach().norm(dim=1), atol=0, rtol=1e-2)


def test_rows_of_zeros_stay_zero() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8))
    model[0].weight.data[3] = 0.0
    slots = LoraSlots(model, ["0"], 1, 2, torch.float32)
    a, b = torch.ones(2, 8), torch.zeros(8, 2)
    weights = served({"0": (a, model[0].weight.detach().norm(dim=1), b)}, {"0": slots.row_norms("0", a, b, 1.0)})
    slots.load(0, weights, {"0": 1.0})
    x = torch.randn(1, 5, 8)
    with torch.inference_mode():
        wanted = model(x)
        with slots.packed([(0, 5, 0)]):
            torch.testing.assert_close(model(x), wanted)


@pytest.mark.parametrize("name", ["usual", "other", "dora", "rsdora"])
def test_an_export_answers_the_same_in_peft(name: str, tmp_path: Path) -> None:
    model = by_peft(name, tmp_path / "theirs")
    files = AdapterFiles(tmp_path / "ours", spec(), keep=3)
    path, _ = files.save(imported(tmp_path / "theirs").copied().snapshot())
    ids = torch.arange(20)[None]
    exported = PeftModel.from_pretrained(base(), path).eval()
    torch.testing.assert_close(exported(ids).logits, model(ids).logits, atol=0, rtol=0)
    assert files.load("ann", 1).form == imported(tmp_path / "theirs").form
    if name == "usual":
        config = IA3Config.from_pretrained(path)
        assert config.target_modules == {"k_proj", "v_proj", "down_proj"}
        assert config.feedforward_modules == {"down_proj"}


def test_dora_is_refused_where_the_weights_are_quantized(tmp_path: Path) -> None:
    by_peft("dora", tmp_path)
    with pytest.raises(
        ImportRefused, match=r"use_dora = true is not supported here: .* which are quantized; train one"
    ):
        read_adapter(tmp_path, replace(spec(), row_norms=None))


def test_values_that_overflow_in_the_slots_type_are_refused(tmp_path: Path) -> None:
    model = by_peft("usual", tmp_path)
    name = "layers.1.self_attn.v_proj"
    model.get_submodule(f"base_model.model.model.{name}").ia3_l["default"].data[3] = 1e5
    model.save_pretrained(tmp_path)
    read_adapter(tmp_path, spec())
    with pytest.raises(ImportRefused, match=rf"{name}\.ia3_l holds values .* too large for torch\.float16 as they are"):
        read_adapter(tmp_path, replace(spec(), dtype=torch.float16))


def test_a_vector_of_another_length_is_refused(tmp_path: Path) -> None:
    by_peft("usual", tmp_path)
    narrow = {name: (fan_in, fan_out - 1) for name, (fan_in, fan_out) in spec().shapes.items()}
    needed = r"k_proj\.ia3_l has the shape \(32, 1\), this model needs \(31, 1\), or \(1, 64\) to scale inputs"
    with pytest.raises(ImportRefused, match=needed):
        read_adapter(tmp_path, LoraSpec(narrow, 4, 8.0, "base", "f", tuple(narrow)))
