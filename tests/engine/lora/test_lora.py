"""Rows of a packed batch see their own adapter, however the runs of rows are multiplied."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext, suppress
from typing import Any, Literal, cast

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from edged.engine.attention.packed_batch import Segment, pack
from edged.engine.attention.paged import IMPLEMENTATION, attention_over, attention_pass
from edged.engine.attention.selection import Backends, pick_lora_kernel, selftest_of_lora
from edged.engine.lora.linear import LoraSlots, siblings
from edged.engine.lora.runs import LoraTiles, Run
from edged.engine.lora.segments import NO_SLOT, NativeUpdates
from edged.engine.model.served_model import ServedModel
from edged.engine.native.library import kernels, why_no_kernels
from edged.settings.kernels import Kernels
from edged.settings.load import AlignSettings
from tests.models import tiny_model

Kernel = Literal["torch", "native", "triton"]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SLOTS, RANK, WIDE_IN, WIDE_OUT = 12, 4, 24, 40


@pytest.fixture(params=["torch", "native", "triton"])
def kernel(request: pytest.FixtureRequest) -> Kernel:
    """What multiplies the updates, where it can be had."""
    if request.param == "triton":
        pytest.importorskip("triton")
    if request.param == "native" and (kernels() is None or DEVICE.type != "cpu"):
        pytest.skip(why_no_kernels() or "the compiled kernels are for the CPU")
    return cast(Kernel, request.param)


def wrapped(
    device: torch.device = DEVICE,
) -> tuple[nn.Linear, nn.Module, LoraSlots, dict[int, tuple[torch.Tensor, torch.Tensor]]]:
    """A linear, the model around it, its slots, and what was loaded into each."""
    torch.manual_seed(0)
    base = nn.Linear(WIDE_IN, WIDE_OUT, device=device)
    model = nn.Sequential(base).requires_grad_(False)
    slots = LoraSlots(model, ["0"], SLOTS, RANK, torch.float32)
    loaded = {
        slot: (torch.randn(RANK, WIDE_IN, device=device), torch.randn(WIDE_OUT, RANK, device=device))
        for slot in range(SLOTS)
    }
    for slot, (a, b) in loaded.items():
        slots.load(slot, {"0": (a, b)}, {"0": 0.5})
    return base, model, slots, loaded


class Counted(TorchDispatchMode):
    """Counts operations on tensors."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def operations_to_load(layers: int) -> int:
    """Operations that put an adapter of a model with so many layers into a slot."""
    model = nn.Sequential(*(nn.Linear(WIDE_IN, WIDE_IN) for _ in range(layers))).requires_grad_(False)
    names = [str(i) for i in range(layers)]
    slots = LoraSlots(model, names, SLOTS, RANK, torch.float32)
    weights = {name: (torch.randn(RANK, WIDE_IN), torch.randn(WIDE_IN, RANK)) for name in names}
    with Counted() as counted:
        slots.load(1, weights, dict.fromkeys(names, 2.0))
    for name, (a, b) in weights.items():
        assert torch.equal(slots.linears[name].down[1], a.t())  # type: ignore[index]
        assert torch.equal(slots.linears[name].up[1], b.t() * 2.0)  # type: ignore[index]
    return counted.count


def test_an_adapter_of_many_layers_is_loaded_in_as_few_operations_as_one_of_few() -> None:
    assert operations_to_load(40) == operations_to_load(2)


CASES = {
    "one adapter": [(0, 7, 3)],
    "a base row first": [(1, 3, 0), (3, 4, 1), (4, 9, 2)],
    "decodes of many": [(row, row + 1, row) for row in range(10)],
    "two decodes of each, after the base's": [(2 * slot + 3, 2 * slot + 5, slot + 1) for slot in range(5)],
    "gaps between slots": [(0, 1, 2), (1, 3, 4), (3, 6, 5)],
    "slots far apart": [(0, 1, 0), (1, 2, 11)],
    "a prompt among decodes": [(0, 1, 0), (1, 31, 1), (31, 33, 2), (33, 34, 3)],
    "prompts alone": [(0, 20, 5), (20, 40, 6)],
    "few rows after many of the base's": [(70, 72, 1), (72, 75, 4)],
    "more rows than the compiled kernels take": [(0, 70, 5), (70, 73, 6)],
    "nobody": [],
}


@pytest.mark.parametrize("runs", CASES.values(), ids=CASES.keys())
def test_each_row_gets_the_update_of_its_own_slot(
    runs: list[Run], kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, add = [], NativeUpdates.add
    monkeypatch.setattr(NativeUpdates, "add", lambda *given: calls.append(add(*given)))
    base, model, slots, loaded = wrapped()
    slots.runs.kernel = kernel
    x = torch.randn(1, 75, WIDE_IN, device=DEVICE)
    wanted = base(x)[0].detach().clone()
    for start, stop, slot in runs:
        a, b = loaded[slot]
        wanted[start:stop] += 0.5 * x[0, start:stop] @ a.t() @ b.t()
    with torch.inference_mode(), slots.packed(runs):
        got = model(x)[0]
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)
    assert len(calls) == int(kernel == "native" and 0 < sum(stop - start for start, stop, _ in runs) <= 64)
    with torch.inference_mode():
        torch.testing.assert_close(model(x)[0], base(x)[0])


