"""Few rows pass layers of the common kind by the compiled kernels, with the same result; others are left alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from edged.align.dpo.decoder import Branches
from edged.align.dpo.layout import Piece
from edged.engine.attention.packed_batch import Segment, pack
from edged.engine.attention.paged import IMPLEMENTATION, attention_over, attention_pass
from edged.engine.lora.segments import NO_SLOT
from edged.engine.model.cpu_layers import ShortLayer, shorten_layers
from edged.engine.model.layer_access import PagedDecoder
from edged.engine.model.served_model import ServedModel
from edged.engine.native.library import FEW_ROWS, kernels, why_no_kernels
from edged.settings.load import AlignSettings
from tests.engine.harness import random_ids, request, running_engine
from tests.models import tiny_model

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(kernels() is None, reason=why_no_kernels())


def served_model(
    kind: str = "llama", packed: bool = True, rank: int = 4, dtype: torch.dtype = torch.float32, **align: Any
) -> ServedModel:
    """In float32, of weights that are numbers of `dtype`, with random adapters in slots 0 and 1 of two."""
    base = tiny_model(kind).to(dtype).float().requires_grad_(False).eval()
    base.set_attn_implementation(IMPLEMENTATION)
    model = ServedModel(base)
    model.attach_lora(AlignSettings(rank=rank, **align), 2)
    generator = torch.Generator().manual_seed(0)
    for linear in model.lora.linears.values():
        for slots in (linear.down, linear.up):
            slots.normal_(0.0, 0.2, generator=generator)  # type: ignore[operator]
    if packed:
        assert model.pack_weights(native=False) == ""
    return model


def answers(model: ServedModel, slots: list[int], last: int = 1) -> torch.Tensor:
    """Logits of the `last` tokens of texts, one under each slot, over pages that hold what comes before these."""
    kv = model.new_kv(16 * len(slots) + 1, 8)
    texts = [random_ids(40 + last + 7 * index, index) for index in range(len(slots))]
    with torch.inference_mode():
        for own in (slice(None, -last), slice(-last, None)):
            segments = []
            for index, (ids, slot) in enumerate(zip(texts, slots, strict=True)):
                first = range(len(ids))[own].start
                pages = np.arange(16 * index, 16 * index + 16) + 1
                segments.append(Segment(ids[own], first, pages, slot, first, samples=True))
            batch = pack(segments, kv, CPU)
            with attention_pass(attention_over(batch, kv, "ragged")), model.lora.packed(batch.runs):
                logits = model.forward(batch.input_ids, batch.position_ids, batch.logit_rows)
    return logits


@pytest.fixture
def shorts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of every layer that was computed the short way."""
    seen: list[int] = []
    own = ShortLayer.short

    def short(layer: ShortLayer, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        seen.append(len(x))
        return own(layer, x, cos, sin)

    monkeypatch.setattr(ShortLayer, "short", short)
    return seen


@pytest.mark.parametrize("slots", [[NO_SLOT], [1], [0, 1, 1], [NO_SLOT, 1, 0]])
@pytest.mark.parametrize(("kind", "packed"), [("llama", True), ("llama", False), ("mistral", True), ("qwen2", False)])
def test_few_rows_get_the_answers_of_the_models_own_layers(
    kind: str, packed: bool, slots: list[int], shorts: list[int]
) -> None:
    model, most = served_model(kind, packed), FEW_ROWS // len(slots)
    wanted = {last: answers(model, slots, last) for last in (1, 4, most)}
    assert not shorts
    assert shorten_layers(model) == ""
    shorts.clear()
    for last, own in wanted.items():
        torch.testing.assert_close(answers(model, slots, last), own, atol=1e-4, rtol=1e-4)
    assert shorts == [rows * len(slots) for rows in (1, 4, most) for _ in range(3)]


def test_some_linears_have_adapters_and_some_have_none(shorts: list[int]) -> None:
    model = served_model(target_modules=["q_proj", "v_proj", "down_proj"])
    wanted = answers(model, [1])
    assert shorten_layers(model) == ""
    shorts.clear()
    torch.testing.assert_close(answers(model, [1]), wanted, atol=1e-4, rtol=1e-4)
    assert len(shorts) == 3


def test_many_rows_and_gradients_go_the_layers_own_way(shorts: list[int]) -> None:
    model = served_model()
    wanted = answers(model, [0], last=FEW_ROWS + 1)
    assert shorten_layers(model) == ""
    shorts.clear()
    assert torch.equal(answers(model, [0], last=FEW_ROWS + 1), wanted)
    hidden = torch.randn(2, 64, requires_grad=True)
    decoder = PagedDecoder(model, model.new_kv(2, 8))
    _, calls = decoder.begin(torch.tensor([3, 4]), torch.tensor([0, 1]))
    branches = [Branches(0, 2, 0, (Piece(0, 2, 0, None),), None)]
    decoder.run_branches(0, hidden, calls[0], branches, [])[0].sum().backward()
    assert hidden.grad is not None
    assert not shorts


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("qwen3", "Qwen3DecoderLayer computes something else"),
        ("gemma2", "Gemma2RMSNorm is not an RMS norm with a variance_epsilon"),
        ("phi3", "Phi3Attention has no q_proj"),
    ],
)
def test_layers_of_another_kind_are_left_alone_and_it_is_said_why(kind: str, reason: str) -> None:
    model = served_model(kind)
    assert shorten_layers(model) == reason
    assert not any("forward" in layer.__dict__ for layer in model.layers)


def test_a_layer_that_does_more_than_its_parts_say_is_found_by_the_trial() -> None:
    model = served_model()
    mlp = model.layers[2].mlp
    own = mlp.forward  # type: ignore[union-attr]
    mlp.forward = lambda x: 1.001 * own(x)  # type: ignore[union-attr]
    assert shorten_layers(model) == "LlamaDecoderLayer computes something else"
    assert not any("forward" in layer.__dict__ for layer in model.layers)


@pytest.mark.parametrize("setting", ["auto", "torch"])
def test_the_setting_decides_which_way_an_engine_goes(setting: str, tmp_path: Path, shorts: list[int]) -> None:
    with running_engine(tmp_path, model__device="cpu", model__kernels=setting) as (engine, client):
        shorts.clear()
        engine.submit(request("a", random_ids(40, 1), 5))
        client.wait(lambda: "a" in client.finished)
    assert bool(shorts) == (setting == "auto")
