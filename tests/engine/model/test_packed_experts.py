"""Experts that are packed while a model is loaded: served and trained as models with those numbers, by their memory."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.support.packed_checkpoints import rewrite
from edged.engine.attention.paged import IMPLEMENTATION
from edged.engine.model.loading import ModelRefused, load_pretrained
from edged.engine.model.packed_experts import PackedExperts
from edged.engine.model.quantization import is_quantized, weight_bytes
from edged.profiler.memory import ModelSizes
from edged.settings.load import ModelSettings, load_settings
from tests.align.dpo.test_dpo_exact import make_pairs, trl_gradients, unit_gradients, worst_error
from tests.engine.harness import random_ids, request, running_engine
from tests.engine.model.test_loading import measured
from tests.engine.model.test_stored_weights import PACKED
from tests.engine.test_engine import generated
from tests.models import save_tiny

torchao = pytest.importorskip("torchao.quantization")
# The int4 layouts need widths of whole groups.
SHAPE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32, "num_hidden_layers": 2}
KINDS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128},
    # Its matrices are [experts, in, out], with a bias behind each.
    "gpt_oss": {"num_local_experts": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    # Its router is a linear with an answer of its own.
    "phimoe": {"num_local_experts": 8, "num_experts_per_tok": 2},
    # Its experts have no gate.
    "nemotron_h": {
        **{"layers_block_type": ["linear_attention", "moe", "full_attention", "moe"], "num_hidden_layers": 4},
        **{
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 128,
            "n_group": 1,
            "topk_group": 1,
        },
        **{"moe_shared_expert_intermediate_size": 128},
    },
    # One layer of plain linears, and an expert that every token passes.
    "glm4_moe": {
        **{"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "first_k_dense_replace": 1},
        **{"n_group": 1, "topk_group": 1},
    },
}
EVERY = [
    (kind, quantize)
    for kind in ("qwen3_moe", "gpt_oss", "glm4_moe", "phimoe", "nemotron_h")
    for quantize in ("int4", "int8")
]


def saved(tmp_path: Path, kind: str, **changes: Any) -> Path:
    folder = tmp_path / f"model-{kind}"
    return folder if folder.exists() else save_tiny(folder, kind, **{**SHAPE, **KINDS[kind], **changes})


def oracle(folder: Path, quantize: str) -> PreTrainedModel:
    """The plain model with the numbers of the packed one's linears, and those that torchao gives experts' matrices."""
    packed, _ = load_pretrained(str(folder), ModelSettings(device="cpu", quantize=quantize), "eager")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if quantize == "int8":
        form: Any = torchao.Int8WeightOnlyConfig(set_inductor_config=False)
    else:
        from torchao.prototype.quantization.int4.inference_workflow import PrototypeInt4WeightOnlyConfig

        form = PrototypeInt4WeightOnlyConfig(group_size=64, set_inductor_config=False)

    def rounded(matrix: torch.Tensor) -> torch.Tensor:
        linear = nn.Linear(matrix.shape[1], matrix.shape[0], bias=False)
        linear.weight = nn.Parameter(matrix.clone())
        torchao.quantize_(linear, form)
        return linear(torch.eye(matrix.shape[1])[None])[0].mT

    with torch.no_grad():
        for name, module in model.named_modules():
            if type(module).forward is nn.Linear.forward and is_quantized(found := packed.get_submodule(name)):
                unit = torch.eye(module.in_features)[None]
                module.weight.copy_((found(unit) - found(0 * unit))[0].mT)
            for bank in (each for each in module.parameters(recurse=False) if each.dim() == 3 and each.shape[1] > 1):
                turned = getattr(module, "is_transposed", False)
                each = [rounded(matrix.mT.contiguous() if turned else matrix) for matrix in bank]
                bank.copy_(torch.stack([matrix.mT if turned else matrix for matrix in each]))
    return model.eval().requires_grad_(False)


def without_balance(model: PreTrainedModel) -> PreTrainedModel:
    """The model without TRL's loss of balance: what a person likes says nothing of how experts are used."""
    model.config.router_aux_loss_coef = 0.0
    return model


