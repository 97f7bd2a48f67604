"""Decodes of pruned sequences attend, in each layer and head, to exactly the rows that were kept for that head."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from edged.engine.attention.base import AttentionCall
from edged.engine.attention.packed_batch import Segment, pack
from edged.engine.attention.paged import PagedAttention
from edged.engine.kv.pruned_layout import PrunedLayout
from edged.engine.kv.store import KvStore
from edged.engine.native.library import kernels, why_no_kernels

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LAYERS, PAGE, SIZE = 2, 4, 16
SHAPES = {"grouped heads": (2, 3), "one head": (1, 2), "many KV heads": (4, 1)}


def kept_rows(kv: KvStore, segment: Segment, layer: int, head: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values that a head sees, found block by block from the definition of the layout."""
    owned = [(int(page), slot) for page in segment.pages for slot in range(kv.kv_heads)]
    part = segment.compacted
    slabs, counts = (0, [0] * kv.kv_heads) if part is None else (part.slabs, part.counts[layer].tolist())
    first = sum(counts[:head])
    blocks = [page * kv.kv_heads + slot for page, slot in owned[first : first + counts[head]]]
    blocks += [int(page) * kv.kv_heads + head for page in segment.pages[slabs:]]
    seen = counts[head] * PAGE + segment.context + 1 - slabs * PAGE
    return tuple(store[layer, blocks].reshape(-1, SIZE)[:seen] for store in (kv.keys, kv.values))  # type: ignore[return-value]


@pytest.mark.parametrize("cap", [None, 20.0])
@pytest.mark.parametrize("path", ["padded", "ragged", "native", "triton"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_each_head_sees_its_own_rows(
    shape: tuple[int, int], path: str, cap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = torch.device("cpu") if path in ("ragged", "native") else DEVICE
    if path == "native" and kernels() is None:
        pytest.skip(why_no_kernels())
    if path == "triton":
        pytest.importorskip("triton")
        from edged.engine.attention import triton

        monkeypatch.setattr(triton, "_BLOCK", 16)
    kv_heads, group = shape
    torch.manual_seed(0)
    random = np.random.default_rng(0)
    kv = KvStore(64, PAGE, LAYERS, kv_heads, SIZE, torch.float32, device)
    kv.keys.normal_()
    kv.values.normal_()
    pages = iter(np.split(random.permutation(np.arange(1, 61)), 6))

    def counts(slabs: int) -> np.ndarray:
        extra = random.multinomial((slabs - 1) * kv_heads, random.dirichlet(np.ones(kv_heads)), size=LAYERS)
        return np.asarray(extra + 1)

    segments = [
        Segment([5], 30, next(pages), position=90, compacted=PrunedLayout(5, counts(5), 60)),
        Segment([5], 22, next(pages), position=22),
        Segment([5], 12, next(pages), position=44, compacted=PrunedLayout(3, counts(3), 32)),
    ]
    batch = pack(segments, kv, device)
    query, key, value = (torch.randn(n, 3, SIZE, device=device) for n in (kv_heads * group, kv_heads, kv_heads))
    passed = PagedAttention(batch, kv, path)  # type: ignore[arg-type]
    for layer in range(LAYERS):
        got = passed.attend(AttentionCall(layer, 0.3, None, cap), query, key, value)
        for row, segment in enumerate(segments):
            for head in range(kv_heads):
                keys, values = kept_rows(kv, segment, layer, head)
                torch.testing.assert_close(keys[-1], key[head, row])
                heads = query[head * group : (head + 1) * group, row]
                if cap is None:
                    wanted = F.scaled_dot_product_attention(heads[None], keys[None], values[None], scale=0.3)[0]
                else:
                    wanted = (cap * torch.tanh(heads @ keys.T * 0.3 / cap)).softmax(-1) @ values
                torch.testing.assert_close(got[row, head * group : (head + 1) * group], wanted, atol=1e-5, rtol=1e-5)
