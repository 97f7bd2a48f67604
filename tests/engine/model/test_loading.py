"""Loading needs the weights' memory and little beside: no second copy in another dtype, none that waits to be freed."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.support.packed_checkpoints import rewrite
from benchmarks.support.random_llama import Shape, write_random_llama
from edged.engine.model.loading import drop_cached
from edged.engine.model.quantization import MADE_BY
from tests.engine.model.test_stored_weights import w4a16

ROOT = Path(__file__).parents[3]
SHAPE = Shape(hidden=512, layers=12, heads=8, kv_heads=4, intermediate=2048, vocab=8192)
LARGEST = 4 * 8192 * 512
"""Bytes of the largest tensor in float32."""


Figures = dict[str, dict[str, int]]
pytestmark = pytest.mark.slow
QUANTIZE = [kind for kind, package in MADE_BY.items() if importlib.util.find_spec(package)]


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> Figures:
    """What loading 50 M weights took: from one float32 file, from bfloat16 files ("cast"), and quantized from those."""
    folder = tmp_path_factory.mktemp("checkpoint")
    model = AutoModelForCausalLM.from_pretrained(write_random_llama(folder / "plain", SHAPE), dtype=torch.bfloat16)
    model.save_pretrained(folder / "half", max_shard_size="40MB")
    assert len(list((folder / "half").glob("*.safetensors"))) > 1
    cases = {"plain": f"{folder}/plain:", "cast": f"{folder}/half:"}
    return measured({**cases, **{kind: f"{folder}/half:{kind}" for kind in QUANTIZE}})


def measured(cases: dict[str, str]) -> Figures:
    """What loading took, by case, in a process of its own."""
    command = [sys.executable, str(Path(__file__).with_name("loading_child.py")), *cases.values()]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return dict(zip(cases, map(json.loads, done.stdout.splitlines()[-len(cases) :]), strict=True))


def test_weights_of_the_same_dtype_are_used_where_the_file_is_mapped(figures: Figures) -> None:
    assert figures["plain"]["weights"] > 180 << 20
    assert figures["plain"]["peak"] < 0.1 * figures["plain"]["weights"]


def test_another_dtype_takes_the_weights_and_a_tenth_at_most(figures: Figures) -> None:
    assert figures["cast"]["weights"] > 180 << 20
    assert figures["cast"]["peak"] <= 1.1 * figures["cast"]["weights"]


@pytest.mark.parametrize("kind", QUANTIZE)
def test_quantizing_while_loading_never_holds_the_plain_weights(kind: str, figures: Figures) -> None:
    assert figures[kind]["weights"] < 80 << 20
    # Beside the weights: one tensor in float32 with what its quantization computes.
    assert figures[kind]["peak"] <= 1.1 * figures[kind]["weights"] + 2 * LARGEST


@pytest.mark.slow
@pytest.mark.skipif("int8" not in QUANTIZE, reason="there is no torchao")
def test_reading_other_forms_never_holds_the_plain_weights_beside_what_is_made_of_them(tmp_path: Path) -> None:
    forms = {"fp8": {"quant_method": "fp8", "weight_block_size": [128, 128]}, "packed": w4a16(group_size=128)}
    for name, stored in forms.items():
        write_random_llama(tmp_path / name, SHAPE)
        rewrite(tmp_path / name, stored)
    cases = {"plain": f"{tmp_path}/fp8:", "int8": f"{tmp_path}/fp8:int8", "packed": f"{tmp_path}/packed:"}
    found = measured(cases)
    assert found["plain"]["weights"] > 180 << 20
    for kind, size in found.items():
        assert kind == "plain" or size["weights"] < 80 << 20
        assert size["peak"] <= 1.1 * size["weights"] + 2 * LARGEST


def test_a_file_is_dropped_from_memory_unless_it_is_mapped(tmp_path: Path) -> None:
    drop_cached([tmp_path / "not there", tmp_path])
    file = tmp_path / "weights.safetensors"
    file.write_bytes(os.urandom(8 << 20))
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
    drop_cached([file])
    assert cached_pages(file) == 0


def cached_pages(file: Path) -> int:
    """Pages of a file that the system has in memory, as util-linux' fincore counts them."""
    if shutil.which("fincore") is None:
        pytest.skip("there is no fincore")
    tool = subprocess.run(["fincore", "--noheadings", "--output", "PAGES", str(file)], capture_output=True, text=True)
    if tool.returncode:
        pytest.skip("fincore cannot be run here")
    return int(tool.stdout)