def test_siblings_are_found_by_their_names_and_parent() -> None:
    names = ["a.k_proj", "b.q_proj", "a.o_proj", "a.q_proj", "up_proj", "gate_proj", "b.up_proj"]
    found = [["a.q_proj", "a.k_proj"], ["b.q_proj"], ["a.o_proj"], ["gate_proj", "up_proj"], ["b.up_proj"]]
    assert siblings(names) == found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("size_in", "sizes_out", "rank"),
    [(70, [33], 3), (600, [130, 40, 100], 16), (1030, [64], 40)],
    ids=["odd", "in parts", "a large rank"],
)
def test_the_triton_kernels_multiply_as_torch_does(
    size_in: int, sizes_out: list[int], rank: int, dtype: torch.dtype
) -> None:
    triton_lora = pytest.importorskip("edged.engine.lora.triton")
    pytest.importorskip("triton")
    if dtype == torch.bfloat16 and DEVICE.type == "cpu":
        pytest.skip("Triton's interpreter multiplies bfloat16 as if it were integers")
    torch.manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=DEVICE).mul(shape[-2] ** -0.5 if len(shape) == 3 else 1).to(dtype)

    x, ys = random(100, size_in), [random(100, size) for size in sizes_out]
    # As where A's lie side by side.
    downs = [random(3, size_in, 2 * rank)[:, :, :rank] for _ in ys]
    ups = [random(3, rank, size) for size in sizes_out]
    for runs in ([(2, 3, 0), (3, 5, 2), (9, 10, 1)], [(0, 5, 2), (5, 90, 1), (91, 95, 0)]):
        tiles = triton_lora.cut(runs, DEVICE)
        padded = LoraTiles(torch.cat((tiles.table, torch.zeros(9, 3, dtype=torch.int64, device=DEVICE))), tiles.rows)
        first, again, static = ([y.clone() for y in ys] for _ in range(3))
        triton_lora.add_updates(x, first, downs, ups, tiles)
        triton_lora.add_updates(x, again, downs, ups, tiles)
        triton_lora.add_updates(x, static, downs, ups, padded)
        tolerance = 1e-5 if dtype == torch.float32 else 8 * torch.finfo(dtype).eps
        for linear, y in enumerate(ys):
            wanted = y.double()
            for start, stop, slot in runs:
                wanted[start:stop] += x[start:stop].double() @ downs[linear][slot].double() @ ups[linear][slot].double()
            assert torch.equal(first[linear], again[linear])
            torch.testing.assert_close(first[linear].double(), wanted, atol=tolerance, rtol=tolerance)
            torch.testing.assert_close(static[linear], first[linear], atol=tolerance, rtol=tolerance)


def test_a_kernel_with_wrong_numbers_fails_its_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    triton_lora = pytest.importorskip("edged.engine.lora.triton")
    pytest.importorskip("triton")
    _, _, slots, _ = wrapped()
    assert selftest_of_lora(slots, "triton") == ""
    monkeypatch.setattr(triton_lora, "add_updates", lambda *given: None)
    assert selftest_of_lora(slots, "triton") == "its kernels give wrong numbers here"


def test_a_device_without_the_kernels_falls_back_with_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    _, _, slots, _ = wrapped(torch.device("cpu"))
    with caplog.at_level("INFO"):
        pick_lora_kernel(slots, Kernels(lora_kernel="torch"))
        assert not caplog.records
        pick_lora_kernel(slots, Kernels(lora_kernel="triton"))
    assert slots.runs.kernel == "torch"
    assert caplog.messages == [
        "LoRA updates are multiplied by torch (triton is not used: Triton has no kernels for cpu)"
    ]


