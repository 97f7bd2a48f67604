"""Pruned sequences answer as a model would that cannot see the rows that went; their pages come back."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AttentionInterface, LlamaForCausalLM

from benchmarks.support.teacher_forcing import ForcedDecoding
from edged.cache import pruning_budget
from edged.engine import pruner as pruning
from edged.engine.attention.attention_stats import AttentionStats
from edged.engine.attention.base import AttentionCall
from edged.engine.attention.selection import Backends
from edged.engine.kv.store import KvStore
from edged.engine.native.library import kernels, why_no_kernels
from edged.engine.sequence import Sequence, SequenceStatus
from edged.settings.load import load_settings
from tests.cache.integrity import check_pool
from tests.engine.harness import Client, random_ids, request, running_engine
from tests.models import DEVICE, save_tiny, tiny_model

PAGE, LAYERS, KV_HEADS = 8, 3, 2
ON = {"cache.pruning": "on", "cache.share_across": "none"}


@pytest.fixture(autouse=True)
def _small_budgets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pruning_budget, "PRUNED_TOKENS", 48)
    monkeypatch.setattr(pruning_budget, "RECENT_TOKENS", 16)


@pytest.fixture
def smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pruning_budget, "PRUNED_TOKENS", 32)


def forced(tmp_path: Path, **settings: Any) -> ForcedDecoding:
    model = tmp_path / "model"
    if not model.exists():
        save_tiny(model)
    overrides = {"model.device": str(DEVICE), "model.dtype": "float32", "model.graph_memory_mb": 0}
    overrides |= {"cache.page_size": PAGE, "cache.memory_mb": 4, **ON}
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


class Recompute:
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


@pytest.mark.parametrize("path", ["padded", "ragged", "native", pytest.param("triton", marks=pytest.mark.slow)])
def test_a_sequence_pruned_again_and_again_answers_as_a_model_that_cannot_see_what_went(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if path == "native" and kernels() is None:
        pytest.skip(why_no_kernels())
    if path == "triton":
        pytest.importorskip("triton")
    kept = Recompute(monkeypatch)
    driver = forced(tmp_path)
    driver.parts.runner._backends = Backends(path)  # type: ignore[arg-type]
    ids = random_ids(150 if path == "triton" else 300, 1)
    oracle = Masked(len(ids))
    sequence = driver.begin(ids[:100], room=len(ids) - 100)
    got, times = [], 0
    for token in ids[100:]:
        before = sequence.computed
        got.append(driver.step([sequence], [token])[0].clone())
        times += kept.follow(oracle, sequence, before)
    assert times >= 3
    assert sequence.compacted is not None
    assert (sequence.compacted.counts != 6).any(), "the heads' budgets differ"
    torch.testing.assert_close(torch.stack(got).cpu(), oracle.logits(ids)[100:], atol=2e-4, rtol=0)
    plain = tiny_model()(torch.tensor([ids])).logits[0, 100:]
    assert (torch.stack(got)[20:] - plain[20:]).abs().max() > 0.1, "what went makes a difference"


@pytest.mark.slow
def test_captured_iterations_are_left_to_those_that_are_not_pruned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    from edged.engine.cuda_graphs import DecodeGraphs
    from tests.engine.test_cuda_graphs import recorder

    kept = Recompute(monkeypatch)
    driver = forced(tmp_path)
    runner = driver.parts.runner
    paths = runner._backends = Backends("triton")
    runner.model.lora.runs.kernel = "triton"
    runner.graphs = DecodeGraphs(runner.model, runner.kv, paths, recorder(), 1, 20)
    ids = random_ids(90, 1)
    oracle = Masked(len(ids))
    sequence = driver.begin(ids[:60], room=30)
    got, replayed = [], []
    for token in ids[60:]:
        before = sequence.computed
        got.append(driver.step([sequence], [token])[0].clone())
        kept.follow(oracle, sequence, before)
        replayed.append(runner.graphs.replayed)
    # From 64 rows on it is observed, at first in each iteration; from 80 on it is pruned.
    assert replayed[3] == replayed[7] == 4
    assert replayed[19] == replayed[-1]
    assert sequence.compacted is not None
    torch.testing.assert_close(torch.stack(got).cpu(), oracle.logits(ids)[60:], atol=2e-4, rtol=0)


def test_pages_come_back_and_serve_another_sequence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Recompute(monkeypatch)
    driver = forced(tmp_path)
    pool = driver.parts.runner.pages.pool
    first, second = random_ids(220, 1), random_ids(60, 2)
    oracle = Masked(len(first))
    pruned = driver.begin(first[:160], room=60)
    got, other = [], None
    for token in first[160:]:
        free, held, before = pool.free_pages, len(pruned.pages), pruned.computed
        got.append(driver.step([pruned], [token])[0].clone())
        if kept.follow(oracle, pruned, before) and other is None:
            returned = held - len(pruned.pages)
            assert returned >= 10
            assert pool.free_pages - free in (returned, returned - 1), "less the page of the token"
            # What came back is taken again.
            spare = pool.allocate(pool.free_pages - returned)
            other = driver.begin(second[:-1], room=1)
            pool.release(spare)
    assert other is not None
    torch.testing.assert_close(torch.stack(got).cpu(), oracle.logits(first)[160:], atol=2e-4, rtol=0)
    wanted = tiny_model()(torch.tensor([second])).logits[0, -1]
    torch.testing.assert_close(driver.step([other], second[-1:])[0].cpu(), wanted, atol=2e-4, rtol=0)
    for sequence in (pruned, other):
        driver.end(sequence)
    check_pool(pool)
    assert pool.free_pages == pool.pages - 1
    assert driver.parts.status()["pruning"]["sequences"] == 0


def test_rows_go_by_the_conditions_of_the_paper() -> None:
    torch.manual_seed(0)
    kv = KvStore(1, 4, 3, 2, 8, torch.float32, torch.device("cpu"))
    watch = AttentionStats(kv, 100)
    watch.reserve(40)
    # Few distinct values, so that many rows are equal.
    watch.shares.copy_(torch.randint(4, watch.shares.shape) / 10)
    watch.last_used.copy_(torch.randint(80, 100, watch.last_used.shape))
    have, keep = torch.tensor([[9, 5], [7, 7], [6, 8]]), torch.tensor([[4, 2], [3, 3], [1, 5]])
    got = pruning.rows_to_keep(watch, have, keep, 4, stale_before=90)
    for layer in range(3):
        for head in range(2):
            shares, used = watch.shares[layer, head].tolist(), watch.last_used[layer, head].tolist()

            def worth(row: int, shares: Any = shares, used: Any = used) -> tuple[bool, bool, float, int]:
                return row < 4, used[row] >= 90, shares[row], row

            rows = sorted(range(4 * int(have[layer, head])), key=worth, reverse=True)
            wanted = sorted(rows[: 4 * int(keep[layer, head])])
            assert got[layer, head].nonzero()[:, 0].tolist() == wanted


def test_a_watch_sees_norms_and_shares_of_attention() -> None:
    torch.manual_seed(0)
    kv = KvStore(1, 4, 2, 2, 8, torch.float32, torch.device("cpu"))
    watch = AttentionStats(kv, 5)
    watch.reserve(12)
    keys, values, lengths = torch.randn(2, 12, 8), torch.randn(2, 12, 8), torch.tensor([12, 7])
    for iteration in (7, 9):
        watch.begin(iteration, 12)
        query = torch.randn(6, 8)
        weights = [
            (query[3 * h : 3 * h + 3] @ keys[h, :length].T * 0.5).softmax(-1) for h, length in enumerate((12, 7))
        ]
        out = torch.cat([w @ values[h, : w.shape[1]] for h, w in enumerate(weights)])
        norms, shares = watch.norms[1].clone(), watch.shares[1].clone()
        watch.see(AttentionCall(1, 0.5), query, out, keys, lengths)
        torch.testing.assert_close(watch.norms[1] - norms, out.norm(dim=1).view(2, 3).mean(1))
        for head, weight in enumerate(weights):
            n = weight.shape[1]
            torch.testing.assert_close(watch.shares[1, head, :n], 0.9 * shares[head, :n] + weight.mean(0))
            assert not watch.shares[1, head, n:].any()
            used = (weight > 1 / n).any(0)
            assert (watch.last_used[1, head, :n][used] == iteration).all()
            assert (watch.last_used[1, head, :n][~used] < iteration).all()


def serve(tmp_path: Path, requests: int, prompt: int, tokens: int, **settings: Any) -> tuple[Client, dict[str, Any]]:
    """Greedy answers to that many prompts at once, and the status after them."""
    with running_engine(tmp_path, **settings) as (engine, client):
        for number in range(requests):
            engine.submit(request(f"r{number}", random_ids(prompt, number), tokens))
        client.wait(lambda: len(client.finished) == requests)
        status = engine.status()
    assert all(len(client.ids(f"r{number}")) == tokens for number in range(requests))
    return client, status


@pytest.mark.usefixtures("smaller")
def test_nothing_is_pruned_without_pressure(tmp_path: Path) -> None:
    few = {name: serve(tmp_path, 2, 150, 60, cache__pruning=name, cache__memory_mb=1) for name in ("auto", "off")}
    assert few["auto"][1]["totals"]["prunings"] == 0
    assert few["auto"][1]["pruning"]["mode"] == "auto"
    assert few["off"][1]["pruning"] == {"mode": "off"}
    assert few["auto"][0].ids("r0") == few["off"][0].ids("r0")


@pytest.mark.usefixtures("smaller")
def test_under_pressure_sequences_are_pruned_before_anybody_is_preempted(tmp_path: Path) -> None:
    # A pool of 170 pages: 7 x 16 at the prompts' ends, 7 x 29 when all have got their tokens.
    _, plain = serve(tmp_path, 7, 120, 105, cache__pruning="off", cache__memory_mb=1)
    assert plain["totals"]["preemptions"] > 0
    _, pruned = serve(tmp_path, 7, 120, 105, cache__pruning="auto", cache__memory_mb=1)
    assert pruned["totals"]["preemptions"] == 0
    assert pruned["totals"]["prunings"] > 0
    assert pruned["totals"]["pruned_pages"] > 0
    assert pruned["pruning"]["sequences"] == pruned["pruning"]["tokens_kept"] == 0
    assert pruned["pages"]["free"] + pruned["pages"]["cached"] == pruned["pages"]["total"]


def test_a_pruned_sequence_that_is_preempted_is_computed_again(tmp_path: Path) -> None:
    driver = forced(tmp_path)
    runner = driver.parts.runner
    sequence = driver.begin(random_ids(120, 6), room=20)
    for token in random_ids(10, 7):
        driver.step([sequence], [token])
    assert sequence.compacted is not None
    runner.pages.free(sequence)
    assert runner.pages.pool.free_pages == runner.pages.pool.pages - 1
    sequence.status = SequenceStatus.PREFILL
    got = driver._run([sequence], len(sequence.token_ids))[0]
    torch.testing.assert_close(got, tiny_model()(torch.tensor([sequence.token_ids])).logits[0, -1], atol=2e-4, rtol=0)


@pytest.mark.usefixtures("smaller")
def test_a_pruning_that_fails_costs_the_sequence_its_pages_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    move, calls = KvStore.move, [0]

    def fails_once(self: KvStore, layer: int, *rows: torch.Tensor) -> None:
        calls[0] += 1
        if calls[0] == 2:
            raise RuntimeError("no memory")
        move(self, layer, *rows)

    monkeypatch.setattr(KvStore, "move", fails_once)
    client, status = serve(tmp_path, 1, 100, 80, cache__pruning="on")
    plain, _ = serve(tmp_path, 1, 100, 80, cache__pruning="off")
    assert status["totals"]["preemptions"] == 1
    assert status["totals"]["prunings"] > 1
    assert client.ids("r0")[:5] == plain.ids("r0")[:5]
    assert status["pages"]["free"] + status["pages"]["cached"] == status["pages"]["total"]


@pytest.mark.usefixtures("smaller")
def test_pages_of_the_trie_stay_as_they_were(tmp_path: Path) -> None:
    prompt = random_ids(200, 3)
    with running_engine(tmp_path, cache__pruning="on") as (engine, client):
        engine.submit(request("pruned", prompt, 80))
        client.wait(lambda: "pruned" in client.finished)
        assert engine.status()["totals"]["prunings"] > 0
        # The conversation goes on: of what was computed only the prompt is as it would be again.
        longer = prompt + client.ids("pruned")
        engine.submit(request("again", longer, 2, logprobs=0))
        client.wait(lambda: "again" in client.finished)
        assert client.finished["again"].cached_tokens == 200
    logits = tiny_model()(torch.tensor([longer + client.ids("again")])).logits[0, 279:281]
    assert logits.argmax(-1).tolist() == client.ids("again")
    got = torch.tensor([event.logprob for event in client.tokens["again"]])
    torch.testing.assert_close(got, logits.log_softmax(-1).max(-1).values, atol=1e-4, rtol=0)


def test_what_was_pruned_is_not_shared(tmp_path: Path) -> None:
    driver = forced(tmp_path, cache__share_across="all")
    runner = driver.parts.runner
    sequence = driver.begin(random_ids(120, 4), room=20)
    for token in random_ids(10, 5):
        driver.step([sequence], [token])
    assert sequence.compacted is not None
    runner.pages.share(sequence)
    assert runner.pages.trie is not None
    assert len(runner.pages.trie) == 0


def test_models_with_short_windows_and_policies_that_do_not_prune_are_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.INFO, "edged.engine"),
        running_engine(tmp_path, "mistral", cache__pruning="on") as (engine, _),
    ):
        assert engine.status()["pruning"] == {"mode": "off"}
    assert "K/V is not pruned: layers attend to the latest 24 tokens" in caplog.text
    with running_engine(tmp_path, scheduler__policy="fcfs", cache__pruning="on") as (engine, _):
        assert engine.status()["pruning"] == {"mode": "off"}


def test_sequences_are_observed_in_the_same_iterations(tmp_path: Path) -> None:
    driver = forced(tmp_path)
    pruner = driver.parts.runner.pruner
    assert pruner is not None
    running = [driver.begin(list(range(3, 83 + 3 * n)), 80) for n in range(3)]
    looks: list[list[bool]] = []
    for turn in range(48):
        pruner.begin_iteration()
        begun = running[: 1 + turn // 3]
        looks.append([pruner.observer(sequence) is not None for sequence in begun])
        for sequence in begun:
            sequence.computed += 1
    later = looks[16:]
    assert all(len(set(row)) == 1 for row in later)
    assert [row[0] for row in later].count(True) == 4


def test_who_misses_the_common_iterations_is_observed_all_the_same(tmp_path: Path) -> None:
    driver = forced(tmp_path)
    pruner = driver.parts.runner.pruner
    assert pruner is not None
    sequence = driver.begin(list(range(3, 83)), 80)
    looks = 0
    for turn in range(80):
        pruner.begin_iteration()
        if turn % 2 == 1:
            looks += pruner.observer(sequence) is not None
            sequence.computed += 1
    assert looks >= 5
