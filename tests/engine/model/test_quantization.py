"""Quantized bases are served as `generate` would, and learn by the gradients of the products they are served by."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from edged.align.dpo.step_plan import Recompute
from edged.align.feedback.pair import PairRetired, PairScored
from edged.engine.attention.paged import IMPLEMENTATION
from edged.engine.model.loading import ModelRefused, load_pretrained
from edged.engine.model.quantization import MADE_BY, FrozenLinear, make_config, settle
from edged.engine.model.served_model import ServedModel
from edged.settings.load import AlignSettings, ModelSettings
from tests.align.dpo.test_dpo_exact import make_pairs, trl_gradients, unit_gradients, worst_error
from tests.engine.harness import random_ids, random_pairs, request, running_engine, wait_idle
from tests.engine.test_engine import generated
from tests.models import byte_tokenizer, save_tiny

CPU = torch.device("cpu")
KINDS = [
    pytest.param(kind, marks=pytest.mark.skipif(not importlib.util.find_spec(package), reason=f"{package} is missing"))
    for kind, package in MADE_BY.items()
]
SAVED = [kind for kind in KINDS if kind.values[0] != "int4"]
"""torchao cannot save its int4 layout for CPUs."""
LEARNED = [
    pytest.param("int4", marks=[*kind.marks, pytest.mark.slow]) if kind.values[0] == "int4" else kind for kind in KINDS
]
"""Its int4 products take ten times as long as the others."""
# The int4 layouts need widths of whole groups.
SHAPE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}


def plain(tmp_path: Path) -> Path:
    folder = tmp_path / "plain"
    return folder if folder.exists() else save_tiny(folder, **SHAPE)


def quantized(tmp_path: Path, kind: str) -> PreTrainedModel:
    """transformers' own quantized model. Its 4-bit products are kept from being packed for a bfloat16 kernel."""
    config = make_config(kind, CPU, torch.float32)
    model = AutoModelForCausalLM.from_pretrained(plain(tmp_path), dtype=torch.float32, quantization_config=config)
    settle(model, torch.float32)
    return model.eval().requires_grad_(False)


def dequantized(tmp_path: Path, kind: str) -> PreTrainedModel:
    """The plain model with the weights that the quantized products stand for, each found by products of units."""
    model, found = AutoModelForCausalLM.from_pretrained(plain(tmp_path), dtype=torch.float32), quantized(tmp_path, kind)
    with torch.no_grad():
        for name, module in found.named_modules():
            if isinstance(module, nn.Linear):
                weight = module(torch.eye(module.in_features)[None])[0].t()
                model.get_submodule(name).weight.copy_(weight)
    return model.eval().requires_grad_(False)


def save_quantized(tmp_path: Path, kind: str) -> Path:
    folder = tmp_path / "model-llama"
    quantized(tmp_path, kind).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", SAVED)
def test_a_checkpoint_that_was_saved_quantized_is_served_as_generate_answers(kind: str, tmp_path: Path) -> None:
    folder = save_quantized(tmp_path, kind)
    assert "quantization_config" in json.loads((folder / "config.json").read_text())
    check_greedy(tmp_path, kind, "")


@pytest.mark.parametrize("kind", KINDS)
def test_a_plain_checkpoint_is_quantized_while_it_is_loaded(kind: str, tmp_path: Path) -> None:
    save_tiny(tmp_path / "model-llama", **SHAPE)
    check_greedy(tmp_path, kind, kind)


