"""Decodes pass layers of the common kind with few launches, with the same result; others are left alone.

Where no GPU is, Triton's kernels run in its interpreter.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from edged.align.dpo.decoder import Branches
from edged.align.dpo.layout import Piece
from edged.engine.attention.packed_batch import Segment, pack
from edged.engine.attention.paged import IMPLEMENTATION, attention_over, attention_pass
from edged.engine.attention.selection import Backends
from edged.engine.kv.store import KvStore
from edged.engine.lora.segments import NO_SLOT
from edged.engine.model.layer_access import PagedDecoder
from edged.engine.model.served_model import ServedModel
from edged.settings.load import AlignSettings, ModelSettings
from tests.engine.harness import random_ids, random_pairs, request, running_engine, wait_idle
from tests.models import save_tiny, tiny_model

pytest.importorskip("triton")
from edged.engine.model import gpu_layers
from edged.engine.model.gpu_layers import FusedLayer, fuse_layers

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PAGE = 8


def tiny(kind: str, dtype: torch.dtype = torch.float32, layers: int = 1, **changes: Any) -> PreTrainedModel:
    model = tiny_model(kind, **{"num_hidden_layers": layers, "layer_types": None, **changes})
    return model.to(DEVICE, dtype).requires_grad_(False)


def served_model(base: PreTrainedModel | None = None, **align: Any) -> ServedModel:
    """With random adapters in slots 0 and 1 of two; of a Llama by default."""
    base = base or tiny("llama")
    base.set_attn_implementation(IMPLEMENTATION)
    model = ServedModel(base)
    model.attach_lora(AlignSettings(**{"rank": 4, **align}), 2)
    model.lora.runs.kernel = "triton"
    for number, linear in enumerate(model.lora.linears.values()):
        for slots in (linear.down, linear.up):
            slots.normal_(0.0, 0.2, generator=torch.Generator(DEVICE).manual_seed(number))
    return model


def answers(model: ServedModel, slots: list[int], last: int = 1) -> tuple[torch.Tensor, KvStore]:
    """Logits of the `last` tokens of texts, one under each slot, over pages that hold what comes before these; and
    the pages. One last token is a decode."""
    kv = model.new_kv(8 * len(slots) + 1, PAGE)
    texts = [random_ids(20 + last + 7 * index, index) for index in range(len(slots))]
    with torch.inference_mode():
        for own in (slice(None, -last), slice(-last, None)):
            segments = []
            for index, (ids, slot) in enumerate(zip(texts, slots, strict=True)):
                first = range(len(ids))[own].start
                pages = np.arange(8 * index, 8 * index + 8) + 1
                segments.append(Segment(ids[own], first, pages, slot, first, samples=True))
            batch = pack(segments, kv, DEVICE, lora=True)
            with attention_pass(attention_over(batch, kv, "triton")), model.lora.packed(batch.runs, batch.lora_tiles):
                logits = model.forward(batch.input_ids, batch.position_ids, batch.logit_rows)
    return logits, kv


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of every layer that was computed with few launches."""
    seen: list[int] = []
    own = FusedLayer.fused

    def computed(layer: FusedLayer, x: torch.Tensor, *more: Any) -> torch.Tensor:
        seen.append(len(x))
        return own(layer, x, *more)

    monkeypatch.setattr(FusedLayer, "fused", computed)
    return seen


KINDS = ["llama", "qwen3", "gemma3_text", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("qwen2", "gemma2"))]


@pytest.mark.parametrize("kind", KINDS)
def test_decodes_get_the_answers_of_the_models_own_layers(kind: str, fused: list[int]) -> None:
    model, slots = served_model(tiny(kind)), [1, NO_SLOT, 0]
    wanted = answers(model, slots), answers(model, [NO_SLOT])
    assert fuse_layers(model, PAGE) == ""
    fused.clear()
    for (logits, kv), own in zip(wanted, (slots, [NO_SLOT]), strict=True):
        got, stored = answers(model, own)
        torch.testing.assert_close(got, logits, atol=1e-4, rtol=1e-4)
        for a, b in zip(stored.stores, kv.stores, strict=True):
            torch.testing.assert_close((a.keys, a.values), (b.keys, b.values), atol=1e-5, rtol=1e-5)
    assert fused == [3, 1]


@pytest.mark.parametrize("targets", [["q_proj", "v_proj", "up_proj"], ["k_proj", "gate_proj", "down_proj"]])
def test_some_linears_have_adapters_and_some_have_none(targets: list[str], fused: list[int]) -> None:
    model = served_model(target_modules=targets)
    wanted, _ = answers(model, [1, 0])
    assert fuse_layers(model, PAGE) == ""
    fused.clear()
    torch.testing.assert_close(answers(model, [1, 0])[0], wanted, atol=1e-4, rtol=1e-4)
    assert fused == [2]


