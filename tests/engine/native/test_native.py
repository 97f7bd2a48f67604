"""The compiled kernels compute what torch does, and a row's numbers do not depend on its neighbours or on threads."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from edged.engine import native
from edged.engine.attention.base import AttentionCall
from edged.engine.attention.cpu import NativeDecode
from edged.engine.attention.packed_batch import Segment, pack
from edged.engine.attention.paged import PagedAttention, attend, attention_pass
from edged.engine.attention.selection import pick_lora_kernel, pick_paths
from edged.engine.kv.pruned_layout import PrunedLayout
from edged.engine.kv.store import KvStore
from edged.engine.lora.linear import LoraSlots
from edged.engine.lora.segments import NativeUpdates
from edged.engine.model.cpu_layers import ShortLayer, shorten_layers
from edged.engine.model.inspection import AttentionSpy
from edged.engine.native import library
from edged.engine.native.library import LinearParts, group_of, kernels
from edged.settings.kernels import Kernels
from tests.engine.attention.test_attention import SHAPES
from tests.engine.model.test_cpu_layers import served_model

pytestmark = pytest.mark.skipif(kernels() is None, reason=library.why_no_kernels())


@pytest.fixture
def threads() -> Iterator[None]:
    """What a test sets is not the next one's."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class Decodes:
    """Sequences with `context` rows of K/V before the new one, over pages in any order."""

    def __init__(self, kv_heads: int, group: int, size: int, context: list[int]) -> None:
        torch.manual_seed(0)
        self.kv = KvStore(64, 16, 2, kv_heads, size, torch.float32, torch.device("cpu"))
        self.kv.keys.normal_()
        self.kv.values.normal_()
        self.tables = torch.zeros(len(context), max(context) // 16 + 1, dtype=torch.int64)
        pages = iter((torch.randperm(63) + 1).tolist())
        for row, earlier in enumerate(context):
            for column in range(earlier // 16 + 1):
                self.tables[row, column] = next(pages)
        self.context = torch.tensor(context)
        self.query = torch.randn(kv_heads * group, len(context), size)
        self.new = torch.randn(kv_heads, len(context), size), torch.randn(kv_heads, len(context), size)

    def attended(self, window: int | None = None, cap: float | None = None, rows: slice = slice(None)) -> torch.Tensor:
        query, new = self.query[:, rows], (self.new[0][:, rows], self.new[1][:, rows])
        own = NativeDecode(self.kv, self.tables[rows], self.context[rows], None, len(query))
        return own.attend(AttentionCall(1, query.shape[2] ** -0.5, window, cap), query, new)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_decodes_attend_as_torch_does_and_store_what_is_new(
    shape: tuple[int, int, int, int | None, float | None, list[int]],
) -> None:
    kv_heads, group, size, window, cap, context = shape
    its = Decodes(kv_heads, group, size, context)
    kv = its.kv
    untouched = kv.keys[0].clone()
    got = its.attended(window, cap)
    for row, earlier in enumerate(context):
        keys, values = kv.read(1, kv.block_index(its.tables[row : row + 1]), 1)
        assert torch.equal(keys[0, :, earlier], its.new[0][:, row])
        assert torch.equal(values[0, :, earlier], its.new[1][:, row])
        seen = slice(max(0, earlier + 1 - window) if window else 0, earlier + 1)
        grouped = its.query[:, row].view(1, kv_heads, group, size)
        wanted = attend(AttentionCall(1, size**-0.5, window, cap), grouped, keys[:, :, seen], values[:, :, seen], None)
        torch.testing.assert_close(got[row], wanted.reshape(-1, size), atol=1e-5, rtol=1e-5)
    assert torch.equal(kv.keys[0], untouched)


def test_what_is_not_finite_is_told_by_the_answer_and_not_by_the_cache() -> None:
    its = Decodes(2, 3, 32, [20, 40])
    its.new[0][0, 0, :3] = torch.tensor([float("nan"), float("inf"), float("-inf")])
    its.query[3, 1, 0] = float("nan")
    got = its.attended()
    stored = its.kv.read(1, its.kv.block_index(its.tables[:1]), 1)[0][0, 0, 20, :3]
    largest = torch.finfo(torch.float32).max
    assert stored.tolist() == [0.0, largest, -largest]
    assert got[1, 3].isnan().all()
    assert got[1, 4:].isfinite().all()


@pytest.mark.parametrize("most", [1, 2, 3])
def test_a_sequence_attends_alike_beside_any_others_and_on_any_number_of_threads(most: int, threads: None) -> None:
    torch.set_num_threads(1)
    alone = Decodes(2, 3, 32, [5, 300, 131, 77]).attended(rows=slice(1, 2))
    torch.set_num_threads(most)
    assert torch.equal(Decodes(2, 3, 32, [5, 300, 131, 77]).attended()[1:2], alone)


@pytest.mark.parametrize("rank", [4, 16, 12])
@pytest.mark.parametrize("most", [1, 3])
def test_a_row_passes_a_layer_alike_beside_any_others_and_on_any_number_of_threads(
    most: int, rank: int, threads: None
) -> None:
    model = served_model(rank=rank)
    lora, shape = model.lora, model.shape
    layer = ShortLayer(model.layers[0], shape.attention[0], lora, AttentionCall(0, 1.0), torch.empty(0))
    torch.manual_seed(0)
    x, angles = torch.randn(9, shape.hidden_size), torch.rand(1, 9, shape.attention[0].head_dim)
    slots = [1, 1, -1, 0, -1, 1, 0, 0, -1]

    def passed(rows: slice, threads: int) -> torch.Tensor:
        torch.set_num_threads(threads)
        runs = [(row, row + 1, slot) for row, slot in enumerate(slots[rows]) if slot >= 0]
        with lora.packed(runs), attention_pass(AttentionSpy()):
            cos, sin = angles[:, rows].cos(), angles[:, rows].sin()
            return layer.short(x[rows], cos, sin)

    assert layer.fits(x, angles, angles)
    assert not layer.fits(x, angles[..., :-2], angles[..., :-2])
    assert not layer.fits(x, angles.double(), angles.double())
    alone = torch.cat([passed(slice(row, row + 1), 1) for row in range(9)])
    for count in range(1, 10):
        assert torch.equal(passed(slice(count), most), alone[:count])


@pytest.mark.parametrize(("size_in", "rank", "size_out"), [(30, 5, 13), (64, 16, 40), (7, 24, 3)])
@pytest.mark.parametrize("most", [1, 3])
def test_an_update_is_torchs_and_the_same_beside_any_others_and_on_any_number_of_threads(
    most: int, size_in: int, rank: int, size_out: int, threads: None
) -> None:
    torch.manual_seed(0)
    down, up = torch.randn(3, size_in, rank), torch.randn(3, rank, size_out)
    # Rows lie apart, as outputs of one product for several linears do.
    x, y = torch.randn(11, size_in + 3)[:, :size_in], torch.randn(11, size_out + 9)
    slots = torch.tensor([2, 2, 2, -1, 0, 1, 1, -1, -1, 0, 0])
    updates = NativeUpdates(down, up)

    def added(rows: slice, threads: int) -> torch.Tensor:
        torch.set_num_threads(threads)
        out = y.clone()
        updates.add(x[rows], out[rows, :size_out], slots[rows])
        return out[rows]

    alone = torch.cat([added(slice(row, row + 1), 1) for row in range(11)])
    for count in range(1, 12):
        assert torch.equal(added(slice(count), most), alone[:count])
    for row, slot in enumerate(slots.tolist()):
        wanted = y[row].double()
        if slot >= 0:
            wanted[:size_out] += x[row].double() @ down[slot].double() @ up[slot].double()
        torch.testing.assert_close(alone[row].double(), wanted, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("inputs", "outputs", "rows"),
    [(13, (7,), 5), (64, (30, 10, 10), 3), (100, (3,), 16), (24, (1, 2), 1), (40, (9, 6), 11)],
)
def test_products_of_any_size_are_torchs(inputs: int, outputs: tuple[int, ...], rows: int) -> None:
    compiled = kernels()
    assert compiled is not None
    torch.manual_seed(0)
    x, weights = torch.randn(rows, inputs), [torch.randn(size, inputs) for size in outputs]
    biases = [torch.randn(size) if index else None for index, size in enumerate(outputs)]
    out = torch.empty(rows, sum(outputs))
    group = group_of([LinearParts(*its) for its in zip(weights, biases, strict=True)])
    compiled.edged_product(ctypes.byref(group), x.data_ptr(), rows, out.data_ptr(), out.shape[1], 2)
    wanted = torch.cat([F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)], dim=1)
    torch.testing.assert_close(out, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, native.NOT_BUILT),
        (b"of long ago", native.OTHER_VERSION),
        (native.INTERFACE.encode(), "the compiled kernels cannot be loaded: "),
    ],
)
def test_an_edged_without_its_kernels_serves_by_torch_and_says_why(
    content: bytes | None, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "_kernels.so"
    if content is not None:
        path.write_bytes(content)
    for module in (native, library):
        monkeypatch.setattr(module, "shared_library", lambda: path if content is not None else None)
    library._loaded.cache_clear()
    try:
        assert kernels() is None
        assert shorten_layers(served_model()).startswith(reason)
        paths = pick_paths([(KvStore(4, 8, 1, 1, 8, torch.float32, torch.device("cpu")), 1)], Kernels())
        assert paths.decode == "ragged"
        assert paths.why_not["decode"].startswith(reason)
        slots = LoraSlots(torch.nn.Sequential(torch.nn.Linear(8, 8)), ["0"], 2, 4, torch.float32)
        assert pick_lora_kernel(slots, Kernels()).startswith(reason)
        assert slots.runs.kernel == "torch"
        with torch.inference_mode(), slots.packed([(0, 1, 0)]):
            assert slots.linears["0"](torch.ones(1, 1, 8)).isfinite().all()
    finally:
        library._loaded.cache_clear()


def test_keys_that_weigh_nothing_leave_an_answer_alone() -> None:
    """Scores of -inf: a whole piece of them, and some among others."""
    its = Decodes(1, 1, 8, [256])
    its.kv.keys.zero_()
    its.kv.values.fill_(torch.finfo(torch.float32).max)
    its.query.fill_(4.0)
    its.new[0].fill_(torch.finfo(torch.float32).min)
    its.new[1].fill_(torch.finfo(torch.float32).max)
    block = its.kv.block_index(its.tables[:1, :1])
    its.kv.keys[1, block] = torch.finfo(torch.float32).min
    its.kv.values[1, its.kv.block_index(its.tables[:1, 1:])] = 3.0
    torch.testing.assert_close(its.attended(), torch.full((1, 1, 8), 3.0))


def test_pruned_sequences_longer_than_a_piece_attend_alike_by_torch() -> None:
    torch.manual_seed(0)
    random = np.random.default_rng(0)
    kv = KvStore(64, 16, 2, 2, 32, torch.float32, torch.device("cpu"))
    kv.keys.normal_()
    kv.values.normal_()
    pages = random.permutation(np.arange(1, 61))
    counts = np.array([[30, 2], [5, 27]])
    segments = [
        Segment([5], 16 * 20 + 3, pages[:21], position=900, compacted=PrunedLayout(16, counts, 500)),
        Segment([5], 37, pages[21:24], position=37),
    ]
    query, key, value = (torch.randn(heads, 2, 32) for heads in (6, 2, 2))
    got, wanted = (
        torch.cat(
            [
                PagedAttention(pack(segments, kv, torch.device("cpu")), kv, path).attend(
                    AttentionCall(layer, 0.2), query, key, value
                )
                for layer in (0, 1)
            ]
        )
        for path in ("native", "padded")
    )
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)
