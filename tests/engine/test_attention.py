"""A packed batch over pages gives what the model's own forward gives, for every architecture."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from edged.engine.attention import IMPLEMENTATION, PagedPass, attention_pass
from edged.engine.batch import Segment, pack
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


@pytest.mark.parametrize("ragged", [True, False])
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_chunks_and_decodes_of_a_mixed_batch_match_the_models_own_forward(kind: str, ragged: bool) -> None:
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
            with attention_pass(PagedPass(batch, kv, ragged)):
                logits = model.forward(batch.input_ids, batch.position_ids, batch.logit_rows)
            for (s, _, b), row in zip(spans, logits.log_softmax(-1), strict=True):
                got[s, b - 1] = row
    for s, ids in enumerate(texts):
        wanted = own_logits(kind, ids)
        for (sequence, position), row in got.items():
            if sequence == s:
                torch.testing.assert_close(row, wanted[position], atol=1e-4, rtol=0)
