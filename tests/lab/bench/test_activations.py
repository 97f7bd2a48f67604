"""Bytes that training keeps of a forward: those of well-known shapes, and their order."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from transformers import AutoConfig

from edged.cli.main import cli

MODELS = Path(__file__).parents[3] / "configs" / "models"
HIDDEN, KV, MLP, HEADS = 4096, 1024, 14336, 32
LEAN = 2 * (4 * HIDDEN + 2 * KV + 2 * MLP) + 4 * HEADS
"""Of an 8B's token in one layer: input, query, attention, its projection; keys, values; gate, up; and logsumexp."""
RANK_ROWS = 2 * 16


def kept(*arguments: str) -> dict[str, float]:
    command = ["bench", "activations", "-m", str(MODELS / "llama-3.1-8b.json"), "--tokens", "512", "--json"]
    result = CliRunner().invoke(cli, [*command, *arguments])
    assert result.exit_code == 0, result.output
    found = json.loads(result.output[result.output.index("{") :])
    rows = {row["kept"]: row["bytes_per_token_layer"] for row in found["rows"]}
    assert [row["total_bytes"] for row in found["rows"]] == [
        32 * 512 * row["bytes_per_token_layer"] + row["once_bytes"] for row in found["rows"]
    ]
    return rows


def test_algorithm_1_keeps_what_the_shapes_say() -> None:
    every, down = kept(), kept("--peft", "lora:down_proj")
    assert every["+ rematerialization"] == down["+ rematerialization"] == LEAN
    # The inputs of the adapted linears (two norms and the product of gate and up), and seven low-rank rows.
    assert every["Algorithm 1"] == LEAN + 2 * (2 * HIDDEN + MLP) + 7 * RANK_ROWS
    assert down["Algorithm 1"] == LEAN + 2 * MLP + RANK_ROWS
    assert every["+ token windows"] == 2 * (HIDDEN + 2 * KV)


def test_what_ia3_adds_to_the_same_results_is_what_it_scales() -> None:
    ia3, down = kept("--peft", "ia3"), kept("--peft", "lora:down_proj")
    assert ia3["+ rematerialization"] == LEAN
    # The inputs of the down projection, and keys and values beside what they were before.
    assert ia3["Algorithm 1"] == LEAN + 2 * (MLP + 2 * KV)
    # As `torch.addcmul` saves the unscaled keys and values; what a scaled key becomes is saved by both.
    frozen = "autograd, frozen weights, sdpa"
    assert ia3[frozen] == down[frozen] + 2 * 2 * KV - RANK_ROWS
    assert ia3["+ token windows"] == down["+ token windows"]


@pytest.mark.parametrize("peft", ["lora:all", "ia3"])
def test_each_step_leaves_something_out_and_windows_bound_what_is_there_once(peft: str) -> None:
    rows = list(kept("--peft", peft).values())
    assert rows == sorted(rows, reverse=True)
    assert len(set(rows)) == 6


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, ["bench", "activations", "-m", str(tmp_path)])
    assert result.exit_code != 0
    assert "has no configuration that can be read" in result.output
    result = CliRunner().invoke(cli, ["bench", "activations", "-m", str(tmp_path), "--peft", "dora"])
    assert "lora:all" in result.output


@pytest.mark.parametrize(
    ("kind", "peft", "refusal"),
    [
        ("vit", "lora:all", "is no causal language model of transformers"),
        ("t5", "lora:all", "is no causal language model of transformers"),
        ("gpt2", "lora:down_proj", "--peft lora:down_proj: the model has no linear named down_proj: use lora:all"),
        ("olmo2", "ia3", "--peft ia3: the model has no linear named by PEFT: use lora:all"),
        ("qwen3_moe", "lora:down_proj", "--peft lora:down_proj: the model has no linear named down_proj: use lora:all"),
    ],
)
def test_a_model_whose_first_layer_cannot_be_accounted_is_refused_in_a_sentence(
    tmp_path: Path, kind: str, peft: str, refusal: str
) -> None:
    AutoConfig.for_model(kind).save_pretrained(tmp_path)
    result = CliRunner().invoke(cli, ["bench", "activations", "-m", str(tmp_path), "--peft", peft])
    assert result.exit_code == 1
    assert refusal in " ".join(result.output.split())


def test_a_model_of_unlike_layers_is_refused(tmp_path: Path) -> None:
    AutoConfig.for_model("qwen3_moe", decoder_sparse_step=2, num_hidden_layers=2).save_pretrained(tmp_path)
    result = CliRunner().invoke(cli, ["bench", "activations", "-m", str(tmp_path)])
    assert result.exit_code == 1
    assert "the layers of Qwen3MoeForCausalLM differ: the first one cannot stand for all" in result.output


@pytest.mark.parametrize("window", ["64", "512", "4096"])
def test_what_is_there_once_is_one_window_of_one_layer(window: str) -> None:
    command = ["bench", "activations", "-m", str(MODELS / "llama-3.1-8b.json"), "--tokens", "512", "--json"]
    result = CliRunner().invoke(cli, [*command, "--window", window])
    found = json.loads(result.output[result.output.index("{") :])
    rows = min(int(window), 512)
    assert found["window_tokens"] == rows
    accumulators, whole = 2 * 4 * KV * 512, next(r for r in found["rows"] if "frozen" in r["kept"])
    graph = found["rows"][-1]["once_bytes"] - accumulators
    # Beside what autograd keeps of the rows there are the earlier keys and values, and the mask.
    most = rows * whole["bytes_per_token_layer"] + 2 * 512 * (2 * HIDDEN + rows)
    assert 0.9 * rows * whole["bytes_per_token_layer"] < graph < most
