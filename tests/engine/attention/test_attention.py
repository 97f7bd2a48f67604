"""A packed batch over pages gives what the model's own forward gives, for every architecture."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from edged.engine.attention.base import AttentionCall
from edged.engine.attention.packed_batch import Segment, pack
from edged.engine.attention.paged import (
    IMPLEMENTATION,
    PagedAttention,
    attend,
    attention_over,
    attention_pass,
    paged_attention,
)
from edged.engine.attention.selection import Backends, pick_paths, selftest
from edged.engine.kv.store import KvStore
from edged.engine.model.served_model import ServedModel
from edged.engine.native.library import kernels
from edged.settings.kernels import Kernels
from tests.models import ARCHITECTURES, tiny_model

CPU = torch.device("cpu")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PATHS = {
    "gathered": Backends(),
    **({"native": Backends("native")} if kernels() else {}),
    "ragged": Backends("ragged"),
    "triton": Backends("triton", tile_tokens=32),
}


def served(kind: str, device: torch.device) -> ServedModel:
    model = tiny_model(kind).requires_grad_(False).to(device)
    model.set_attn_implementation(IMPLEMENTATION)
    return ServedModel(model)


def own_logits(kind: str, ids: list[int]) -> torch.Tensor:
    model = tiny_model(kind)
    with torch.inference_mode():
        return model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)


@pytest.mark.parametrize("paths", PATHS.values(), ids=PATHS.keys())
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_chunks_and_decodes_of_a_mixed_batch_match_the_models_own_forward(kind: str, paths: Backends) -> None:
    device = DEVICE if paths.decode == "triton" else CPU
    model = served(kind, device)
    kv = model.new_kv(32, 8)
    rng = np.random.default_rng(0)
    texts = [rng.integers(3, 200, n).tolist() for n in (37, 50, 9)]
    tables = [np.arange(1, 8), np.arange(8, 16), np.arange(16, 19)]
    # Each pass: (sequence, first, past the last); single tokens decode beside chunks of other sequences.
    passes = [
        [(0, 0, 20), (1, 0, 33)],
        [(0, 20, 35), (1, 33, 34), (2, 0, 8)],
        [(0, 35, 36), (1, 34, 35), (2, 8, 9)],
        [(0, 36, 37), (1, 35, 50)],
    ]
    got: dict[tuple[int, int], torch.Tensor] = {}
    with torch.inference_mode():
        for spans in passes:
            segments = [Segment(texts[s][a:b], a, tables[s], position=a, samples=True) for s, a, b in spans]
            batch = pack(segments, kv, device, paths.tile_tokens)
            with attention_pass(attention_over(batch, kv, paths.decode)):
                logits = model.forward(batch.input_ids, batch.position_ids, batch.logit_rows)
            for (s, _, b), row in zip(spans, logits.log_softmax(-1).cpu(), strict=True):
                got[s, b - 1] = row
    for s, ids in enumerate(texts):
        wanted = own_logits(kind, ids)
        for (sequence, position), row in got.items():
            if sequence == s:
                torch.testing.assert_close(row, wanted[position], atol=1e-4, rtol=0)


SHAPES = {
    "grouped heads": (2, 3, 32, None, None, [0, 5, 100, 300]),
    "a window": (1, 1, 64, 24, None, [3, 30, 77]),
    "a soft cap, an odd head size": (2, 2, 24, None, 30.0, [200, 1]),
    "both, large heads": (2, 4, 256, 40, 50.0, [90]),
    "the largest heads": (1, 3, 512, None, None, [37]),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_the_triton_kernels_attend_as_torch_does(
    shape: tuple[int, int, int, int | None, float | None, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    triton = pytest.importorskip("edged.engine.attention.triton")
    pytest.importorskip("triton")
    monkeypatch.setattr(triton, "_BLOCK", 16)
    kv_heads, group, size, window, cap, context = shape
    device = DEVICE
    torch.manual_seed(0)
    kv = KvStore(64, 16, 2, kv_heads, size, torch.float32, device)
    kv.keys.normal_()
    kv.values.normal_()
    tables = torch.zeros(len(context), max(context) // 16 + 1, dtype=torch.int64)
    pages = iter((torch.randperm(63) + 1).tolist())
    for row, earlier in enumerate(context):
        for column in range(earlier // 16 + 1):
            tables[row, column] = next(pages)
    tables = tables.to(device)
    query = torch.randn(len(context), kv_heads * group, size, device=device)
    assert selftest(kv, group, Backends("triton")) == ""
    call = AttentionCall(1, size**-0.5, window, cap)
    got = triton.paged_decode(call, query, tables, torch.tensor(context, device=device), kv)
    for row, earlier in enumerate(context):
        keys, values = kv.read(1, kv.block_index(tables[row : row + 1]), 1)
        seen = slice(max(0, earlier + 1 - window) if window else 0, earlier + 1)
        grouped = query[row].view(1, kv_heads, group, size)
        wanted = attend(call, grouped, keys[:, :, seen], values[:, :, seen], None)
        torch.testing.assert_close(got[row], wanted.reshape(-1, size), atol=1e-5, rtol=1e-5)


# (KV heads, heads of a group, head size, page size, window, soft cap), and (context, tokens, hidden rows) of segments.
CHUNKS = {
    "prompts and their later chunks": ((2, 3, 32, 16, None, None), [(0, 70, None), (45, 30, None), (130, 3, None)]),
    "an answer that another hides from": (
        (2, 2, 16, 8, None, None),
        [(50, 20, (20, 50)), (33, 1, (5, 30)), (9, 1, None)],
    ),
    "a window over hidden rows": ((1, 4, 24, 8, 12, None), [(40, 25, (10, 37)), (0, 90, None), (60, 1, (1, 59))]),
    "a soft cap, an odd head size, odd pages": ((1, 7, 40, 5, None, 20.0), [(12, 23, None), (0, 6, None)]),
    "all of it, one head, large": ((1, 1, 160, 4, 9, 5.0), [(80, 70, (0, 80)), (3, 2, None)]),
    "more heads than a tile has queries": ((1, 71, 16, 16, None, None), [(20, 5, None)]),
}
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def written(
    shape: tuple[int, ...], spans: list[tuple[int, int, tuple[int, int] | None]], dtype: torch.dtype, tile: int
):  # type: ignore[no-untyped-def]
    """Random K/V, segments over shuffled pages, and queries, keys and values of the segments' tokens."""
    kv_heads, group, size, page = shape[:4]
    torch.manual_seed(0)
    lengths = [-(-(context + tokens) // page) for context, tokens, _ in spans]
    kv = KvStore(sum(lengths) + 1, page, 2, kv_heads, size, dtype, DEVICE)
    kv.keys.normal_()
    kv.values.normal_()
    pages = (torch.randperm(sum(lengths)) + 1).split(lengths)
    segments = [
        Segment([7] * tokens, context, own.numpy(), hidden=hidden)
        for (context, tokens, hidden), own in zip(spans, pages, strict=True)
    ]
    count = sum(tokens for _, tokens, _ in spans)
    query, key, value = (
        torch.randn(heads, count, size, device=DEVICE).to(dtype) for heads in (kv_heads * group, kv_heads, kv_heads)
    )
    return kv, segments, pack(segments, kv, DEVICE, tile), query, key, value


def torchs_own(
    kv: KvStore, segment: Segment, query: torch.Tensor, window: int | None, cap: float | None
) -> torch.Tensor:
    """Attention of a segment over all its pages by a boolean mask, in float32: [heads, tokens, d]."""
    blocks = kv.block_index(torch.from_numpy(segment.pages)[None].to(DEVICE))
    keys, values = (rows.float() for rows in kv.read(1, blocks, 1))
    count = len(segment.token_ids)
    first, last = segment.hidden or (0, 0)
    row = torch.arange(keys.shape[2], device=DEVICE)
    own = segment.context + torch.arange(count, device=DEVICE)[:, None]
    # How many rows a query sees from a key on, its own included: hidden ones do not count.
    after = own - row + 1 - torch.where(row < first, last - first, 0)
    mask = (row <= own) & ~((row >= first) & (row < last)) & (after <= (window or 10**9))
    rows = query[:, segment.start : segment.start + count].float()[None]
    if cap is None:
        return F.scaled_dot_product_attention(rows, keys, values, mask, scale=0.3, enable_gqa=True)[0]
    groups = query.shape[0] // keys.shape[1]
    scores = cap * torch.tanh(rows @ keys.repeat_interleave(groups, 1).mT * 0.3 / cap)
    return (scores.masked_fill(~mask, float("-inf")).softmax(-1) @ values.repeat_interleave(groups, 1))[0]


@pytest.mark.parametrize("path", ["gathered", "triton"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "spans"), CHUNKS.values(), ids=CHUNKS.keys())
def test_chunks_attend_to_what_they_may_see(shape: tuple, spans: list, dtype: torch.dtype, path: str) -> None:  # type: ignore[type-arg]
    if path == "triton" and dtype == torch.bfloat16 and DEVICE.type == "cpu":
        pytest.skip("Triton's interpreter multiplies bfloat16 as if it were integers")
    tile = 0
    if path == "triton":
        pytest.importorskip("triton")
        from edged.engine.attention import triton

        tile = triton.tile_tokens(KvStore(1, 1, 1, shape[0], shape[2], dtype, DEVICE), shape[1])
    window, cap = shape[4:]
    kv, segments, batch, query, key, value = written(shape, spans, dtype, tile)
    got = PagedAttention(batch, kv).attend(AttentionCall(1, 0.3, window, cap), query, key, value)
    for segment in segments:
        wanted = torchs_own(kv, segment, query, window, cap).transpose(0, 1)
        rows = got[segment.start : segment.start + len(segment.token_ids)].float()
        tolerance = 2e-5 if dtype == torch.float32 else 30 * torch.finfo(dtype).eps
        torch.testing.assert_close(rows, wanted, atol=tolerance, rtol=tolerance)


SINKS = {
    "grouped heads": (2, 3, None, None, 24),
    "one KV head, a window": (1, 4, 12, None, 24),
    "a head of its own, a window and a cap": (3, 1, 20, 5.0, 24),
    "the largest heads": (1, 2, None, None, 512),
}


@pytest.mark.parametrize("paths", PATHS.values(), ids=PATHS.keys())
@pytest.mark.parametrize("shape", SINKS.values(), ids=SINKS.keys())
def test_a_sink_takes_its_share_of_every_querys_attention(
    shape: tuple[int, int, int | None, float | None, int], paths: Backends
) -> None:
    if paths.decode == "triton":
        pytest.importorskip("triton")
    kv_heads, group, window, cap, size = shape
    device = DEVICE if paths.decode == "triton" else CPU
    torch.manual_seed(0)
    # No sink at the first head.
    sinks = torch.cat((torch.tensor([-torch.inf]), 2 * torch.randn(kv_heads * group - 1))).to(device)
    scale = 1.5 * size**-0.5
    call = AttentionCall(0, scale, window, cap, sinks)
    kv = KvStore(16, 8, 1, kv_heads, size, torch.float32, device)
    texts = [(33, np.array([1, 2, 3, 4, 5])), (40, np.array([6, 7, 8, 9, 10]))]
    parts = [torch.randn(heads, 73, size, device=device) for heads in (kv_heads * group, kv_heads, kv_heads)]
    got = torch.empty(73, kv_heads * group, size, device=device)
    # Chunks from nothing and over a context, decodes beside a chunk, and decodes alone.
    for spans in ([(0, 0, 20), (1, 0, 37)], [(0, 20, 31), (1, 37, 38)], [(0, 31, 32), (1, 38, 39)], [(0, 32, 33)]):
        segments = [Segment([0] * (stop - first), first, texts[index][1]) for index, first, stop in spans]
        batch = pack(segments, kv, device, paths.tile_tokens)
        at = torch.empty(batch.input_ids.shape[1], dtype=torch.long, device=device)
        for segment, (index, first, stop) in zip(segments, spans, strict=True):
            at[segment.rows] = torch.arange(first, stop, device=device) + 33 * index
        got[at] = PagedAttention(batch, kv, paths.decode).attend(call, *(part[:, at] for part in parts))
    for first, stop in ((0, 33), (33, 72)):
        query, key, value = (part[:, first:stop] for part in parts)
        scores = scale * query @ key.repeat_interleave(group, 0).mT
        if cap is not None:
            scores = cap * torch.tanh(scores / cap)
        behind = torch.arange(stop - first)[:, None] - torch.arange(stop - first)
        hidden = ((behind < 0) | (behind >= (window or 10**9))).to(device)
        scores = scores.masked_fill(hidden, -torch.inf)
        # As transformers' gpt-oss: a column of scores that is dropped after the softmax.
        whole = torch.cat((scores, sinks[:, None, None].expand(-1, stop - first, 1)), -1).softmax(-1)
        wanted = whole[..., :-1] @ value.repeat_interleave(group, 0)
        torch.testing.assert_close(got[first:stop], wanted.transpose(0, 1), atol=2e-6, rtol=2e-5)
    assert selftest(kv, group, paths, sinks=True) == ""


@pytest.mark.parametrize("paths", PATHS.values(), ids=PATHS.keys())
def test_values_may_be_shorter_than_keys(paths: Backends) -> None:
    if paths.decode == "triton":
        pytest.importorskip("triton")
    device = DEVICE if paths.decode == "triton" else CPU
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, *shape, device=device) for shape in ((4, 30, 24), (2, 30, 24), (2, 30, 16)))
    module = torch.nn.Identity()
    module.layer_idx = 0  # type: ignore[assignment]
    kv, pages, outs = KvStore(8, 8, 1, 2, 24, torch.float32, device), np.arange(1, 6), []
    # A chunk, one over a context, and a decode.
    for first, stop in ((0, 20), (20, 29), (29, 30)):
        batch = pack([Segment([0] * (stop - first), first, pages)], kv, device, paths.tile_tokens)
        with attention_pass(PagedAttention(batch, kv, paths.decode)):
            out, _ = paged_attention(module, *(part[:, :, first:stop] for part in (query, key, value)), None, 0.3)
        outs.append(out)
    wanted = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(torch.cat(outs, 1), wanted.transpose(1, 2), atol=2e-6, rtol=2e-5)