@pytest.mark.parametrize(("kind", "quantize"), EVERY)
def test_packed_experts_answer_as_generate_does_with_their_numbers(kind: str, quantize: str, tmp_path: Path) -> None:
    folder, prompts = saved(tmp_path, kind), [random_ids(n, n) for n in (30, 5, 17)]
    with running_engine(tmp_path, kind, model__quantize=quantize) as (engine, client):
        for i, prompt in enumerate(prompts):
            engine.submit(request(f"r{i}", prompt, tokens=12, logprobs=0))
        client.wait(lambda: len(client.finished) == len(prompts))
        status = engine.status()["model"]
    model = oracle(folder, quantize)
    for i, prompt in enumerate(prompts):
        ids, logps = generated(model, prompt, 12)
        assert client.ids(f"r{i}") == ids
        got = torch.tensor([event.logprob for event in client.tokens[f"r{i}"]])
        # Of states generate computes in another order.
        torch.testing.assert_close(got, logps, atol=1e-3 if kind == "nemotron_h" else 1e-4, rtol=0)
    assert status["parameters"] == model.num_parameters()
    # What a check says before anything is loaded.
    sizes = ModelSizes.read(folder, load_settings(environ={}, overrides={"model.quantize": quantize}), cuda=False)
    # Of Phi's routers a check does not know that they stay plain.
    assert sizes.report("cpu", 512)["weight_bytes"] == pytest.approx(status["weight_bytes"], rel=0.02)
    experts = sum(prod(bank) for bank in sizes.shape.banks)
    assert status["weight_bytes"] < 4 * (model.num_parameters() - experts) + experts * (2 if quantize == "int8" else 1)


# PEFT adapts no plain layer of a GLM-4 whose other layers have experts, and not all linears of the last two.
@pytest.mark.parametrize(("kind", "quantize"), [case for case in EVERY if case[0] in ("qwen3_moe", "gpt_oss")])
def test_unit_gradients_through_packed_experts_equal_trls(kind: str, quantize: str, tmp_path: Path) -> None:
    pairs, folder = make_pairs(19), saved(tmp_path, kind)
    base, _ = load_pretrained(str(folder), ModelSettings(device="cpu", quantize=quantize), IMPLEMENTATION)
    assert any(isinstance(module, PackedExperts) for module in base.modules())
    got, step, weights = unit_gradients(base, pairs, 16, chunk=23, recompute="full")
    wanted, loss = trl_gradients(without_balance(oracle(folder, quantize)), pairs, weights, tmp_path)
    assert step.loss == pytest.approx(loss, rel=1e-4)
    assert worst_error(got, wanted) <= 1e-4


@pytest.mark.parametrize(
    ("kind", "stored"),
    [
        ("gpt_oss", {"quant_method": "mxfp4"}),
        ("qwen3_moe", {"quant_method": "fp8", "weight_block_size": [128, 128]}),
    ],
    ids=["mxfp4", "fp8"],
)
def test_experts_of_short_floats_are_packed_as_those_of_the_plain_twin(
    kind: str, stored: dict[str, Any], tmp_path: Path
) -> None:
    folder = saved(tmp_path, kind)
    twin = rewrite(folder, stored)
    settings = ModelSettings(device="cpu", quantize="int4")
    ids = torch.tensor([random_ids(30, 3)])
    wanted, got = (load_pretrained(str(each), settings, "eager")[0](ids).logits for each in (twin, folder))
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", ["qwen3_moe", "glm4_moe", "mixtral"])
@pytest.mark.parametrize("stored", PACKED.values(), ids=PACKED)
def test_stored_experts_of_4_bits_stay_packed_and_answer_as_the_dequantized_twin(
    kind: str, stored: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = saved(tmp_path, kind)
    twin = rewrite(folder, stored)
    model, _ = load_pretrained(str(folder), ModelSettings(device="cpu"), "eager")
    own = AutoModelForCausalLM.from_pretrained(twin, dtype=torch.float32, attn_implementation="eager").eval()
    ids = torch.tensor([random_ids(30, 3)])
    torch.testing.assert_close(model(ids).logits, own(ids).logits, atol=2e-4, rtol=1e-5)
    banks = [module for module in model.modules() if isinstance(module, PackedExperts)]
    assert len(banks) == (2 if kind == "glm4_moe" else 4)
    assert all(
        not weight.is_floating_point() or type(weight.data) is not torch.Tensor
        for bank in banks
        for weight in bank.weights
    )
    assert "stay in" not in caplog.text
    assert type(model).__name__ == type(own).__name__
    sizes = ModelSizes.read(folder, load_settings(environ={}), cuda=False)
    assert sizes.report("cpu", 512)["weight_bytes"] == pytest.approx(weight_bytes(model), rel=0.01)


def test_a_packed_checkpoint_that_lacks_an_expert_is_refused_by_its_bank(tmp_path: Path) -> None:
    folder = saved(tmp_path, "qwen3_moe")
    rewrite(folder, PACKED["W4A16"])
    tensors = load_file(folder / "model.safetensors")
    lacking = {name: each for name, each in tensors.items() if "layers.1.mlp.experts.5.up_proj" not in name}
    save_file(lacking, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelRefused, match=r"has 15 matrices of model\.layers\.1\.mlp\.experts\.gate_up_proj, .* 16"):
        load_pretrained(str(folder), ModelSettings(device="cpu"), "eager")


def test_experts_that_a_packed_checkpoint_keeps_plain_have_the_models_dtype(tmp_path: Path) -> None:
    folder = saved(tmp_path, "qwen3_moe")
    plain = {name: each for name, each in load_file(folder / "model.safetensors").items() if "1.mlp.experts" in name}
    rewrite(folder, PACKED["W4A16"])
    tensors = load_file(folder / "model.safetensors")
    kept = {name: each for name, each in tensors.items() if "1.mlp.experts" not in name}
    kept |= {name: each.bfloat16() for name, each in plain.items()}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    model, _ = load_pretrained(str(folder), ModelSettings(device="cpu"), "eager")
    assert model(torch.tensor([random_ids(30, 3)])).logits.isfinite().all()


@pytest.mark.parametrize("form", ["int4", "int8", "W4A16"])
def test_experts_of_another_size_than_the_configuration_s_are_refused(form: str, tmp_path: Path) -> None:
    folder = saved(tmp_path, "qwen3_moe")
    if form in PACKED:
        rewrite(folder, PACKED[form])
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "moe_intermediate_size": 64}))
    told = r"has model\.layers\.0\.mlp\.experts\.\w+ of the shape \[8, .*, its config\.json needs \[8, "
    with pytest.raises(ModelRefused, match=told):
        load_pretrained(str(folder), ModelSettings(device="cpu", quantize="" if form in PACKED else form), "eager")