@pytest.mark.skipif(kernels() is None, reason=why_no_kernels())
def test_the_compiled_kernels_are_what_a_cpu_uses_where_they_are_right(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _, _, slots, _ = wrapped(torch.device("cpu"))
    assert pick_lora_kernel(slots, Kernels()) == ""
    assert slots.runs.kernel == "native"
    _, _, slots, _ = wrapped(torch.device("cpu"))
    slots.rank, rank = 4096, slots.rank
    assert pick_lora_kernel(slots, Kernels()) == "the compiled kernels are for ranks up to 1024, not for 4096"
    assert slots.runs.kernel == "torch"
    slots.rank = rank
    monkeypatch.setattr(NativeUpdates, "add", lambda self, x, out, slots: None)
    with caplog.at_level("INFO"):
        assert pick_lora_kernel(slots, Kernels()) == "its kernels give wrong numbers here"
    assert slots.runs.kernel == "torch"
    assert "native is not used: its kernels give wrong numbers here" in caplog.text


def count_launches(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the number of linears of each call of Triton's kernels."""
    counted: list[int] = []
    if kernel == "triton":
        from edged.engine.lora import triton as triton_lora

        add = triton_lora.add_updates
        monkeypatch.setattr(
            triton_lora, "add_updates", lambda x, ys, *rest: [counted.append(len(ys)), add(x, ys, *rest)]
        )
    return counted


def test_a_packed_batch_of_two_adapters_answers_as_peft_does(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    peft_model = get_peft_model(tiny_model(), LoraConfig(r=5, lora_alpha=9, target_modules="all-linear"), "ann")
    peft_model.add_adapter("bob", LoraConfig(r=5, lora_alpha=9, target_modules="all-linear"))
    generator = torch.Generator().manual_seed(1)
    for name, parameter in peft_model.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(0.0, 0.2, generator=generator)
    base = tiny_model().requires_grad_(False).to(DEVICE)
    base.set_attn_implementation(IMPLEMENTATION)
    model = ServedModel(base)
    model.attach_lora(AlignSettings(rank=5), 3)
    model.lora.runs.kernel = kernel
    for slot, adapter in enumerate(("ann", "bob")):
        parts = {name: peft_model.get_submodule(f"base_model.model.{name}") for name in model.lora.linears}
        weights = {name: (part.lora_A[adapter].weight, part.lora_B[adapter].weight) for name, part in parts.items()}
        model.lora.load(slot, weights, dict.fromkeys(parts, 9 / 5))
    paths = Backends("triton", 8) if kernel == "triton" else Backends()
    kv = model.new_kv(12, 8)
    texts = {"ann": list(range(20, 50)), "bob": list(range(90, 99)), None: list(range(60, 77))}
    got = {}
    launches = count_launches(kernel, monkeypatch)
    with torch.inference_mode():
        # All but each text's last token, then that one.
        for last in (False, True):
            segments = []
            for slot, (adapter, ids) in enumerate(texts.items()):
                own = slice(len(ids) - 1, None) if last else slice(0, len(ids) - 1)
                pages = np.arange(1, 5) + 4 * slot if slot < 2 else np.arange(9, 12)
                segments.append(
                    Segment(ids[own], own.start, pages, slot if adapter else NO_SLOT, own.start, samples=True)
                )
            batch = pack(segments, kv, DEVICE, paths.tile_tokens, lora=kernel == "triton")
            with (
                attention_pass(attention_over(batch, kv, paths.decode)),
                model.lora.packed(batch.runs, batch.lora_tiles),
            ):
                logits = model.forward(batch.input_ids, batch.position_ids, batch.logit_rows).cpu()
            got.update({(adapter, last): row for adapter, row in zip(texts, logits, strict=True)})
        for adapter, ids in texts.items():
            with peft_model.disable_adapter() if adapter is None else nullcontext():
                if adapter is not None:
                    peft_model.set_adapter(adapter)
                wanted = peft_model(input_ids=torch.tensor([ids])).logits[0]
            torch.testing.assert_close(got[adapter, False], wanted[-2], atol=2e-4, rtol=1e-4)
            torch.testing.assert_close(got[adapter, True], wanted[-1], atol=2e-4, rtol=1e-4)
    # Queries, keys and values in one launch; gate and up, too.
    assert launches == ([3, 1, 2, 1] * model.shape.layers * 2 if kernel == "triton" else [])


def with_lora() -> ServedModel:
    base = tiny_model().requires_grad_(False).to(DEVICE)
    base.set_attn_implementation(IMPLEMENTATION)
    model = ServedModel(base)
    model.attach_lora(AlignSettings(rank=4), 2)
    return model


def test_an_interrupted_forward_keeps_no_output_of_siblings() -> None:
    pytest.importorskip("triton")
    model = with_lora()
    model.lora.runs.kernel = "triton"
    query = model.layers[0].self_attn.q_proj
    x = torch.randn(1, 3, query.in_features, device=DEVICE)
    alive = weakref.ref(x)
    with suppress(MemoryError), torch.inference_mode(), model.lora.packed([(0, 3, 1)]):
        query(x)
        del x
        assert alive() is not None, "keys and values are not taken yet"
        raise MemoryError
    assert alive() is None


def test_slots_that_are_taken_off_are_freed_at_once() -> None:
    model = with_lora()
    alive = [weakref.ref(linear) for linear in model.lora.linears.values()]
    gc.disable()
    try:
        model.lora.unwrap()
        assert [each() for each in alive] == [None] * len(alive)
    finally:
        gc.enable()
