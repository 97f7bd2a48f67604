"""A checkpoint is served as it was written, or refused by the tensor or number that does not fit."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.support.architectures import ARCHITECTURES, Architecture
from edged.engine.model.loading import ModelRefused
from edged.engine.model.served_model import ServedModel
from edged.profiler.memory import ModelSizes
from edged.settings.load import ModelSettings, Settings
from tests.engine.model.test_loading import QUANTIZE
from tests.models import VOCAB, save_tiny

WEIGHTS = "model.safetensors"
UP = "model.layers.1.mlp.up_proj.weight"


def load(folder: Path, quantize: str = "") -> ServedModel:
    return ServedModel.load(folder, ModelSettings(device="cpu", quantize=quantize))


def changed(folder: Path, changes: dict[str, torch.Tensor | None], **config: Any) -> Path:
    """A model some of whose tensors are others, or not there."""
    save_tiny(folder, **config)
    tensors = load_file(folder / WEIGHTS)
    tensors |= {name: tensor for name, tensor in changes.items() if tensor is not None}
    for name in (name for name, tensor in changes.items() if tensor is None):
        del tensors[name]
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    return folder


@pytest.mark.parametrize("quantize", ["", *QUANTIZE])
@pytest.mark.parametrize("name", [UP, "model.norm.weight", "lm_head.weight", "model.embed_tokens.weight"])
def test_a_tensor_that_lacks_is_named_instead_of_random_numbers(tmp_path: Path, name: str, quantize: str) -> None:
    with pytest.raises(ModelRefused, match=rf"its checkpoint has no {name} \(1 missing in all\): its files"):
        load(changed(tmp_path, {name: None}), quantize)


def test_the_first_of_many_is_named(tmp_path: Path) -> None:
    save_tiny(tmp_path, num_hidden_layers=3)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 4}))
    with pytest.raises(ModelRefused, match=r"has no model\.layers\.3\.input_layernorm\.weight \(9 missing in all"):
        load(tmp_path)


def test_names_of_another_layout_are_missing_names(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    tensors = {f"module.{name}": tensor for name, tensor in load_file(tmp_path / WEIGHTS).items()}
    save_file(tensors, tmp_path / WEIGHTS, {"format": "pt"})
    with pytest.raises(ModelRefused, match=r"has no lm_head\.weight \(30 missing in all\)"):
        load(tmp_path)


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "qwen2"])
def test_a_tied_head_is_not_missing(tmp_path: Path, kind: str) -> None:
    save_tiny(tmp_path, kind, tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(tmp_path / WEIGHTS)
    assert load(tmp_path).shape.vocab_size == VOCAB


@pytest.mark.parametrize("quantize", ["", *QUANTIZE])
def test_a_tensor_of_another_shape_is_named_with_both(tmp_path: Path, quantize: str) -> None:
    with pytest.raises(ModelRefused, match=rf"has {UP} of the shape \[64, 64\], its config.json needs \[128, 64\]"):
        load(changed(tmp_path, {UP: torch.zeros(64, 64)}), quantize)


@pytest.mark.parametrize("vocab_size", [VOCAB - 1, VOCAB + 1])
def test_an_embedding_of_another_size_than_the_configuration_is_refused(tmp_path: Path, vocab_size: int) -> None:
    save_tiny(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": vocab_size}))
    with pytest.raises(
        ModelRefused, match=rf"of the shape \[{VOCAB}, 64\], its config.json needs \[{vocab_size}, 64\]"
    ):
        load(tmp_path)


def test_tensors_without_a_place_are_told_and_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    bias = "model.layers.0.self_attn.q_proj.bias"
    with caplog.at_level(logging.WARNING, "edged.engine"):
        load(changed(tmp_path, {bias: torch.ones(64), "z": torch.ones(1)}))
    assert f"its checkpoint has 2 tensors that the model has no place for, as {bias}: they are not used" in caplog.text


NUMBERS: list[tuple[str, Any, str]] = [
    ("num_key_value_heads", 8, "num_key_value_heads = 8, which does not divide num_attention_heads = 4"),
    ("num_key_value_heads", 3, "num_key_value_heads = 3, which does not divide num_attention_heads = 4"),
    *((name, value, f"{name} = {value}: a number from 1 on is needed")
      for name in ("num_hidden_layers", "hidden_size", "vocab_size", "max_position_embeddings", "num_key_value_heads")
      for value in (-64, 0) if (name, value) != ("vocab_size", 0)),
    ("num_attention_heads", 5, "The hidden size (64) is not a multiple of the number of attention heads (5)"),
    ("pad_token_id", VOCAB, "Padding_idx must be within num_embeddings"),
    ("vocab_size", "259", "Field 'vocab_size' expected int"),
    ("rope_parameters", {"rope_type": "yarn"}, "Missing required keys in `rope_parameters`"),
    ("rope_parameters", "x", "Field 'rope_parameters'"),
    ("model_type", "t5", "t5 is no causal language model"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "told"), NUMBERS)
def test_numbers_that_no_model_has_are_refused_alike_at_start_and_before(
    tmp_path: Path, name: str, value: Any, told: str
) -> None:
    save_tiny(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, name: value}))
    said = []
    for read in (load, lambda folder: ModelSizes.read(folder, Settings(), False)):
        with pytest.raises(ModelRefused) as refused:
            read(tmp_path)
        said.append(str(refused.value))
    assert told in said[0]
    assert said[0] == said[1]


KINDS = [
    *("llama", "phi", "bloom", "gpt_oss", "deepseek_v2", "glm4_moe_lite", "qwen3_next", "qwen3_vl", "opt"),
    *("qwen3_moe", "mixtral", "gemma4_text (31B)", "gemma4 (as released)", "gpt_neo", "falcon_mamba"),
    *("phi3 (longrope)", "mistral3 (with towers)"),
]


@pytest.mark.parametrize("architecture", [each for each in ARCHITECTURES if each.name in KINDS], ids=lambda it: it.name)
def test_before_a_start_a_model_is_refused_as_by_the_start_or_has_the_same_sizes(
    tmp_path: Path, architecture: Architecture
) -> None:
    architecture.save(tmp_path)
    found: list[Any] = []
    for read in (load, lambda folder: ModelSizes.read(folder, Settings(), False)):
        try:
            shape = read(tmp_path).shape
            sizes = ("layers", "layer_heads", "vocab_size", "max_positions", "parameters", "experts")
            found.append({name: getattr(shape, name) for name in sizes})
        except ModelRefused as error:
            found.append(str(error))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "architecture", [it for it in ARCHITECTURES if it.name in ("gpt2", "jetmoe")], ids=lambda it: it.name
)
def test_a_model_whose_forward_reads_numbers_is_not_refused_for_want_of_memory(
    tmp_path: Path, architecture: Architecture
) -> None:
    architecture.save(tmp_path)
    assert ModelSizes.read(tmp_path, Settings(), False).shape.parameters == load(tmp_path).shape.parameters
