"""The text decoder of a multimodal checkpoint is served alone, exactly as its wrapper answers without an image."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText, BitsAndBytesConfig

from benchmarks.support.architectures import ARCHITECTURES
from edged.engine.model.loading import ModelRefused, load_pretrained
from edged.engine.model.quantization import settle
from edged.engine.model.served_model import ServedModel
from edged.profiler.memory import ModelSizes
from edged.settings.load import ModelSettings, Settings
from tests.engine.model.test_loading import QUANTIZE

SETTINGS = ModelSettings(device="cpu")
WEIGHTS = "model.safetensors"
KNOWN = {each.name: each for each in ARCHITECTURES if each.text}
SERVED = [
    *("gemma3 (with towers)", "mistral3 (with towers)", "mistral3 (around mistral)", "qwen2_vl", "qwen2_5_vl"),
    *("qwen3_vl", "qwen3_vl_moe", "smolvlm", "llava", "internvl", "gemma4 (as released)"),
]
UP = "layers.1.mlp.up_proj.weight"


def saved(folder: Path, name: str) -> Path:
    KNOWN[name].save(folder)
    return folder


def rewrite(folder: Path, change: Any) -> Path:
    """Write a model's tensors anew; `change` maps them."""
    save_file(change(load_file(folder / WEIGHTS)), folder / WEIGHTS, {"format": "pt"})
    return folder


def reconfigure(folder: Path, change: Any) -> Path:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(change(config)))
    return folder


def difference(folder: Path) -> float:
    """How far the served text decoder's logits are from the whole wrapper's, for a prompt without an image."""
    model, _ = load_pretrained(str(folder), SETTINGS, "eager")
    whole = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    ids = torch.arange(3, 140)[None]
    with torch.no_grad():
        logits = (each(input_ids=ids, use_cache=False).logits for each in (model, whole))
        return float((next(logits) - next(logits)).abs().max())


@pytest.mark.parametrize("name", SERVED)
def test_logits_are_the_wrappers_and_sizes_are_known_before(tmp_path: Path, name: str) -> None:
    assert difference(saved(tmp_path, name)) < 1e-5
    before, shape = ModelSizes.read(tmp_path, Settings(), False), ServedModel.load(tmp_path, SETTINGS).shape
    for size in ("layers", "layer_heads", "vocab_size", "max_positions", "parameters", "targets"):
        assert getattr(before.shape, size) == (getattr(shape, size) if size != "targets" else shape.linears)
    # A config.json alone says the same.
    assert ModelSizes.read(tmp_path / "config.json", Settings(), False).shape == before.shape
    assert before.architecture == json.loads((tmp_path / "config.json").read_text())["architectures"][0]


NEW = {
    "^language_model.model": "model.language_model",
    "^language_model.lm_head": "lm_head",
    "^(vision|multi)": "model.\\1",
}


@pytest.mark.parametrize("name", ["gemma3 (with towers)", "llava", "internvl"])
def test_names_of_newer_transformers_are_read_too(tmp_path: Path, name: str) -> None:
    def newer(tensor: str) -> str:
        for old, new in NEW.items():
            tensor = re.sub(old, new, tensor)
        return tensor

    saved(tmp_path, name)
    rewrite(tmp_path, lambda tensors: {newer(name): tensor for name, tensor in tensors.items()})
    assert difference(tmp_path) < 1e-5


def test_qwen25_vl_is_read_as_it_was_released_with_the_text_options_in_the_outer_configuration(tmp_path: Path) -> None:
    def flat(config: dict[str, Any]) -> dict[str, Any]:
        text = config.pop("text_config")
        del text["model_type"], text["rope_parameters"], text["dtype"], config["dtype"]
        rope = {"rope_theta": 1e6, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}
        return {**text, **config, **rope, "torch_dtype": "bfloat16"}

    reconfigure(saved(tmp_path, "qwen2_5_vl"), flat)
    assert "model.layers.0.mlp.up_proj.weight" in load_file(tmp_path / WEIGHTS)
    assert difference(tmp_path) < 1e-5
    assert ModelSizes.read(tmp_path, Settings(), False).shape.in_16_bits