def check_greedy(tmp_path: Path, kind: str, quantize: str) -> None:
    prompts = [random_ids(n, n) for n in (30, 5, 17)]
    with running_engine(tmp_path, model__quantize=quantize) as (engine, client):
        for i, prompt in enumerate(prompts):
            engine.submit(request(f"r{i}", prompt, tokens=12, logprobs=0))
        client.wait(lambda: len(client.finished) == len(prompts))
        status = engine.status()["model"]
        assert engine.adapter_files.spec.row_norms is None, "DoRA is refused"
    model = quantized(tmp_path, kind)
    for i, prompt in enumerate(prompts):
        ids, logps = generated(model, prompt, 12)
        assert client.ids(f"r{i}") == ids
        got = torch.tensor([event.logprob for event in client.tokens[f"r{i}"]])
        # bitsandbytes' 8-bit products round their inputs, too, in columns that depend on what shares the batch.
        torch.testing.assert_close(got, logps, atol=0.1 if kind == "llm-int8" else 1e-4, rtol=0)
    full = AutoModelForCausalLM.from_pretrained(plain(tmp_path))
    assert status["parameters"] == full.num_parameters()
    assert status["weight_bytes"] < 0.4 * 4 * full.num_parameters()


@pytest.mark.parametrize(("window", "recompute"), [(16, "full"), (500, "none"), (500, "selective")])
@pytest.mark.parametrize("kind", KINDS)
def test_unit_gradients_equal_trls_on_the_same_products(
    kind: str, window: int, recompute: Recompute, tmp_path: Path
) -> None:
    pairs = make_pairs(19)
    base, _ = load_pretrained(str(plain(tmp_path)), ModelSettings(device="cpu", quantize=kind), IMPLEMENTATION)
    got, step, weights = unit_gradients(base, pairs, window, chunk=23, recompute=recompute)
    # PEFT differentiates bitsandbytes' products; for torchao's, autograd on the weights that they stand for.
    oracle = quantized(tmp_path, kind) if MADE_BY[kind] == "bitsandbytes" else dequantized(tmp_path, kind)
    wanted, loss = trl_gradients(oracle, pairs, weights, tmp_path)
    # Inputs that round to other 8-bit steps in other batches move single gradients by some percent, as generate's.
    tolerance = 0.1 if kind == "llm-int8" else 1e-4
    assert step.loss == pytest.approx(loss, rel=tolerance)
    assert worst_error(got, wanted) <= tolerance


@pytest.mark.parametrize("kind", LEARNED)
def test_an_adapter_on_a_quantized_base_learns_and_serves_what_it_learnt(kind: str, tmp_path: Path) -> None:
    save_tiny(tmp_path / "model-llama", **SHAPE)
    settings = {"model__quantize": kind, "guard__held_out_share": 0.0, "align__learning_rate": 0.02}
    # Random answers: there is nothing in their text to learn.
    settings |= {"align__beta": 0.1, "align__sft_weight": 0.0}
    with running_engine(tmp_path, **settings) as (engine, client):
        engine.submit(request("before", random_ids(20, 1), adapter="ann", logprobs=0))
        client.wait(lambda: "before" in client.finished)
        engine.submit_pairs(random_pairs(60))
        client.wait(lambda: len(client.of(PairRetired)) >= 60)
        wait_idle(engine)
        engine.submit(request("after", random_ids(20, 1), adapter="ann", logprobs=0))
        client.wait(lambda: "after" in client.finished)
        assert client.finished["after"].version > 0
    scores = sorted(client.of(PairScored), key=lambda score: score.version)
    assert sum(score.reward_margin > 0 for score in scores[-20:]) >= 17
    assert [e.logprob for e in client.tokens["after"]] != [e.logprob for e in client.tokens["before"]]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.values[0] in ("int8", "int4")])
