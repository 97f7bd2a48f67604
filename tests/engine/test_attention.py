"""A packed batch over pages gives what the model's own forward gives, for every architecture."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from edged.engine.attention import IMPLEMENTATION, DecodePath, PagedPass, attend, attention_pass, pick_decode_path
from edged.engine.batch import Segment, pack
from edged.engine.kv import KvStore
from edged.engine.model import ServedModel
from tests.models import ARCHITECTURES, tiny_model

CPU = torch.device("cpu")


def served(kind: str) -> ServedModel:
    model = tiny_model(kind).requires_grad_(False)
    model.set_attn_implementation(IMPLEMENTATION)
    return ServedModel(model, CPU, torch.float32)


def own_logits(kind: str, ids: list[int]) -> torch.Tensor:
    model = tiny_model(kind)
    with torch.inference_mode():
        return model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)


@pytest.mark.parametrize("path", ["padded", "ragged", "triton"])
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_chunks_and_decodes_of_a_mixed_batch_match_the_models_own_forward(kind: str, path: DecodePath) -> None:
    model = served(kind)
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
            batch = pack(segments, kv, CPU)
            with attention_pass(PagedPass(batch, kv, path)):
                logits = model.forward(batch.input_ids, batch.position_ids, batch.logit_rows)
            for (s, _, b), row in zip(spans, logits.log_softmax(-1), strict=True):
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
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_the_triton_kernels_attend_as_torch_does(
    shape: tuple[int, int, int, int | None, float | None, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    triton_decode = pytest.importorskip("edged.engine.triton_decode")
    pytest.importorskip("triton")
    monkeypatch.setattr(triton_decode, "_BLOCK", 16)
    kv_heads, group, size, window, cap, context = shape
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
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
    assert triton_decode.trial(kv, group) == ""
    got = triton_decode.paged_decode(
        1, query, tables, torch.tensor(context, device=device), kv, size**-0.5, window, cap
    )
    for row, earlier in enumerate(context):
        keys, values = kv.read(1, kv.block_index(tables[row : row + 1]), 1)
        seen = slice(max(0, earlier + 1 - window) if window else 0, earlier + 1)
        grouped = query[row].view(1, kv_heads, group, size)
        wanted = attend(grouped, keys[:, :, seen], values[:, :, seen], None, size**-0.5, cap)
        torch.testing.assert_close(got[row], wanted.reshape(-1, size), atol=1e-5, rtol=1e-5)


def test_a_path_that_the_cache_cannot_take_falls_back_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    kv = KvStore(4, 8, 1, 1, 8, torch.bfloat16, CPU)
    with caplog.at_level("INFO"):
        assert pick_decode_path(kv, "auto", 1) == "padded"
        assert pick_decode_path(kv, "triton", 1) == "padded"
    assert "float32 on the CPU, not for torch.bfloat16" in caplog.text
    assert "Triton has no kernels for cpu" in caplog.text
    assert pick_decode_path(KvStore(4, 8, 1, 1, 8, torch.float32, CPU), "auto", 1) == "ragged"
    assert pick_decode_path(KvStore(4, 8, 1, 1, 8, torch.float32, CPU), "padded", 1) == "padded"
