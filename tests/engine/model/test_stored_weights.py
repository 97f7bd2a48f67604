"""Checkpoints in the forms of quantization packages are served and trained with the numbers that they hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config

from benchmarks.support.packed_checkpoints import rewrite
from edged.engine.lora_selftest import selftest_lora
from edged.engine.model.loading import ModelRefused, load_pretrained
from edged.engine.model.served_model import ServedModel
from edged.profiler.memory import ModelSizes
from edged.settings.load import AlignSettings, ModelSettings, Settings
from tests.models import save_tiny

pytest.importorskip("torchao")
SETTINGS = ModelSettings(device="cpu")
WEIGHTS = "model.safetensors"


def w4a16(**weights: Any) -> dict[str, Any]:
    kind = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32, **weights}
    groups = {"group_0": {"weights": kind, "input_activations": None, "targets": ["Linear"]}}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}


PACKED: dict[str, dict[str, Any]] = {
    "W4A16": w4a16(),
    "W4A16 with zero points": w4a16(symmetric=False, group_size=64),
    "W4A16 by rows": w4a16(strategy="channel", group_size=None),
    "GPTQ": {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": False, "desc_act": False},
    "GPTQ v2 by rows": {"quant_method": "gptq", "bits": 4, "group_size": -1, "checkpoint_format": "gptq_v2"},
    "AWQ": {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True},
}
SHORT: dict[str, dict[str, Any]] = {
    "FP8 in blocks": {"quant_method": "fp8", "weight_block_size": [48, 40]},
    "FP8 by tensor": {"quant_method": "fp8", "weight_block_size": None, "activation_scheme": "static"},
    "FP8 of compressed-tensors": {"quant_method": "compressed-tensors", "format": "float-quantized"},
    "NVFP4 of compressed-tensors": {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
    "NVFP4 of ModelOpt": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
}


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=torch.arange(3, 40)[None], use_cache=False).logits[0]


@pytest.mark.parametrize("stored", [*PACKED.values(), *SHORT.values()], ids=[*PACKED, *SHORT])
def test_a_checkpoint_answers_as_its_dequantized_twin(stored: dict[str, Any], tmp_path: Path) -> None:
    twin = rewrite(save_tiny(tmp_path / "model"), stored)
    model, _ = load_pretrained(str(tmp_path / "model"), SETTINGS, "eager")
    own = AutoModelForCausalLM.from_pretrained(twin, dtype=torch.float32, attn_implementation="eager").eval()
    torch.testing.assert_close(logits(model), logits(own), atol=2e-4, rtol=1e-5)


@pytest.mark.parametrize("form", ["W4A16 with zero points", "AWQ", "FP8 in blocks"])
def test_packed_weights_stay_packed_and_a_check_knows_their_bytes(form: str, tmp_path: Path) -> None:
    stored = {**PACKED, **SHORT}[form]
    rewrite(save_tiny(tmp_path / "model"), stored)
    model, sizes = (
        ServedModel.load(tmp_path / "model", SETTINGS),
        ModelSizes.read(tmp_path / "model", Settings(), False),
    )
    shape = model.shape
    assert shape.linears == sizes.shape.linears
    assert shape.plain_weights == sizes.shape.plain_weights
    assert shape.weight_bytes == 4 * shape.plain_weights + sizes.linear_bytes
    bits = 8 * sizes.linear_bytes / sizes.linear_weights
    assert bits == 32 if form in SHORT else 4 < bits <= 4 + 64 / 32


def test_short_floats_are_quantized_again_while_they_are_loaded(tmp_path: Path) -> None:
    twin = rewrite(save_tiny(tmp_path / "model"), SHORT["FP8 in blocks"])
    settings = ModelSettings(device="cpu", quantize="int8")
    short, plain = (load_pretrained(str(folder), settings, "eager")[0] for folder in (tmp_path / "model", twin))
    assert type(short.model.layers[0].mlp.up_proj.weight) is not torch.nn.Parameter
    assert torch.equal(logits(short), logits(plain))
    wanted = Settings(model=settings)
    assert ModelSizes.read(tmp_path / "model", wanted, False).form == ModelSizes.read(twin, wanted, False).form


def test_fp8_has_the_numbers_that_transformers_dequantizes(tmp_path: Path) -> None:
    stored = {"quant_method": "fp8", "weight_block_size": [32, 16]}
    rewrite(save_tiny(tmp_path / "model"), stored)
    model, _ = load_pretrained(str(tmp_path / "model"), SETTINGS, "eager")
    how = FineGrainedFP8Config(weight_block_size=(32, 16), dequantize=True)
    own = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", dtype=torch.float32, attn_implementation="eager", quantization_config=how
    )
    for name, weight in own.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], weight, atol=0, rtol=0)


Q = "model.layers.1.self_attn.q_proj"
BAD = [
    (w4a16(group_size=48), "has groups of 48 weights: edged reads groups of 32, 64 or 128"),
    (w4a16(num_bits=8), "edged reads integers of 4 bits by groups or rows"),
    ({**w4a16(), "config_groups": {}}, "has weights of no kind: edged reads integers of 4 bits"),
]
BROKEN = [
    ("W4A16 with zero points", f"{Q}.weight_zero_point"),
    ("GPTQ", f"{Q}.scales"),
    ("FP8 in blocks", f"{Q}.weight_scale_inv"),
    ("NVFP4 of compressed-tensors", f"{Q}.weight_global_scale"),
    ("NVFP4 of ModelOpt", f"{Q}.weight_scale_2"),
]


@pytest.mark.parametrize(("stored", "told"), BAD)
def test_a_form_that_is_not_read_is_refused_alike_before_and_at_the_start(
    stored: dict[str, Any], told: str, tmp_path: Path
) -> None:
    config = json.loads((save_tiny(tmp_path) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": stored}))
    for read in (lambda: ServedModel.load(tmp_path, SETTINGS), lambda: ModelSizes.read(tmp_path, Settings(), False)):
        with pytest.raises(ModelRefused, match=told):
            read()


def change(folder: Path, name: str, value: torch.Tensor | None) -> Path:
    """Put another tensor in the place of one, or none."""
    tensors = load_file(folder / WEIGHTS)
    tensors.pop(name)
    save_file({**tensors, **({} if value is None else {name: value})}, folder / WEIGHTS, {"format": "pt"})
    return folder


@pytest.mark.parametrize(("form", "name"), BROKEN)
def test_a_tensor_that_lacks_is_named(form: str, name: str, tmp_path: Path) -> None:
    rewrite(save_tiny(tmp_path / "model"), {**PACKED, **SHORT}[form])
    with pytest.raises(ModelRefused, match=f"its checkpoint has no {name}: download it again"):
        ServedModel.load(change(tmp_path / "model", name, None), SETTINGS)


def test_columns_in_an_order_of_their_own_are_refused(tmp_path: Path) -> None:
    rewrite(save_tiny(tmp_path / "model"), {**PACKED["GPTQ"], "group_size": 32})
    folder = change(tmp_path / "model", f"{Q}.g_idx", torch.arange(64, dtype=torch.int32).flip(0) // 32)
    with pytest.raises(ModelRefused, match=r"q_proj has its columns in an order of their own .*: give a checkpoint"):
        ServedModel.load(folder, SETTINGS)


def test_a_quantized_checkpoint_with_an_adapter_learns(tmp_path: Path) -> None:
    rewrite(save_tiny(tmp_path / "model"), PACKED["W4A16"])
    model = ServedModel.load(tmp_path / "model", SETTINGS)
    model.attach_lora(AlignSettings(rank=4), 2)
    selftest_lora(model, AlignSettings(rank=4), 2)
    assert model.trainable_error == ""