def test_a_kept_graph_holds_no_dequantized_weight(kind: str, tmp_path: Path) -> None:
    model = quantized(tmp_path, kind).model.layers[0].mlp.up_proj
    saved: list[int] = []
    x = torch.randn(1, 3, model.in_features, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        FrozenLinear(model)(x)
    assert sum(saved) <= x.numel()


@pytest.mark.parametrize("bias", [False, True])
def test_a_wide_weight_that_is_only_known_by_its_products_is_found_part_by_part(bias: bool) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    torch.manual_seed(0)
    linear = nn.Linear(1088, 64, bias=bias).requires_grad_(False)
    quantization.quantize_(linear, make_config("int4", CPU, torch.float32).quant_type)
    x, upstream = torch.randn(2, 5, 1088, requires_grad=True), torch.randn(2, 5, 64)
    FrozenLinear(linear)(x).backward(upstream)
    # The product is linear in its input: unit steps give its derivative.
    weight = linear(torch.eye(1088)) - linear(torch.zeros(1, 1088))
    torch.testing.assert_close(x.grad, upstream @ weight.t(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("stored", "reason"),
    [
        ({"quant_method": "gptq", "bits": 8, "group_size": 128}, "gptq needs gptqmodel and optimum, .*: pip install"),
        ({"quant_method": "awq", "bits": 8, "group_size": 128}, "awq needs gptqmodel, .*: pip install gptqmodel"),
        ({"quant_method": "hqq"}, "hqq needs hqq, not installed here: pip install hqq"),
        ({"quant_method": "magic"}, "quantization 'magic' is not known to transformers"),
        ({"bits": 4}, "quantization None is not known to transformers"),
        ({"quant_method": "spqr"}, "quantization spqr: "),
        ({"quant_method": "fbgemm_fp8"}, "quantization fbgemm_fp8: "),
        (
            {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {}},
            r"compressed-tensors \(int-quantized\) does not stay packed .*: give the plain checkpoint",
        ),
        ({"quant_method": "metal"}, "quantization metal cannot be computed on this cpu .*: give the plain checkpoint"),
    ],
)
def test_what_cannot_be_multiplied_here_is_refused_before_the_weights_are_read(
    stored: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    packages = {"gptq": "gptqmodel", "awq": "gptqmodel", "hqq": "hqq"}
    if importlib.util.find_spec(packages.get(stored.get("quant_method", ""), "no_such_package")):
        pytest.skip("its package is installed")
    folder = plain(tmp_path)
    (folder / "model.safetensors").write_bytes(b"not read")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": stored}))
    with pytest.raises(ModelRefused, match=reason) as refused:
        ServedModel.load(folder, ModelSettings(device="cpu"))
    assert "\n" not in str(refused.value)


def test_torchaos_gpu_layouts_are_refused_on_a_cpu(tmp_path: Path) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    from transformers import TorchAoConfig

    for layout in ("tile_packed_to_4d", "plain"):
        kind = TorchAoConfig(quantization.Int4WeightOnlyConfig(group_size=64, int4_packing_format=layout))
        folder = plain(tmp_path)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "quantization_config": kind.to_dict()}))
        with pytest.raises(ModelRefused, match=f'int4 in the layout "{layout}" is read by GPU kernels alone'):
            ServedModel.load(folder, ModelSettings(device="cpu"))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.values[0] == "int8"])
def test_a_quantized_checkpoint_is_not_quantized_again(kind: str, tmp_path: Path) -> None:
    folder = save_quantized(tmp_path, kind)
    with pytest.raises(ModelRefused, match=r'already quantized \(torchao\): leave model.quantize = ""'):
        ServedModel.load(folder, ModelSettings(device="cpu", quantize="nf4"))


@pytest.mark.parametrize("kind", KINDS)
def test_other_weights_or_another_quantization_have_another_fingerprint(kind: str, tmp_path: Path) -> None:
    def fingerprint(quantize: str) -> str:
        return ServedModel.load(plain(tmp_path), ModelSettings(device="cpu", quantize=quantize)).fingerprint

    assert fingerprint(kind) == fingerprint(kind) != fingerprint("")


@pytest.mark.parametrize("kind", KINDS)
def test_packing_for_onednn_leaves_quantized_linears_alone(kind: str, tmp_path: Path) -> None:
    model = ServedModel.load(plain(tmp_path), ModelSettings(device="cpu", quantize=kind))
    model.attach_lora(AlignSettings(), 1)
    before = model.logits(torch.ones(2, 128))
    model.pack_weights()
    with torch.no_grad():
        torch.testing.assert_close(model.logits(torch.ones(2, 128)), before, atol=1e-4, rtol=1e-5)
