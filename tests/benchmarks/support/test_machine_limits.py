"""Floors count what a forward really reads and computes, as torch's own counter sees it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from benchmarks.support import machine_limits
from benchmarks.support.machine_limits import Machine, Sizes, Work
from benchmarks.support.random_llama import SHAPES, write_random_llama


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_llama(tmp_path_factory.mktemp("model"), SHAPES["4m"])


@pytest.fixture(scope="module")
def model(model_dir: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(model_dir, attn_implementation="eager")
    return model.eval().requires_grad_(False)


def operations(work: Callable[[], object]) -> int:
    with FlopCounterMode(display=False) as counter:
        work()
    return int(counter.get_total_flops())


def test_the_numbers_are_those_of_the_model(model_dir: Path, model: PreTrainedModel) -> None:
    sizes = Sizes.of(model_dir, "float32", rank=8)
    norms = sum(p.numel() for p in model.parameters() if p.dim() == 1)
    assert sizes.layer_numbers + sizes.head_numbers == sum(p.numel() for p in model.parameters()) - norms
    linears = [m for m in model.model.layers.modules() if isinstance(m, torch.nn.Linear)]
    assert sizes.adapter_numbers == sum(8 * (m.in_features + m.out_features) for m in linears)
    cache = DynamicCache()
    model(torch.ones(1, 1, dtype=torch.long), past_key_values=cache)
    assert sizes.kv_bytes == sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def test_a_decode_is_counted_as_torch_counts_it(model_dir: Path, model: PreTrainedModel) -> None:
    batch, context = 3, 40
    cache = DynamicCache()
    with torch.inference_mode():
        model(torch.ones(batch, context - 1, dtype=torch.long), past_key_values=cache)
        seen = operations(lambda: model(torch.ones(batch, 1, dtype=torch.long), past_key_values=cache))
    # The rotary embedding's product is counted by torch too.
    assert machine_limits.decode(Sizes.of(model_dir, "float32"), batch, context).operations == pytest.approx(
        seen, rel=1e-3
    )


def test_weights_that_are_stored_in_16_bits_are_read_as_such(tmp_path: Path) -> None:
    found = {}
    for dtype in ("float16", "float32"):
        write_random_llama(tmp_path / dtype, SHAPES["4m"], dtype)
        found[dtype] = Sizes.of(tmp_path / dtype, "float32", rank=4)
    half, full = found["float16"], found["float32"]
    assert full.matrix_bytes == 2 * half.matrix_bytes == 4 * (full.layer_numbers + full.head_numbers)
    assert half.adapter_bytes == full.adapter_bytes
    assert machine_limits.decode(full, 1, 10).bytes - machine_limits.decode(half, 1, 10).bytes == half.matrix_bytes
    assert machine_limits.decode(full, 1, 10).operations == machine_limits.decode(half, 1, 10).operations
    for kind in ("forward", "head", "layer"):
        assert machine_limits.unit(full, kind, 8).bytes == 2 * machine_limits.unit(half, kind, 8).bytes


def test_a_prefill_attends_to_half_of_the_square(model_dir: Path, model: PreTrainedModel) -> None:
    tokens = 64
    sizes = Sizes.of(model_dir, "float32")
    with torch.inference_mode():
        seen = operations(lambda: model(torch.ones(1, tokens, dtype=torch.long), logits_to_keep=1))
    hidden_half = tokens * (tokens - 1) / 2 * 4 * sizes.layers * sizes.heads * sizes.head_dim
    assert machine_limits.prefill(sizes, tokens).operations == pytest.approx(seen - hidden_half, rel=1e-3)


def test_a_step_is_a_forward_and_the_gradient_of_its_inputs(model_dir: Path, model: PreTrainedModel) -> None:
    tokens = 64
    sizes = Sizes.of(model_dir, "float32")
    ids = torch.ones(1, tokens, dtype=torch.long)

    def step() -> None:
        # The second layer's input is the first that needs a gradient, as the first layer's adapters are the last to.
        embedded = model.model.embed_tokens(ids).requires_grad_()
        model(inputs_embeds=embedded).logits.sum().backward()

    hidden_half = 3 * tokens * (tokens - 1) / 2 * 4 * sizes.layers * sizes.heads * sizes.head_dim
    first = 2 * tokens * sizes.hidden * (sizes.heads + 2 * sizes.kv_heads) * sizes.head_dim
    # An answer without a prompt: every token is scored.
    counted = machine_limits.dpo_step(sizes, [(0, tokens, 0)]).operations
    assert counted == pytest.approx(operations(step) - hidden_half - first, rel=1e-3)


def test_the_units_of_a_step_come_to_the_step() -> None:
    """Without attention (one layer, whose inputs need no gradient in a whole step), as `dpo_step` counts it."""
    sizes = Sizes(hidden=8, layers=1, heads=0, kv_heads=0, head_dim=4, intermediate=16, vocab=32, itemsize=4, rank=2)
    whole = machine_limits.dpo_step(sizes, [(0, 5, 0)])
    for kinds in (("graph", "grad", "head"), ("layer", "head")):
        units = [machine_limits.unit(sizes, kind, 5) for kind in kinds]
        assert sum(work.operations for work in units) == whole.operations
    assert machine_limits.unit(sizes, "forward", 5).operations == 2 * 5 * sizes.layer_numbers
    assert machine_limits.unit(sizes, "score", 5).operations == machine_limits.unit(sizes, "head", 5).operations / 2
    assert machine_limits.unit(sizes, "step", 3).bytes == 3 * 28 * sizes.adapter_numbers


def test_the_answers_see_the_prompt_and_themselves() -> None:
    sizes = Sizes(hidden=8, layers=1, heads=2, kv_heads=1, head_dim=4, intermediate=16, vocab=32, itemsize=4)
    prompt, chosen, rejected = 5, 3, 4
    seen = sum(range(1, 6)) + sum(range(6, 9)) + sum(range(6, 10))
    whole = machine_limits.dpo_step(sizes, [(prompt, chosen, rejected)]).operations
    apart = machine_limits.dpo_step(sizes, [(prompt, 0, 0), (0, chosen, 0), (0, 0, rejected)]).operations
    alone = sum(range(1, 6)) + sum(range(1, 4)) + sum(range(1, 5))
    assert whole - apart == 3 * (seen - alone) * 4 * 2 * 4


def test_the_floor_is_the_longer_of_reading_and_computing() -> None:
    machine = Machine(bytes_per_s=10.0, operations_per_s=100.0)
    assert Work(20.0, 100.0).floor_s(machine) == 2.0
    assert Work(20.0, 300.0).floor_s(machine) == 3.0


def test_adapters_are_read_once_each_and_computed_for_every_row() -> None:
    sizes = Sizes(8, 1, 2, 1, 4, 16, 32, itemsize=4, rank=2)
    none, one, two = (machine_limits.decode(sizes, 4, 10, adapters) for adapters in (0, 1, 2))
    assert one.bytes - none.bytes == two.bytes - one.bytes == 4 * sizes.adapter_numbers
    assert one.operations - none.operations == 2 * 4 * sizes.adapter_numbers
    assert two.operations == one.operations


def test_the_machine_is_measured() -> None:
    machine = machine_limits.measure_machine(torch.device("cpu"), "float32")
    assert 1e8 < machine.bytes_per_s < 1e13
    assert 1e8 < machine.operations_per_s < 1e15
    assert "GB/s" in machine.text()


def test_a_copy_moves_every_byte_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    copies = []
    monkeypatch.setattr(machine_limits, "_READ_BYTES", {"cpu": 1 << 20})

    def two_seconds(work: Callable[[], torch.Tensor], device: torch.device) -> float:
        copies.append(work().nbytes)
        return 2.0

    monkeypatch.setattr(machine_limits, "_fastest_s", two_seconds)
    assert machine_limits.copy_bytes_per_s(torch.device("cpu")) == 1 << 20
    assert copies == [1 << 20]