def test_tiles_of_smaller_heads_are_split_for_the_largest() -> None:
    triton = pytest.importorskip("edged.engine.attention.triton")
    pytest.importorskip("triton")
    shape, spans = (1, 8, 512, 16, None, None), [(20, 13, (3, 9)), (0, 9, None)]
    kv, segments, batch, query, key, value = written(shape, spans, torch.float32, 8)
    assert triton.tile_tokens(kv, 8) < 8
    got = PagedAttention(batch, kv).attend(AttentionCall(1, 0.3), query, key, value)
    for segment in segments:
        wanted = torchs_own(kv, segment, query, None, None).transpose(0, 1)
        rows = got[segment.start : segment.start + len(segment.token_ids)]
        torch.testing.assert_close(rows, wanted, atol=2e-5, rtol=2e-5)


def test_empty_tiles_write_nothing() -> None:
    triton = pytest.importorskip("edged.engine.attention.triton")
    pytest.importorskip("triton")
    kv, _, batch, query, key, value = written((2, 2, 16, 8), [(10, 50, None)], torch.float32, 32)
    wanted = PagedAttention(batch, kv).attend(AttentionCall(1, 0.3), query, key, value)
    tiles = batch.tiles
    empty = replace(tiles, table=torch.zeros_like(tiles.table))
    padded = replace(tiles, table=torch.cat((tiles.table, empty.table)))
    out = torch.full_like(wanted, 5.0)
    triton.paged_prefill(AttentionCall(1, 0.3), query, empty, kv, out)
    assert bool((out == 5.0).all())
    triton.paged_prefill(AttentionCall(1, 0.3), query, padded, kv, out)
    assert torch.equal(out, wanted)