def test_prompts_and_gradients_go_the_layers_own_way_over_weights_that_are_kept_once(fused: list[int]) -> None:
    model = served_model()

    def gradient() -> torch.Tensor:
        hidden = torch.linspace(-1, 1, 128, device=DEVICE).view(2, 64).requires_grad_()
        decoder = PagedDecoder(model, model.new_kv(2, PAGE))
        _, calls = decoder.begin(torch.tensor([3, 4], device=DEVICE), torch.tensor([0, 1], device=DEVICE))
        branches = [Branches(0, 2, 0, (Piece(0, 2, 0, None),), None)]
        decoder.run_branches(0, hidden, calls[0], branches, [])[0].sum().backward()
        assert hidden.grad is not None
        return hidden.grad

    wanted, own = answers(model, [0], last=5)[0], gradient()
    assert fuse_layers(model, PAGE) == ""
    fused.clear()
    assert torch.equal(answers(model, [0], last=5)[0], wanted)
    assert torch.equal(gradient(), own)
    assert not fused
    weights = [module.weight for name, module in model.lora.linears.items() if ".0." in name]
    # q, k and v lie in one tensor, and so do gate and up; nothing else lies there.
    tensors = {weight.untyped_storage().data_ptr(): weight.untyped_storage().nbytes() for weight in weights}
    assert len(tensors) == 4
    assert sum(tensors.values()) == sum(weight.nbytes for weight in weights)


OTHERS = {
    "phi3": ({}, "Phi3Attention has no q_proj"),
    "gpt_oss": ({}, "GptOssDecoderLayer turns other parts of its heads"),
    "gemma4_text": (
        {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
        "layers have heads of unlike shapes",
    ),
    "llama": ({"hidden_act": "quick_gelu"}, "QuickGELUActivation is none of silu, gelu"),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_layers_of_another_kind_are_left_alone_and_it_is_said_why(kind: str) -> None:
    changes, reason = OTHERS[kind]
    # In 16 bits activations that are not the same differ by little.
    model = served_model(tiny(kind, torch.bfloat16, **changes))
    assert fuse_layers(model, PAGE) == reason
    assert not any("forward" in layer.__dict__ for layer in model.layers)


def test_quantized_layers_are_left_alone(tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    settings = ModelSettings(quantize="int8", device=DEVICE.type, dtype="float32")
    model = ServedModel.load(save_tiny(tmp_path, num_hidden_layers=1), settings)
    model.attach_lora(AlignSettings(), 2)
    assert fuse_layers(model, PAGE) == "its linears (FrozenLinear) are not plain and frozen, in torch.float32"


def test_a_layer_that_does_more_than_its_parts_say_is_left_alone_by_the_trial() -> None:
    model = served_model(tiny("llama", layers=2))
    mlp = model.layers[1].mlp
    own = mlp.forward  # type: ignore[union-attr]
    mlp.forward = lambda x: 1.01 * own(x)  # type: ignore[union-attr]
    assert fuse_layers(model, PAGE) == "LlamaDecoderLayer computes something else"
    assert ["forward" in layer.__dict__ for layer in model.layers] == [True, False]


def test_kernels_that_do_not_run_leave_all_layers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("PTXAS error")

    model = served_model()
    monkeypatch.setattr(gpu_layers.triton, "activate", broken)
    assert fuse_layers(model, PAGE) == "its kernels do not run here: PTXAS error"
    assert not any("forward" in layer.__dict__ for layer in model.layers)


def test_an_adapter_whose_numbers_are_not_finite_leaves_the_pages_that_the_layers_own_way_leaves() -> None:
    model = served_model()
    for linear in model.lora.linears.values():
        linear.up[1].fill_(float("nan"))  # type: ignore[index, operator]
    _, wanted = answers(model, [0, 1])
    assert fuse_layers(model, PAGE) == ""
    logits, kv = answers(model, [0, 1])
    assert logits[0].isfinite().all()
    assert not logits[1].isfinite().any()
    assert wanted.keys.isfinite().all()
    torch.testing.assert_close((kv.keys, kv.values), (wanted.keys, wanted.values), atol=1e-5, rtol=1e-5)


PLAIN = {"model__kernels": "torch", "align__loss_threshold": 0.0}


@pytest.mark.slow
@pytest.mark.skipif(DEVICE.type == "cuda", reason="there the engine fuses layers itself")
def test_an_engine_serves_what_it_learnt_alike(tmp_path: Path, fused: list[int]) -> None:
    found = []
    for number in range(2):
        with running_engine(tmp_path, data=str(number), **PLAIN) as (engine, client):
            if number:
                runner = engine.runner
                runner._backends, runner.model.lora.runs.kernel = Backends("triton"), "triton"
                assert fuse_layers(runner.model, PAGE) == ""
                fused.clear()
            engine.submit_pairs(random_pairs(4))
            wait_idle(engine)
            for index in range(3):
                engine.submit(request(str(index), random_ids(20 + index, index), 8, "ann" if index else None))
            client.wait(lambda: len(client.finished) == 3, 120)
            assert engine.adapters() == {"ann": 1}
            found.append([client.ids(str(index)) for index in range(3)])
    assert found[0] == found[1]
    assert fused


@pytest.mark.skipif(DEVICE.type == "cpu", reason="the engine fuses layers on a GPU")
@pytest.mark.parametrize("setting", [True, False])
def test_the_environment_decides_which_way_an_engine_goes(
    setting: bool, tmp_path: Path, fused: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGED_KERNELS", f"fused_layers={setting}")
    options = {"model__device": "cuda", "model__graph_memory_mb": 0}
    with running_engine(tmp_path, **options) as (engine, client):
        fused.clear()
        engine.submit(request("a", random_ids(40, 1), 5))
        client.wait(lambda: "a" in client.finished)
        assert "layers" not in engine.status()["paths"]["why_not"]
    assert bool(fused) == setting
