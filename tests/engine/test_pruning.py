"""Pruned sequences answer as a model would that cannot see the rows that went; their pages come back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AttentionInterface, LlamaForCausalLM

from edged.bench.forced import ForcedDecoding
from edged.config import load_settings
from edged.engine import pruning
from edged.engine.sequence import Sequence
from tests.engine.harness import random_ids
from tests.models import save_tiny, tiny_model

PAGE, LAYERS, KV_HEADS = 8, 3, 2
ON = {"cache.pruning": "on", "cache.pruned_tokens": 48, "cache.prune_recent": 16, "cache.prefix_sharing": False}


def forced(tmp_path: Path, **settings: Any) -> ForcedDecoding:
    model = tmp_path / "model"
    if not model.exists():
        save_tiny(model)
    overrides = {"model.device": "cpu", "cache.page_size": PAGE, "cache.memory_mb": 4, **ON}
    overrides |= {key.replace("__", "."): value for key, value in settings.items()}
    return ForcedDecoding(model, load_settings(environ={}, overrides=overrides))


class Masked:
    """transformers' own forward, each layer and head of which sees only what it is told: the oracle."""

    def __init__(self, tokens: int) -> None:
        causal = torch.ones(tokens, tokens, dtype=torch.bool).tril()
        self.seen = causal.expand(LAYERS, KV_HEADS, tokens, tokens).clone()

    def attend(self, module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, **_: Any) -> Any:
        group = query.shape[1] // key.shape[1]
        key, value = (part.repeat_interleave(group, 1) for part in (key, value))
        seen = self.seen[module.layer_idx].repeat_interleave(group, 0)[None]
        return F.scaled_dot_product_attention(query, key, value, seen, scale=scaling).transpose(1, 2), None

    def logits(self, ids: list[int]) -> torch.Tensor:
        AttentionInterface.register("masked_by_the_test", self.attend)
        model: LlamaForCausalLM = tiny_model()
        model.set_attn_implementation("masked_by_the_test")
        with torch.inference_mode():
            return model(torch.tensor([ids])).logits[0]


class Kept:
    """Follows which tokens each head still has, by what the pruner decided."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.keep: torch.Tensor | None = None
        decide = pruning.rows_to_keep

        def watched(*arguments: Any) -> torch.Tensor:
            self.keep = decide(*arguments)
            return self.keep

        monkeypatch.setattr(pruning, "rows_to_keep", watched)
        self.tokens = [[list[int]() for _ in range(KV_HEADS)] for _ in range(LAYERS)]

    def follow(self, oracle: Masked, sequence: Sequence, before: int) -> bool:
        """After a step: hide what a pruning before it took; `before` rows had been computed. Whether there was one."""
        if self.keep is None:
            return False
        for layer in range(LAYERS):
            for head in range(KV_HEADS):
                had = self.tokens[layer][head] or list(range(before))
                known = had + list(range(had[-1] + 1, before))
                old = self.keep.shape[2]
                kept = [token for row, token in enumerate(known[:old]) if self.keep[layer, head, row]]
                # Rows past a head's own old ones are its recent ones.
                recent = known[len(known) - (before - self._first_recent(sequence)) :]
                self.tokens[layer][head] = kept + recent
                gone = sorted(set(range(before)) - set(kept) - set(recent))
                oracle.seen[layer, head, before:, gone] = False
        self.keep = None
        return True

    @staticmethod
    def _first_recent(sequence: Sequence) -> int:
        assert sequence.compacted is not None
        slabs_rows = sequence.compacted.slabs * PAGE
        return slabs_rows + sequence.compacted.removed


@pytest.mark.parametrize("path", ["padded", "ragged", "triton"])
def test_a_sequence_pruned_again_and_again_answers_as_a_model_that_cannot_see_what_went(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if path == "triton":
        pytest.importorskip("triton")
    kept = Kept(monkeypatch)
    driver = forced(tmp_path, model__decode_attention=path)
    ids = random_ids(200 if path == "triton" else 300, 1)
    oracle = Masked(len(ids))
    sequence = driver.begin(ids[:100], room=len(ids) - 100)
    got, times = [], 0
    for token in ids[100:]:
        before = sequence.computed
        got.append(driver.step([sequence], [token])[0].clone())
        times += kept.follow(oracle, sequence, before)
    assert times >= 4
    assert sequence.compacted is not None
    assert (sequence.compacted.counts != 6).any(), "the heads' budgets differ"
    torch.testing.assert_close(torch.stack(got), oracle.logits(ids)[100:], atol=2e-4, rtol=0)
    plain = tiny_model()(torch.tensor([ids])).logits[0, 100:]
    assert (torch.stack(got)[50:] - plain[50:]).abs().max() > 0.1, "what went makes a difference"