def test_pages_beyond_two_to_the_31_elements_are_found() -> None:
    pytest.importorskip("triton")
    if DEVICE.type == "cuda" and torch.cuda.mem_get_info()[0] < 10 << 30:
        pytest.skip("needs 9 GiB on the GPU")
    # On the CPU only the pages that are written become resident.
    kv = KvStore(2**31 // 8192 + 4, 16, 1, 2, 256, torch.float16, DEVICE)
    last = len(kv.keys[0]) // 2 - 1
    segments = [
        Segment([7] * 20, 0, np.array([last, last - 1])),
        Segment([7], 9, np.array([last - 2])),
    ]
    torch.manual_seed(0)
    query, key, value = (torch.randn(heads, 21, 256, device=DEVICE).half() for heads in (4, 2, 2))
    got, wanted = (
        PagedAttention(pack(segments, kv, DEVICE, paths.tile_tokens), kv, paths.decode).attend(
            AttentionCall(0, 0.1), query, key, value
        )
        for paths in (Backends("triton", 32), Backends())
    )
    torch.testing.assert_close(got, wanted, atol=5e-3, rtol=5e-3)


@pytest.mark.parametrize("paths", [Backends("triton"), Backends("padded", 16)], ids=["decode", "prefill"])
def test_a_kernel_with_wrong_numbers_fails_its_trial(paths: Backends, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    kv = KvStore(4, 8, 1, 2, 32, torch.float32, DEVICE)
    assert selftest(kv, 3, paths) == ""
    name = "triton.paged_decode" if paths.decode == "triton" else "triton.paged_prefill"
    module, function = name.split(".")
    kernel = getattr(importlib.import_module(f"edged.engine.attention.{module}"), function)

    def unscaled(call: AttentionCall, *others: Any) -> Any:
        return kernel(call._replace(scaling=2 * call.scaling), *others)

    monkeypatch.setattr(f"edged.engine.attention.{name}", unscaled)
    assert selftest(kv, 3, paths) == "its kernels give wrong numbers here"


def test_a_path_that_the_cache_cannot_take_falls_back_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    kv, plain = (KvStore(4, 8, 1, 1, 8, dtype, CPU) for dtype in (torch.bfloat16, torch.float32))
    with caplog.at_level("INFO"):
        assert pick_paths([(kv, 1)], Kernels()) == Backends("padded")
        assert pick_paths([(plain, 1)], Kernels()).decode == ("native" if kernels() else "ragged")
        assert pick_paths([(plain, 1)], Kernels(decode_attention="padded")) == Backends("padded")
    assert [record.getMessage() for record in caplog.records] == [
        "decode attention gathers pages (native is not used: the compiled kernels are for float32 on the CPU, not for "
        "torch.bfloat16 on cpu)"
    ]
    caplog.clear()
    with caplog.at_level("INFO"):
        settings = Kernels(decode_attention="triton", prefill_attention="triton")
        assert pick_paths([(plain, 1)], settings) == Backends("padded")
    assert [record.getMessage() for record in caplog.records] == [
        f"{kind} attention gathers pages (triton is not used: Triton has no kernels for cpu)"
        for kind in ("decode", "prefill")
    ]