def test_a_stored_layer_whose_experts_are_one_tensor_is_joined_as_ever(tmp_path: Path) -> None:
    folder = saved(tmp_path, "qwen3_moe", moe_intermediate_size=64, vocab_size=8192)
    twin = rewrite(folder, PACKED["W4A16"])
    tensors = load_file(folder / "model.safetensors")
    own = AutoModelForCausalLM.from_pretrained(twin, dtype=torch.float32, attn_implementation="eager").eval()
    whole = {name: each for name, each in own.state_dict().items() if "layers.1.mlp.experts" in name}
    kept = {name: each for name, each in tensors.items() if "layers.1.mlp.experts" not in name}
    save_file({**kept, **whole}, folder / "model.safetensors", {"format": "pt"})
    model, _ = load_pretrained(str(folder), ModelSettings(device="cpu"), "eager")
    ids = torch.tensor([random_ids(30, 3)])
    torch.testing.assert_close(model(ids).logits, own(ids).logits, atol=2e-4, rtol=1e-5)


def test_experts_that_no_group_divides_stay_plain_and_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = saved(tmp_path, "qwen3_moe", moe_intermediate_size=96, vocab_size=8192)
    load_pretrained(str(folder), ModelSettings(device="cpu", quantize="int4"), IMPLEMENTATION)
    assert "its fused experts stay in torch.float32, 0 of" in caplog.text


def test_a_method_that_packs_linears_alone_is_refused_by_a_check_as_by_a_start(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    folder, settings = saved(tmp_path, "qwen3_moe", moe_intermediate_size=1024), {"model.quantize": "nf4"}
    with pytest.raises(ModelRefused, match=r'model\.quantize = "int4", which packs experts, too') as start:
        load_pretrained(str(folder), ModelSettings(device="cpu", quantize="nf4"), IMPLEMENTATION)
    with pytest.raises(ModelRefused) as check:
        ModelSizes.read(folder, load_settings(environ={}, overrides=settings), cuda=False)
    assert str(start.value).split(": ", 1)[1] == str(check.value).split(": ", 1)[1]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_one_tensor_of_experts_is_plain_at_a_time(kind: str, tmp_path: Path) -> None:
    sizes = {"qwen3_moe": {"moe_intermediate_size": 512, "num_experts": 32}}
    sizes["gpt_oss"] = {"intermediate_size": 512, "num_local_experts": 32, "layer_types": ["full_attention"] * 6}
    folder = saved(tmp_path, kind, dtype=torch.bfloat16, hidden_size=512, num_hidden_layers=6, **sizes[kind])
    figures = measured({quantize: f"{folder}:{quantize}" for quantize in ("int4", "int8")})
    largest = 4 * 32 * 1024 * 512
    for found in figures.values():
        assert found["peak"] <= 1.1 * found["weights"] + 2 * largest
