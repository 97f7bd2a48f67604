"""IA3 adapters in one packed batch with LoRA ones and the base: each answers as PEFT does, on every path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import IA3Config, LoraConfig, PeftConfig, PeftModel, get_peft_model

from edged.align.adapters.adapter import AdapterFiles, AdapterState
from edged.align.adapters.form import LoraSpec
from edged.align.adapters.peft_import import ImportRefused, read_adapter
from edged.align.dpo.decoder import LoraParameters, LoraRows, scaled
from edged.engine.attention.packed_batch import Segment, pack
from edged.engine.attention.paged import IMPLEMENTATION, PagedAttention, attention_pass
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
}
TEXTS = {"usual": list(range(20, 50)), "lora": list(range(90, 99)), None: list(range(60, 77)), "other": [7, 9, 11, 200]}
"""A prompt for each adapter, and one for the base."""


def by_peft(name: str, folder: Path) -> Any:
    """A PEFT model of the base, whose adapter is saved in `folder`."""
    model: Any = get_peft_model(tiny_model("qwen2"), ADAPTERS[name]).eval()
    generator = torch.Generator().manual_seed(sum(name.encode()))
    for key, parameter in model.named_parameters():
        if "lora_" in key or "ia3_l" in key:
            parameter.data += torch.empty(parameter.shape).normal_(0.0, 0.3, generator=generator)
    model.save_pretrained(folder)
    return model


def spec() -> LoraSpec:
    linears = {
        name: (module.in_features, module.out_features)
        for name, module in tiny_model("qwen2").named_modules()
        if isinstance(module, torch.nn.Linear) and name != "lm_head"
    }
    return LoraSpec(linears, 4, 8.0, "base", "f", tuple(linears))


def imported(folder: Path) -> AdapterState:
    weights, form = read_adapter(folder, spec())
    state = AdapterState("ann", form, Live(Settings()), DEVICE, begin=False)
    state.restore(weights, 1)
    return state


def loaded(folder: Path) -> ServedModel:
    """The model with each of `ADAPTERS` in a slot, in which a LoRA and an IA3 adapter were before."""
    base = tiny_model("qwen2").requires_grad_(False).to(DEVICE)
    base.set_attn_implementation(IMPLEMENTATION)
    model = ServedModel(base)
    model.attach_lora(AlignSettings(rank=4), len(ADAPTERS))
    for slot, name in enumerate(ADAPTERS):
        earlier = AdapterState("earlier", spec().form, Live(Settings()), DEVICE)
        with torch.no_grad():
            for _, b in earlier.weights.values():
                b.fill_(0.1)
        former = imported(folder / ("usual" if name == "other" else "other"))
        for state in (earlier, former, imported(folder / name)):
            model.lora.load(slot, state.weights, state.form.scalings)
    return model


def last_logits(model: ServedModel, paths: Backends) -> dict[str | None, torch.Tensor]:
    """Logits after each text, whose last token is a decode of its own; all in one batch."""
    kv = model.new_kv(5 * len(TEXTS), 8)
    slots = {name: slot for slot, name in enumerate(ADAPTERS)}
    with torch.inference_mode():
        for last in (False, True):
            segments = []
            for index, (name, ids) in enumerate(TEXTS.items()):
                own = slice(len(ids) - 1, None) if last else slice(0, len(ids) - 1)
                pages, slot = np.arange(1, 5) + 4 * index, slots.get(name or "", NO_SLOT)
                segments.append(Segment(ids[own], own.start, pages, slot, own.start, samples=True))
            batch = pack(segments, kv, DEVICE, paths.tile_tokens, lora=paths.decode == "triton")
            attention = attention_pass(PagedAttention(batch, kv, paths.decode))
            with attention, model.lora.packed(batch.runs, batch.lora_tiles):
                logits = model.forward(batch.input_ids, batch.position_ids, batch.logit_rows).cpu()
    return dict(zip(TEXTS, logits, strict=True))


@pytest.mark.parametrize("path", ["torch", "native", "packed", "triton"])
def test_ia3_and_lora_adapters_answer_as_peft_does_in_one_batch(
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
    got = last_logits(model, Backends("triton", 8) if path == "triton" else Backends())
    for name, ids in TEXTS.items():
        peft_model = theirs[name] if name else tiny_model("qwen2")
        wanted = peft_model(input_ids=torch.tensor([ids])).logits[0, -1]
        torch.testing.assert_close(got[name], wanted, atol=2e-4, rtol=1e-4)
    assert not shortened, "whole layers by the compiled kernels scale nothing"


@pytest.mark.parametrize("side", [0, 1], ids=["inputs", "outputs"])
def test_in_16_bits_a_vector_near_1_is_trained_as_it_is_served(side: int) -> None:
    torch.manual_seed(0)
    base = torch.nn.Linear(64, 64, bias=False).to(torch.bfloat16).requires_grad_(False)
    model = torch.nn.Sequential(base)
    slots = LoraSlots(model, ["0"], 1, 4, torch.bfloat16)
    weights = {"0": (torch.full((64, 1) if side else (1, 64), 1.003),)}
    slots.load(0, weights, {"0": 1.0})
    x = torch.randn(1, 4096, 64).to(torch.bfloat16)
    leaves = LoraParameters(scaled(weights, {"0": 1.0}, torch.bfloat16), {"0": 1.0}, {})
    plain = base(x).float()
    with torch.inference_mode(), slots.packed([(0, 4096, 0)]):
        served = model(x).float()
    with slots.training([LoraRows(0, 4096, leaves)]):
        trained = model(x).float()
    for got in (served, trained):
        assert float((got * plain).sum() / plain.square().sum()) == pytest.approx(1.003, abs=5e-4)


@pytest.mark.parametrize("name", ["usual", "other"])
def test_an_ia3_export_answers_the_same_in_peft(name: str, tmp_path: Path) -> None:
    model = by_peft(name, tmp_path / "theirs")
    files = AdapterFiles(tmp_path / "ours", spec(), keep=3)
    path, _ = files.save(imported(tmp_path / "theirs").copied().snapshot())
    ids = torch.arange(20)[None]
    exported = PeftModel.from_pretrained(tiny_model("qwen2"), path).eval()
    torch.testing.assert_close(exported(ids).logits, model(ids).logits, atol=0, rtol=0)
    assert files.load("ann", 1).form == imported(tmp_path / "theirs").form
    if name == "usual":
        config = IA3Config.from_pretrained(path)
        assert config.target_modules == {"k_proj", "v_proj", "down_proj"}
        assert config.feedforward_modules == {"down_proj"}


def test_a_vector_of_another_length_is_refused(tmp_path: Path) -> None:
    by_peft("usual", tmp_path)
    narrow = {name: (fan_in, fan_out - 1) for name, (fan_in, fan_out) in spec().shapes.items()}
    needed = r"k_proj\.ia3_l has the shape \(32, 1\), this model needs \(31, 1\), or \(1, 64\) to scale inputs"
    with pytest.raises(ImportRefused, match=needed):
        read_adapter(tmp_path, LoraSpec(narrow, 4, 8.0, "base", "f", tuple(narrow)))
