"""Layers that keep a state from token to token: answers are those of `generate`, and a state stays in its slot."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from edged.engine import build
from edged.engine.attention.packed_batch import Segment, pack
from edged.engine.attention.paged import IMPLEMENTATION, attention_over, attention_pass
from edged.engine.model.inspection import own_logits
from edged.engine.model.loading import ModelRefused
from edged.engine.model.memory_model import BaseShape
from edged.engine.model.served_model import ServedModel
from tests.engine.harness import random_ids, random_pairs, request, running_engine, wait_idle
from tests.engine.test_engine import generated
from tests.models import DEVICE, STATEFUL, save_tiny, tiny_model

SLOW = [pytest.param(kind, marks=pytest.mark.slow) for kind in STATEFUL if kind != "falcon_h1"]
BROAD = {"model__max_context_tokens": 128, "cache__memory_mb": 8}


@pytest.mark.parametrize("kind", STATEFUL)
def test_chunks_of_any_size_beside_decodes_give_one_answer(kind: str) -> None:
    """Two texts in chunks of 1, 3 or 48 tokens, in turns: each chunk is beside a decode of the other text."""
    base = tiny_model(kind).requires_grad_(False).to(DEVICE)
    base.set_attn_implementation(IMPLEMENTATION)
    model = ServedModel(base)
    texts = [torch.tensor(random_ids(70, seed), device=DEVICE) for seed in (1, 2)]
    with torch.inference_mode():
        wanted = [own_logits(base, ids, "eager") for ids in texts]
        for size in (1, 3, 48):
            kv, done, got = model.new_kv(25, 8, sequences=2), [0, 0], [[], []]
            while min(done) < 70:
                # The one that is ahead goes on by a token.
                sizes = [size, size] if done[0] == done[1] else [1 if mine == max(done) else size for mine in done]
                segments = [
                    Segment(ids[at : at + n], at, np.arange(12) + 12 * k + 1, position=at, states=(at and k + 1, k + 1))
                    for k, (ids, at, n) in enumerate(zip(map(torch.Tensor.tolist, texts), done, sizes, strict=True))
                    if at < 70
                ]
                batch = pack(segments, kv, DEVICE)
                rows = torch.arange(batch.input_ids.shape[1], device=DEVICE)
                with attention_pass(attention_over(batch, kv)):
                    logits = model.forward(batch.input_ids, batch.position_ids, rows)
                for segment in segments:
                    k = segment.states[1] - 1
                    got[k].append(logits[segment.rows])
                    done[k] += len(segment.token_ids)
            for own, right in zip(got, wanted, strict=True):
                # Of Mamba-2 transformers' own tokens one by one are as far from its whole text.
                torch.testing.assert_close(torch.cat(own), right, atol=1e-3, rtol=0)


@pytest.mark.parametrize("kind", ["falcon_h1", *SLOW])
def test_answers_are_generates_and_training_beside_them_takes_no_slot_away(kind: str, tmp_path: Path) -> None:
    prompts = [random_ids(count, count) for count in (49, 3, 70, 1, 16)]
    with running_engine(tmp_path, kind, serving__max_batch_tokens=24, cache__pruning="on") as (engine, client):
        slots = engine.status()["states"]
        engine.submit_pairs(random_pairs(4))
        for i, prompt in enumerate(prompts):
            engine.submit(request(f"r{i}", prompt, tokens=20, logprobs=2))
            time.sleep(0.01)
        client.wait(lambda: len(client.finished) == len(prompts))
        engine.submit(request("again", prompts[0], tokens=20))
        client.wait(lambda: "again" in client.finished)
        wait_idle(engine)
        status = engine.status()
        assert status["totals"]["optimizer_steps"] > 0
        assert slots["free"] == slots["slots"]
        assert status["states"]["free"] + status["states"]["copies"] == slots["slots"], "all slots came back"
        assert status["memory"]["state_bytes"] == (slots["slots"] + 2) * slots["bytes_per_slot"] > 0
        assert status["totals"]["drafted_tokens"] == 0
        assert status["pruning"] == {"mode": "off"}
        why_not = status["paths"]["why_not"]
        assert {why_not[part] for part in ("pruning", "drafts")} == {"layers keep a state from token to token"}
    model = tiny_model(kind)
    for i, prompt in enumerate(prompts):
        ids, logps = generated(model, prompt, 20)
        assert client.ids(f"r{i}") == ids
        got = torch.tensor([event.logprob for event in client.tokens[f"r{i}"]])
        torch.testing.assert_close(got, logps, atol=1e-4, rtol=0)
    assert client.ids("again") == client.ids("r0")


@pytest.mark.parametrize("failure", [torch.OutOfMemoryError("CUDA out of memory."), ValueError("a kernel failed")])
def test_pages_taken_away_and_iterations_that_fail_half_way_change_no_answer(
    failure: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [random_ids(40, seed) for seed in range(12)]
    small = {"model__max_context_tokens": 120, "cache__memory_mb": 1, "serving__max_sequences": 10}
    with running_engine(tmp_path, "lfm2", **small) as (engine, client):
        last, left = engine.model.layers[-1], [120, 100, 40]
        forward = last.forward

        def failing(*arguments: Any, **named: Any) -> Any:
            # The layers before have taken the tokens in.
            left[0] -= 1
            if left[0] in left[1:]:
                raise failure
            return forward(*arguments, **named)

        monkeypatch.setattr(last, "forward", failing)
        for i, prompt in enumerate(prompts):
            engine.submit(request(f"r{i}", prompt, tokens=60))
        client.wait(lambda: len(client.finished) == len(prompts))
        status = engine.status()
        assert left[0] < 40
        assert status["totals"]["preemptions"] > 0
        assert status["states"]["free"] + status["states"]["copies"] == status["states"]["slots"]
    model = tiny_model("lfm2")
    for i, prompt in enumerate(prompts):
        assert client.ids(f"r{i}") == generated(model, prompt, 60)[0]


@pytest.mark.parametrize(("kind", "sequences"), [("lfm2", 16), ("falcon_h1", 2)])
def test_a_chat_goes_on_from_the_turn_before(
    kind: str, sequences: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each turn at most what comes after the latest copy of the states, and a page, is computed again."""
    text, texts = random_ids(40, 0), []
    monkeypatch.setattr(build, "COPY_STATES_EVERY", 32)
    how = {"serving__max_sequences": sequences, "model__max_context_tokens": 256}
    with running_engine(tmp_path, kind, **{**BROAD, **how}) as (engine, client):
        for turn in range(4):
            engine.submit(request(f"t{turn}", text, tokens=50 if turn == 2 else 10))
            client.wait(lambda turn=turn: f"t{turn}" in client.finished)
            texts.append(text)
            text = [*text, *client.ids(f"t{turn}"), *random_ids(6, turn + 1)]
        page = engine.settings.cache.page_size
        # Another prompt parts from the chat in the middle; the next that does goes on from there.
        for name, seed in (("parts", 50), ("parts too", 51)):
            texts.append([*texts[0][: 2 * page], *random_ids(20, seed)])
            engine.submit(request(name, texts[-1], tokens=10))
            client.wait(lambda name=name: name in client.finished)
        cached = {name: finish.cached_tokens for name, finish in client.finished.items()}
        copies = engine.status()["states"]["copies"]
    for turn in range(1, 4):
        assert cached[f"t{turn}"] >= (len(texts[turn - 1]) - 1) // page * page > 0
    # The answer before was long.
    assert cached["t3"] >= len(texts[3]) - 6 - 32 - page
    assert (cached["parts"], cached["parts too"]) == (0, 2 * page)
    assert 0 < copies <= sequences
    model = tiny_model(kind)
    for name, own in zip(client.finished, texts, strict=True):
        answer = client.ids(name)
        assert answer == generated(model, own, len(answer))[0], name


