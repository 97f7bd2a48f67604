"""A model is served as it is, or refused at start with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from edged.engine.attention.packed_batch import Segment, pack
from edged.engine.attention.paged import IMPLEMENTATION, attention_over, attention_pass
from edged.engine.build import page_count
from edged.engine.model.cpu_layers import shorten_layers
from edged.engine.model.loading import ModelRefused
from edged.engine.model.served_model import ServedModel
from edged.settings.load import AlignSettings, ModelSettings, load_settings
from tests.models import ARCHITECTURES, save_tiny, tiny_model

CPU = torch.device("cpu")
SMALL = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


def served(kind: str, dtype: torch.dtype = torch.float32, **changes: Any) -> ServedModel:
    config = AutoConfig.for_model(kind, **{**SMALL, **changes})
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(False)
    model.set_attn_implementation(IMPLEMENTATION)
    return ServedModel(model)


@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        ("bloom", {"n_layer": 2, "n_head": 4}, "0 of its 2 layers use the attention interface"),
        ("mamba2", {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1}, "none of its layers attends"),
        ("opt", {"ffn_dim": 128}, "no list of decoder layers"),
        ("minimax", {"num_local_experts": 2}, "its layers need a mask or a cache of their own"),
        ("deepseek_v3", {"v_head_dim": 256}, "values may be shorter than keys, not longer"),
    ],
)
def test_what_the_cache_cannot_hold_is_refused_with_the_reason(kind: str, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelRefused, match=reason):
        served(kind, **changes)


@pytest.mark.parametrize(("kind", "changes"), [("granite", {"logits_scaling": 3.0}), ("olmo2", {}), ("stablelm", {})])
def test_other_decoders_are_served_and_trained(kind: str, changes: dict[str, Any]) -> None:
    model = served(kind, **changes)
    model.attach_lora(AlignSettings(), 1)
    assert model.trainable_error == ""


def test_a_decoder_without_linears_is_served_but_not_trained() -> None:
    model = served("gpt2", n_embd=64, n_layer=2, n_head=4, n_positions=256, eos_token_id=2, bos_token_id=1)
    model.attach_lora(AlignSettings(), 1)
    assert "no linear layers" in model.trainable_error


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_that_loses_its_state_is_refused_by_name_whatever_the_dtype(dtype: torch.dtype) -> None:
    """In bfloat16 the state that each chunk would lose looks like rounding."""
    with pytest.raises(ModelRefused, match=r"JambaMambaMixer keeps a state from which it does not go on"):
        served("jamba", dtype, attn_layer_period=2, attn_layer_offset=1, num_experts=2, mamba_d_state=8)


EXPERTS: dict[str, Any] = {
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "head_dim": 16,
}


@pytest.mark.parametrize(("kind", "kept"), [("phimoe", "router"), ("hunyuan_v1_moe", "")])
def test_only_linears_that_give_a_tensor_for_every_row_are_adapted(kind: str, kept: str) -> None:
    model = served(kind, **EXPERTS)
    linears = [name for name, module in model.model.named_modules() if hasattr(module, "in_features")]
    model.attach_lora(AlignSettings(), 1)
    left = [name for name in linears if name not in model.lora.linears]
    assert all("lm_head" in name or (kept and kept in name) for name in left)
    assert len(left) == 1 + bool(kept) * 2
    ids = torch.arange(5)
    with torch.inference_mode():
        batch = pack([Segment(ids.tolist(), 0, np.array([1]), slot=0)], store := model.new_kv(2, 8), CPU)
        with attention_pass(attention_over(batch, store)), model.lora.packed(batch.runs):
            assert model.forward(batch.input_ids, batch.position_ids, ids).isfinite().all()


def test_layers_that_pass_on_several_streams_are_served_but_not_trained() -> None:
    sliding: dict[str, Any] = {
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention"],
        "head_dim": 16,
    }
    few: dict[str, Any] = {"vocab_size_per_layer_input": 300, "hidden_size_per_layer_input": 8, "laurel_rank": 8}
    model = served("gemma3n_text", num_kv_shared_layers=0, **sliding, **few)
    model.attach_lora(AlignSettings(), 1)
    assert "several streams of hidden states" in model.trainable_error
    assert shorten_layers(model) != ""
    assert all(name.startswith("model.layers.") for name in model.lora.linears)


def test_a_folder_without_a_model_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match=r"has no config\.json: give a directory that save_pretrained wrote"):
        ServedModel.load(tmp_path, ModelSettings())
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ModelRefused, match="cannot be loaded"):
        ServedModel.load(tmp_path, ModelSettings())


def test_a_device_that_is_not_there_is_named(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    with pytest.raises(ModelRefused, match=r'model\.device = "nonsense"'):
        ServedModel.load(tmp_path, ModelSettings(device="nonsense"))


def test_a_cache_too_small_for_anything_shows_the_arithmetic(tmp_path: Path) -> None:
    model = tiny_model(num_hidden_layers=24, head_dim=64, num_key_value_heads=4).requires_grad_(False)
    model.set_attn_implementation(IMPLEMENTATION)
    settings = load_settings(environ={}, overrides={"cache.memory_mb": 1, "cache.page_size": 64})
    with pytest.raises(ModelRefused, match=r"pages of \d+ bytes \(64 tokens each\) in 1 MiB: raise cache.memory_mb"):
        page_count(ServedModel(model), settings)


def test_a_cache_too_small_for_the_context_that_was_asked_for_shows_the_arithmetic() -> None:
    model = tiny_model(num_hidden_layers=24, head_dim=64, num_key_value_heads=4).requires_grad_(False)
    model.set_attn_implementation(IMPLEMENTATION)
    served = ServedModel(model)
    overrides = {"cache.memory_mb": 8, "cache.page_size": 16, "model.max_context_tokens": 200}
    # 16 tokens * 24 layers * 4 heads * 64 * 2 * 4 bytes = 0.75 MiB a page.
    with pytest.raises(ModelRefused, match=r"200 tokens .* takes 14 pages .* 10\.5 MiB; .* for 10 .*memory_mb to 11"):
        page_count(served, load_settings(environ={}, overrides=overrides))
    assert page_count(served, load_settings(environ={}, overrides={**overrides, "cache.memory_mb": 11})) == (14, 0)


def test_the_fingerprint_tells_other_weights_apart() -> None:
    def fingerprint(seed: int) -> str:
        model = tiny_model(seed=seed).requires_grad_(False)
        model.set_attn_implementation(IMPLEMENTATION)
        return ServedModel(model).fingerprint

    assert fingerprint(1) == fingerprint(1) != fingerprint(2)


def test_packed_weights_answer_as_plain_ones_and_leave_gradients_alone() -> None:
    model = tiny_model().requires_grad_(False)
    model.set_attn_implementation(IMPLEMENTATION)
    served_model = ServedModel(model)
    hidden = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    plain = served_model.logits(hidden)
    fingerprint = served_model.fingerprint
    assert served_model.pack_weights() == ""
    with torch.no_grad():
        torch.testing.assert_close(served_model.logits(hidden), plain, atol=1e-4, rtol=1e-5)
    leaf = hidden.requires_grad_()
    served_model.logits(leaf).sum().backward()
    assert leaf.grad is not None
    assert served_model.fingerprint == fingerprint


LONG = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
ROTARIES: dict[str, dict[str, Any]] = {
    "longrope": {"rope_parameters": {**LONG, "original_max_position_embeddings": 128}, "pad_token_id": 0},
    "dynamic": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}, "pad_token_id": 0},
}


class Waits(TorchDispatchMode):
    """Counts what the host would wait for a GPU for."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        by_mask = "index.Tensor" in name and any(x is not None and x.dtype == torch.bool for x in args[1])
        if by_mask or any(part in name for part in ("_local_scalar_dense", "nonzero", "masked_select", "unique")):
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", [*ARCHITECTURES, *ROTARIES])
def test_a_decode_forward_waits_for_nothing(kind: str) -> None:
    """A host that waits within a forward cannot plan meanwhile, and the forward cannot be captured."""
    if kind in ARCHITECTURES:
        tiny = tiny_model(kind).requires_grad_(False)
        tiny.set_attn_implementation(IMPLEMENTATION)
        model = ServedModel(tiny)
    else:
        model = served("phi3" if kind == "longrope" else "llama", **ROTARIES[kind])
    store = model.new_kv(9, 4)
    segments = [Segment([5], 2, np.array([1]), position=2, samples=True)]
    with torch.inference_mode(), Waits() as waits:
        batch = pack(segments, store, CPU)
        with attention_pass(attention_over(batch, store, "padded")):
            model.forward(batch.input_ids, batch.position_ids, batch.logit_rows)
    assert waits.seen == []


@pytest.mark.parametrize("kind", ROTARIES)
def test_rotary_frequencies_that_keep_still_are_transformers(kind: str) -> None:
    model = served("phi3" if kind == "longrope" else "llama", **ROTARIES[kind])
    rotary = next(module for module in model.model.modules() if hasattr(module, "rope_type"))
    positions = torch.arange(model.shape.max_positions)[None]
    hidden = torch.zeros(1, positions.shape[1], 64)
    wanted = type(rotary).forward(rotary, hidden, positions)
    for got, expected in zip(rotary(hidden, positions), wanted, strict=True):
        assert torch.equal(got, expected)
