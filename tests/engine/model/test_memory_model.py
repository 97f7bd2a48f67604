"""The memory model: what it says of well-known shapes, and that a real engine takes what it says."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import pytest
import torch
from click.testing import CliRunner
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.support.random_llama import Shape, write_random_llama
from edged.cli.main import cli
from edged.engine.model.memory_model import (
    BaseShape,
    adapter_weights,
    adapters_that_fit,
    kept_bytes,
    kept_that_fits,
    needs,
    step_bytes,
)
from edged.engine.model.quantization import MADE_BY, form_of_checkpoint, form_of_setting, method_of
from edged.engine.model.served_model import ServedModel
from edged.lab.bench.activations import account
from edged.settings.load import ModelSettings, Settings, load_settings
from tests.models import READING, save_tiny, tiny_config

ROOT = Path(__file__).parents[3]
MODELS = ROOT / "configs" / "models"


def plan(*arguments: str, model: str = "llama-3.1-8b.json") -> tuple[int, dict]:  # type: ignore[type-arg]
    command = ["bench", "memory", "--model", str(MODELS / model), "--json", *arguments]
    result = CliRunner().invoke(cli, command)
    assert result.exit_code in (0, 1), result.output
    return result.exit_code, json.loads(result.output[result.output.index("{") :])


@pytest.mark.parametrize(("model", "parameters"), [("llama-3.1-8b.json", 8_030_261_248), ("mistral-7b.json", 7.248e9)])
def test_well_known_shapes_have_their_well_known_sizes(model: str, parameters: float) -> None:
    _, found = plan("--device-memory", "64", model=model)
    assert found["parameters"] == pytest.approx(parameters, rel=1e-3)
    assert found["parts"]["weights"] == 2 * found["parameters"]
    # 2 (keys, values) * 32 layers * 8 heads * 128 * 2 bytes
    assert found["kv_bytes_per_1k_tokens"] == 131_072_000


def test_an_8b_model_in_four_bits_with_training_and_kv_fits_32_gb() -> None:
    code, found = plan("--quantize", "nf4", "--device-memory", "32", "--context", "32768")
    assert code == 0
    assert found["fits"]
    linears = 32 * 4096 * (2 * 4096 + 2 * 1024 + 3 * 14336)
    # A scale of 64 weights takes a byte, and 256 of them 4 bytes more.
    assert found["parts"]["weights"] == round(linears * (0.5 + (1 + 4 / 256) / 64)) + 2 * (8_030_261_248 - linears)
    assert min(found["parts"][name] for name in ("lora_slots", "adapters", "step", "kept_graph", "iteration")) > 0
    taken = sum(found["parts"].values()) + found["context_bytes"]
    assert taken <= 32 * 2**30
    assert found["kv_tokens"] >= 32768


def test_what_does_not_fit_is_said_and_a_graph_is_given_up_first() -> None:
    code, found = plan("--device-memory", "16")
    assert (code, found["fits"], found["parts"]["kept_graph"]) == (1, False, 0)
    code, found = plan("--device-memory", "13.5", "--quantize", "nf4", "--context", "8192")
    assert (code, found["parts"]["kept_graph"]) == (0, 0)
    result = CliRunner().invoke(cli, ["bench", "memory", "-m", str(MODELS / "mistral-7b.json"), "--device-memory", "8"])
    assert result.exit_code == 1
    assert "does not fit 8.0 GiB" in result.output


def test_a_step_keeps_the_most_that_fits() -> None:
    shape = BaseShape.of_config(AutoConfig.from_pretrained(MODELS / "llama-3.1-8b.json"), "all-linear")

    def kept(setting: object, cuda: bool, most: float) -> str:
        settings = load_settings(environ={}, overrides={"align.recompute": setting})
        return kept_that_fits(shape, settings, torch.bfloat16, cuda, most)

    settings = load_settings(environ={})
    graph, lean = (kept_bytes(shape, settings, torch.bfloat16, kind) for kind in ("none", "selective"))
    # As `edged bench activations` counts them, and the last product's, which some models keep.
    assert lean == 256 * 32 * (2 * (5 * 4096 + 2 * 1024 + 2 * 14336) + 4 * 32)
    # Attention may be wider than the hidden states.
    wide = replace(shape, layer_heads=tuple(each._replace(head_dim=256) for each in shape.attention))
    assert kept_bytes(wide, settings, torch.bfloat16, "selective") == lean + 256 * 32 * 2 * 4096
    assert [kept("auto", False, most) for most in (graph, graph - 1, lean, lean - 1)] == [
        *("none", "selective", "selective", "full")
    ]
    assert [kept("auto", True, most) for most in (graph, graph - 1)] == ["none", "full"]
    assert [kept("selective", True, most) for most in (graph, lean - 1)] == ["selective", "full"]
    assert [kept("none", False, most) for most in (graph, graph - 1)] == ["none", "full"]
    assert kept("full", False, graph) == "full"
    more = 2 * settings.align.window_tokens * sum(fan_out for _, fan_out in shape.targets)
    assert kept_bytes(shape, settings, torch.bfloat16, "none", factors=True) == graph + more
    fitting = (kept_that_fits(shape, settings, torch.bfloat16, True, graph, more) for more in (False, True))
    assert list(fitting) == ["none", "full"]
    # The setting was a switch.
    switches = (True, False, "true", "false", 1, 0, "1", "0", "on", "off", "YES", "NO", "TRUE", "FALSE")
    assert [kept(switch, False, lean) for switch in switches] == ["selective", "full"] * 7
    shape = replace(shape, keeps_lean=False)
    assert [kept("auto", False, lean), kept("selective", False, graph), kept("auto", False, graph)] == [
        *("full", "full", "none")
    ]


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2", "phi3", "mixtral", "qwen3_moe"])
def test_what_a_step_keeps_is_what_autograd_saves_and_not_much_more(kind: str, tmp_path: Path) -> None:
    config = AutoConfig.for_model(kind, num_hidden_layers=2)
    config.save_pretrained(tmp_path)
    shape, settings = BaseShape.of_config(config, "all-linear"), load_settings(environ={})
    window = settings.align.window_tokens
    rows = {row["kept"]: row for row in account(tmp_path, "lora:all", window, window)["rows"]}
    graph, lean = (kept_bytes(shape, settings, torch.bfloat16, way) / shape.layers for way in ("none", "selective"))
    # A window's graph of one layer is there beside the gradients of its keys and values, in fp32.
    saved = (
        rows["+ token windows"]["once_bytes"]
        - 2 * 4 * window * shape.attention[0].kv_heads * shape.attention[0].head_dim
    )
    assert saved <= graph <= 1.65 * saved
    # Where attention has a soft cap, it is made of products that `lean` computes again.
    assert 0.97 <= lean / (window * rows["+ rematerialization"]["bytes_per_token_layer"]) <= 1.25


def test_what_layers_are_given_and_the_keys_that_later_ones_read_count() -> None:
    config = tiny_config("gemma4_text", **READING)
    shape, settings = BaseShape.of_config(config, "all-linear"), load_settings(environ={})
    own = tuple(each and each._replace(source=layer) for layer, each in enumerate(shape.layer_heads))
    plain = replace(shape, layer_input_size=0, layer_heads=own)
    # Eight numbers for each of six layers; keys and values of two heads of 16 and of two of 32, and fp32 gradients.
    each = 2 * 6 * 8 + (2 + 4) * 2 * (2 * 16 + 2 * 32)
    tokens, window = 2 * settings.align.max_pair_tokens, settings.align.window_tokens
    assert step_bytes(shape, settings, torch.bfloat16, 1) - step_bytes(plain, settings, torch.bfloat16, 1) == (
        tokens * each
    )
    for kind in ("none", "selective"):
        kept = [kept_bytes(of, settings, torch.bfloat16, kind) for of in (shape, plain)]
        assert kept[0] - kept[1] == window * each


def test_without_room_for_a_graph_the_lean_one_is_planned() -> None:
    found = [plan("--device", "cpu", "--device-memory", str(gib))[1]["parts"]["kept_graph"] for gib in (66, 40, 20)]
    assert found[0] > found[1] > found[2] == 0


def test_a_model_that_cannot_be_read_or_a_kind_that_is_not_there_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "nonsense"}')
    result = CliRunner().invoke(cli, ["bench", "memory", "--model", str(tmp_path)])
    assert "has no configuration that can be read" in result.output
    result = CliRunner().invoke(cli, ["bench", "memory", "-m", str(MODELS / "mistral-7b.json"), "--quantize", "q3"])
    assert "model.quantize" in result.output


@pytest.mark.parametrize(
    "kind", ["", *(kind for kind, package in MADE_BY.items() if importlib.util.find_spec(package))]
)
def test_weights_take_what_the_model_says_to_the_percent(kind: str, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "plain", hidden_size=512, intermediate_size=1024)
    model = ServedModel.load(folder, ModelSettings(device="cpu", quantize=kind))
    settings = load_settings(environ={})
    shape = BaseShape.of_config(AutoConfig.from_pretrained(folder), "all-linear")
    model.attach_lora(settings.align, 1)
    assert {name: getattr(model.shape, name) for name in asdict(shape)} == asdict(shape)
    form = form_of_setting(kind, torch.float32, False)
    assert needs(shape, settings, form, torch.float32, False, 1 << 30).weights == pytest.approx(
        model.shape.weight_bytes, rel=0.01
    )
    if kind in ("nf4", "llm-int8", "int8"):
        model = ServedModel.load(folder, ModelSettings(device="cpu", quantize=kind))
        model.model.save_pretrained(tmp_path / "saved")
        stored = method_of(AutoConfig.from_pretrained(tmp_path / "saved"))
        assert stored is not None
        assert form_of_checkpoint(stored, torch.float32, False) == form


def test_adapters_take_a_quarter_of_what_the_base_leaves() -> None:
    settings = load_settings(environ={})
    assert adapters_that_fit(1000, settings, torch.bfloat16, 1 << 30) == (64, 32)
    # 42 M weights: 24 bytes each as master and moments, now and in the version to go back to; 2 in the slot.
    assert adapters_that_fit(42_000_000, settings, torch.bfloat16, 24 << 30) == (5, 5)
    assert adapters_that_fit(42_000_000, settings, torch.bfloat16, 0) == (2, 2)


@pytest.mark.slow
@pytest.mark.parametrize("quantize", ["", "nf4"])
def test_an_engine_that_serves_and_learns_takes_what_was_predicted(quantize: str, tmp_path: Path) -> None:
    if quantize:
        pytest.importorskip(MADE_BY[quantize])
    shape = Shape(hidden=512, layers=12, heads=8, kv_heads=4, intermediate=2048, vocab=8192)
    model = AutoModelForCausalLM.from_pretrained(write_random_llama(tmp_path / "float32", shape), dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "bfloat16")
    command = [sys.executable, str(Path(__file__).with_name("memory_child.py")), str(tmp_path / "bfloat16"), quantize]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    # Graphs and activations are estimates, and the heap has holes.
    assert figures["measured"] == pytest.approx(figures["predicted"], rel=0.2)


def test_open_steps_hold_a_gradient_for_each_adapter_that_may_share_them() -> None:
    shape = BaseShape.of_config(AutoConfig.from_pretrained(str(MODELS / "mistral-7b.json")), "all-linear")
    weights = adapter_weights(shape.targets, load_settings(environ={}).align.rank)

    def step(joint: int, loaded: int) -> int:
        settings = load_settings(environ={}, overrides={"align.joint_adapters": joint})
        return step_bytes(shape, settings, torch.bfloat16, loaded)

    # Two steps of four adapters each, instead of two that keep an earlier group's gradient beside their own; and every
    # adapter's matrices in bfloat16.
    assert step(4, 64) - step(1, 64) == (4 * 4 + 6 * 2) * weights
    assert step(4, 6) - step(1, 6) == (2 * 4 + 4 * 2) * weights
    assert step(4, 2) - step(1, 2) == 2 * weights
    assert step(4, 2) < step(1, 3)


def test_the_box_is_this_one_where_none_is_given() -> None:
    assert plan("--device", "cpu")[1]["device_bytes"] == psutil.virtual_memory().total


@pytest.mark.parametrize(("stored", "most"), [("float32", 1.0), ("bfloat16", 1.5)])
def test_copies_of_weights_count_where_the_engine_would_make_them(
    stored: str, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config("llama", dtype=stored)
    shape = BaseShape.of_config(config, load_settings().align.target_modules)
    weights = 4 * (shape.hidden_size * shape.vocab_size + sum(rows * columns for rows, columns in shape.linears))

    def copies(beside: int, kernels: str = "") -> float:
        """Over the weights, with so many times their bytes free beside them and the adapters' slots."""
        monkeypatch.setenv("EDGED_KERNELS", kernels)
        settings = Settings.model_validate({"align": {"max_active_adapters": 1}})
        form = form_of_setting("", torch.float32, False)
        base = needs(shape, settings, form, torch.float32, False, 1 << 30)
        free = base.weights + base.lora_slots + beside * weights
        return needs(shape, settings, form, torch.float32, False, free).weight_copies / weights

    assert copies(100) == most
    assert copies(100, "fp16_weights=off") == copies(100, "cpu_kernels=off") == 1.0
    assert copies(100, "pack_weights=off") == 0.0
    assert copies(5) == 1.0
    assert copies(3) == 0.0
