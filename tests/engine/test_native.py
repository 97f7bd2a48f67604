"""The compiled kernels compute what torch does, and a row's numbers do not depend on its neighbours or on threads."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from edged.engine import native
from edged.engine.attention import attend
from edged.engine.kv import KvStore
from edged.engine.native.decode import NativeDecode
from edged.engine.native.layers import NativeLayer, Scratch
from edged.engine.native.library import group_of, kernels
from edged.engine.native.trial import shorten_layers
from tests.engine.test_attention import SHAPES
from tests.engine.test_native_layers import served_model

pytestmark = pytest.mark.skipif(kernels() is None, reason=native.NOT_BUILT)


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
        own = NativeDecode(self.kv, self.tables[rows], self.context[rows], len(query), None)
        return own.attend(1, query, new, query.shape[2] ** -0.5, window, cap)


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
        wanted = attend(grouped, keys[:, :, seen], values[:, :, seen], None, size**-0.5, cap)
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


@pytest.mark.parametrize("most", [1, 2, 3])
def test_a_row_passes_a_layer_alike_beside_any_others_and_on_any_number_of_threads(most: int, threads: None) -> None:
    model = served_model()
    assert model.lora is not None
    layer = NativeLayer(model.layers[0], model.shape.heads, model.shape.head_dim, model.lora.runs, Scratch())
    torch.manual_seed(0)
    x, angles = torch.randn(7, model.shape.hidden_size), torch.rand(1, 7, model.shape.head_dim)

    def passed(rows: int, threads: int) -> torch.Tensor:
        assert model.lora is not None
        torch.set_num_threads(threads)
        with model.lora.packed([(0, 2, 1), (3, 4, 0)] if rows > 3 else [(0, 1, 1)]):
            return layer(x[:rows], angles[:, :rows].cos(), angles[:, :rows].sin(), lambda q, k, v: q.transpose(0, 1))

    assert torch.equal(passed(7, most)[:1], passed(1, 1))


@pytest.mark.parametrize(
    ("inputs", "outputs", "rows"), [(13, (7,), 5), (64, (30, 10, 10), 3), (100, (3,), 16), (24, (1, 2), 1)]
)
def test_products_of_any_size_are_torchs(inputs: int, outputs: tuple[int, ...], rows: int) -> None:
    library = kernels()
    assert library is not None
    torch.manual_seed(0)
    x, weights = torch.randn(rows, inputs), [torch.randn(size, inputs) for size in outputs]
    biases = [torch.randn(size) if index else None for index, size in enumerate(outputs)]
    out = torch.empty(rows, sum(outputs))
    group = group_of(weights, biases)
    library.edged_product(ctypes.byref(group), x.data_ptr(), rows, out.data_ptr(), out.shape[1])
    wanted = torch.cat([F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)], dim=1)
    torch.testing.assert_close(out, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("content", [None, b"no library"])
def test_an_edged_without_its_kernels_serves_by_torch_and_says_why(
    content: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "_kernels.so"
    if content is not None:
        path.write_bytes(content)
    kernels.cache_clear()
    monkeypatch.setattr("edged.engine.native.library.shared_library", lambda: path if content is not None else None)
    try:
        assert kernels() is None
        assert shorten_layers(served_model()) == native.NOT_BUILT
    finally:
        kernels.cache_clear()
    assert ("cannot be loaded" in caplog.text) == (content is not None)