def test_experts_of_qwen3_vl_are_turned_as_they_were_released(tmp_path: Path) -> None:
    def turned(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {key: each.mT.contiguous() if "mlp.experts" in key else each for key, each in tensors.items()}

    rewrite(saved(tmp_path, "qwen3_vl_moe"), turned)
    assert difference(tmp_path) < 1e-5


def test_a_head_of_its_own_is_used_where_the_wrapper_ties_by_default(tmp_path: Path) -> None:
    """Mistral Small 3.2 says nothing of its head, and has one."""

    def untied(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        head = torch.randn_like(tensors["language_model.model.embed_tokens.weight"])
        return {**tensors, "language_model.lm_head.weight": head}

    rewrite(saved(tmp_path, "mistral3 (around mistral)"), untied)
    reconfigure(tmp_path, lambda config: {key: config[key] for key in config if key != "tie_word_embeddings"})
    assert difference(tmp_path) < 1e-5


@pytest.mark.parametrize("tied", [True, False])
def test_the_outer_configuration_says_whether_the_head_is_tied(tmp_path: Path, tied: bool) -> None:
    saved(tmp_path, "llava")
    reconfigure(tmp_path, lambda config: {**config, "tie_word_embeddings": tied})
    if tied:
        rewrite(tmp_path, lambda tensors: {key: tensors[key] for key in tensors if "lm_head" not in key})
        assert difference(tmp_path) < 1e-5
    head = 512 * 64
    found = ModelSizes.read(tmp_path, Settings(), False).shape.parameters
    assert found == ServedModel.load(tmp_path, SETTINGS).shape.parameters
    reconfigure(tmp_path, lambda config: {**config, "tie_word_embeddings": not tied})
    assert ModelSizes.read(tmp_path, Settings(), False).shape.parameters - found == (head if tied else -head)


def test_the_towers_are_told_once_and_are_no_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    bias = "language_model.model.layers.0.self_attn.q_proj.bias"
    saved(tmp_path, "llava")
    towers = sum(not key.startswith("language_model") for key in load_file(tmp_path / WEIGHTS))
    with caplog.at_level(logging.INFO, "edged.engine"):
        load_pretrained(str(tmp_path), SETTINGS, "eager")
    told = [record.getMessage() for record in caplog.records if "towers" in record.getMessage()]
    assert len(told) == 1
    assert f"its text decoder is served alone, {towers} tensors of its towers are left out" in told[0]
    assert "vision_tower" not in caplog.text
    rewrite(tmp_path, lambda tensors: {**tensors, bias: torch.ones(64)})
    with caplog.at_level(logging.WARNING, "edged.engine"):
        load_pretrained(str(tmp_path), SETTINGS, "eager")
    assert "has 1 tensors that the model has no place for, as model.layers.0.self_attn.q_proj.bias" in caplog.text


@pytest.mark.skipif("nf4" not in QUANTIZE, reason="there is no bitsandbytes")
def test_a_quantized_wrapper_is_read_with_the_modules_that_stay_plain(tmp_path: Path) -> None:
    plain = f"model.language_model.{UP}".removesuffix(".weight")
    kept = ["model.vision_tower", "model.multi_modal_projector", "lm_head", plain]
    how = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", llm_int8_skip_modules=kept)
    saved(tmp_path / "plain", "llava")
    whole = AutoModelForImageTextToText.from_pretrained(tmp_path / "plain", quantization_config=how)
    whole.save_pretrained(tmp_path / "packed")
    model, _ = load_pretrained(str(tmp_path / "packed"), SETTINGS, "eager")
    assert [type(model.get_submodule(f"model.layers.{i}.mlp.up_proj")).__name__ for i in (0, 1)] == [
        "Linear4bit",
        "Linear",
    ]
    settle(whole.eval(), torch.float32)
    ids = torch.arange(3, 140)[None]
    with torch.no_grad():
        logits = [each(input_ids=ids, use_cache=False).logits.float() for each in (model, whole)]
    assert (logits[0] - logits[1]).abs().max() < 1e-3
    assert ModelSizes.read(tmp_path / "packed", Settings(), False).quantization == "bitsandbytes"


# -- refused -----------------------------------------------------------------------------------------------------------


def refusals(folder: Path) -> list[str]:
    """What a start and what a plan say."""
    said = []
    for read in (lambda: ServedModel.load(folder, SETTINGS), lambda: ModelSizes.read(folder, Settings(), False)):
        with pytest.raises(ModelRefused) as refused:
            read()
        said.append(str(refused.value))
    return said


@pytest.mark.parametrize("name", ["gemma3 (with towers)", "qwen3_vl", "smolvlm"])
def test_a_wrapper_without_text_weights_is_refused_by_the_first_that_lacks(tmp_path: Path, name: str) -> None:
    saved(tmp_path, name)
    rewrite(
        tmp_path, lambda tensors: {key: each for key, each in tensors.items() if "vision" in key or "visual" in key}
    )
    with pytest.raises(ModelRefused, match=r"has no (lm_head|model\.embed_tokens)\.weight \(\d+ missing in all\)"):
        ServedModel.load(tmp_path, SETTINGS)


def test_a_wrapper_with_one_shard_missing_is_refused(tmp_path: Path) -> None:
    saved(tmp_path / "one", "llava")
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "one", dtype=torch.float32)
    model.save_pretrained(tmp_path / "many", max_shard_size="300KB")
    shards = sorted((tmp_path / "many").glob("*.safetensors"))
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    lost = next(shard for shard in shards if f"language_model.model.{UP}" in load_file(shard))
    lost.unlink()
    with pytest.raises(ModelRefused, match=lost.name):
        ServedModel.load(tmp_path / "many", SETTINGS)
    # Nor where the index does not know it any more.
    index["weight_map"] = {key: file for key, file in index["weight_map"].items() if file != lost.name}
    (tmp_path / "many" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelRefused, match=r"has no model\.layers\.\d"):
        ServedModel.load(tmp_path / "many", SETTINGS)


def test_a_tensor_of_another_shape_is_named(tmp_path: Path) -> None:
    def smaller(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {**tensors, f"model.language_model.{UP}": torch.zeros(64, 64)}

    rewrite(saved(tmp_path, "qwen3_vl"), smaller)
    with pytest.raises(
        ModelRefused, match=rf"has model\.{UP} of the shape \[64, 64\], its config.json needs \[128, 64"
    ):
        ServedModel.load(tmp_path, SETTINGS)


TEXTS: list[tuple[str, Any, str]] = [
    ("llava", {"model_type": "no_such_text"}, "has no configuration that can be read: "),
    ("llava", "llama", "has no configuration that can be read: "),
    ("llava", {"model_type": "t5"}, "llava is no causal language model of transformers, and holds no text decoder"),
]


@pytest.mark.parametrize(("name", "text", "told"), TEXTS)
def test_a_text_configuration_that_is_of_no_known_decoder_is_refused_alike_before(
    tmp_path: Path, name: str, text: Any, told: str
) -> None:
    saved(tmp_path, name)
    reconfigure(tmp_path, lambda config: {**config, "text_config": text})
    at_start, before = refusals(tmp_path)
    assert told in at_start
    assert at_start == before


def test_a_pair_that_does_not_fit_lacks_a_tensor(tmp_path: Path) -> None:
    """Qwen3's norms of queries are in no Qwen2.5-VL."""
    saved(tmp_path, "qwen3_vl")
    rewrite(tmp_path, lambda tensors: {key: each for key, each in tensors.items() if "q_norm" not in key})
    with pytest.raises(ModelRefused, match=r"has no model\.layers\.0\.self_attn\.q_norm\.weight \(4 missing in all\)"):
        ServedModel.load(tmp_path, SETTINGS)
