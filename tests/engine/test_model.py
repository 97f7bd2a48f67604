"""A model is served as it is, or refused at start with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from edged.config import AlignSettings, ModelSettings, load_settings
from edged.engine.attention import IMPLEMENTATION
from edged.engine.memory import page_count
from edged.engine.model import ModelRefused, ServedModel
from tests.models import save_tiny, tiny_model

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


def served(kind: str, **changes: Any) -> ServedModel:
    config = AutoConfig.for_model(kind, **{**SMALL, **changes})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
    model.set_attn_implementation(IMPLEMENTATION)
    return ServedModel(model, CPU, torch.float32)


@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        ("bloom", {"n_layer": 2, "n_head": 4}, "0 of its 2 layers use the attention interface"),
        ("mamba", {}, "no list of decoder layers"),
        ("gpt_oss", {"num_local_experts": 4, "head_dim": 16}, '"s_aux"'),
        ("deepseek_v3", {}, "different head sizes"),
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
        page_count(ServedModel(model, CPU, torch.float32), settings)


def test_a_cache_too_small_for_the_context_that_was_asked_for_shows_the_arithmetic() -> None:
    model = tiny_model(num_hidden_layers=24, head_dim=64, num_key_value_heads=4).requires_grad_(False)
    model.set_attn_implementation(IMPLEMENTATION)
    served = ServedModel(model, CPU, torch.float32)
    overrides = {"cache.memory_mb": 8, "cache.page_size": 16, "model.max_context_tokens": 200}
    # 16 tokens * 24 layers * 4 heads * 64 * 2 * 4 bytes = 0.75 MiB a page.
    with pytest.raises(ModelRefused, match=r"200 tokens .* takes 14 pages .* 10\.5 MiB; .* for 10 .*memory_mb to 11"):
        page_count(served, load_settings(environ={}, overrides=overrides))
    assert page_count(served, load_settings(environ={}, overrides={**overrides, "cache.memory_mb": 11})) == 14


def test_the_fingerprint_tells_other_weights_apart() -> None:
    def fingerprint(seed: int) -> str:
        model = tiny_model(seed=seed).requires_grad_(False)
        model.set_attn_implementation(IMPLEMENTATION)
        return ServedModel(model, CPU, torch.float32).fingerprint

    assert fingerprint(1) == fingerprint(1) != fingerprint(2)


def test_packed_weights_answer_as_plain_ones_and_leave_gradients_alone() -> None:
    model = tiny_model().requires_grad_(False)
    model.set_attn_implementation(IMPLEMENTATION)
    served_model = ServedModel(model, CPU, torch.float32)
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