def test_numbers_that_are_not_finite_stay_with_the_answer_that_has_them(tmp_path: Path) -> None:
    with running_engine(tmp_path, "lfm2", serving__max_sequences=2, **BROAD) as (engine, client):
        _, weights = engine.weights("ann").result(10)
        assert weights == {}
        broken = {
            f"base_model.model.{name}.lora_{side}.weight": torch.full(shape, float("nan"))
            for name, (fan_in, fan_out) in engine.adapter_files.spec.shapes.items()
            for side, shape in (("A", (16, fan_in)), ("B", (fan_out, 16)))
        }
        engine.import_adapter("ann", broken, "imported").result(10)
        for turn in range(3):
            engine.submit(request(f"broken{turn}", random_ids(20, 1), adapter="ann"))
            engine.submit(request(f"right{turn}", random_ids(20, 2), tokens=20))
        client.wait(lambda: len(client.finished) == 6)
        assert client.finished["broken0"].reason == "error"
        engine.submit(request("last", random_ids(20, 2), tokens=20))
        engine.submit(request("beside", random_ids(20, 2), tokens=20))
        client.wait(lambda: len(client.finished) == 8)
    wanted, _ = generated(tiny_model("lfm2"), random_ids(20, 2), 20)
    assert all(client.ids(name) == wanted for name in ("right0", "right1", "right2", "last", "beside"))


def test_a_start_that_cannot_hold_the_states_says_how_many_sequences_fit(tmp_path: Path) -> None:
    how = {"cache__memory_mb": 1, "model__max_context_tokens": 64}
    save_tiny(tmp_path / "model-qwen3_5_text", "qwen3_5_text")
    with (
        pytest.raises(ModelRefused, match=r"set serving\.max_sequences = \d+, or set") as refused,
        running_engine(tmp_path, "qwen3_5_text", serving__max_sequences=500, **how),
    ):
        pass
    assert "take 506 slots of 0.0117 MiB" in str(refused.value)
    fitting = int(str(refused.value).split("max_sequences = ")[1].split(",")[0])
    with running_engine(tmp_path, "qwen3_5_text", serving__max_sequences=fitting, **how) as (engine, client):
        engine.submit(request("one", random_ids(9, 1), tokens=9))
        client.wait(lambda: "one" in client.finished)
    with (
        pytest.raises(ModelRefused, match=f"set serving.max_sequences = {fitting}, or set"),
        running_engine(tmp_path, "qwen3_5_text", serving__max_sequences=fitting + 1, **how),
    ):
        pass


def test_a_model_of_recurrent_layers_alone_is_refused_with_the_reason(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model-qwen3_5_text", "qwen3_5_text", layer_types=["linear_attention"] * 3)
    with pytest.raises(ModelRefused, match="none of its layers attends"), running_engine(tmp_path, "qwen3_5_text"):
        pass


def test_the_states_of_a_well_known_shape_have_their_size() -> None:
    """Qwen3.5-9B: 24 layers of 32 heads of 128 x 128 in fp32, and a convolution of 8192 channels and 4 tokens."""
    layers = ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 8
    config = AutoConfig.for_model(
        "qwen3_5_text",
        **{"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32, "vocab_size": 248320},
        **{"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256, "layer_types": layers},
        **{"linear_num_value_heads": 32, "linear_num_key_heads": 16},
        **{"linear_key_head_dim": 128, "linear_value_head_dim": 128},
    )
    shape = BaseShape.of_config(config, "all-linear")
    assert shape.state_bytes(torch.bfloat16) == 49.5 * 2**20
    assert shape.kv_per_token(torch.bfloat16) == 2 * 8 * 4 * 256 * 2
