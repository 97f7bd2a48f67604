"""A long talk goes on over the K/V of an earlier version of its adapter, and the new weights compute what is new."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from edged.align.feedback.pair import VersionSaved
from tests.engine.harness import BuiltEngine, Client, random_ids, random_pairs, request, running_engine, wait_idle
from tests.models import STATEFUL

ALL_SAVED = {"guard__held_out_share": 0.0, "align__learning_rate": 0.05, "store__save_every_s": 0.001}
ALL_DEAR = ALL_SAVED | {"scheduler__ttft_floor_ms": 1e-6, "scheduler__ttft_factor": 1e-9, "cache__memory_mb": 16}
"""Any prompt takes longer than the strictest TTFT target, so that none is computed anew."""


def answer(engine: BuiltEngine, client: Client, name: str, prompt: list[int], tokens: int = 12) -> list[int]:
    """Ask "ann", and return the prompt with the answer: the next turn's beginning."""
    engine.submit(request(name, prompt, tokens, "ann"))
    client.wait(lambda: name in client.finished)
    return [*prompt, *client.ids(name)]


def teach(engine: BuiltEngine, client: Client, times: int) -> int:
    """Have "ann" learn, and return her version. Her latest talk, and no other, is computed anew meanwhile."""
    answer(engine, client, f"another {times}", random_ids(20, 100 + times))
    before = engine.version("ann") or 0
    engine.submit_pairs(random_pairs(4, "ann", times, first_id=100 * times))
    client.wait(lambda: (engine.version("ann") or 0) > before)
    wait_idle(engine)
    client.wait(lambda: engine.version("ann") in [record.version for record in client.of(VersionSaved)])
    return engine.version("ann") or 0


@pytest.mark.parametrize("kind", ["llama", "gemma2", *STATEFUL])
def test_the_next_turns_find_the_talk_and_answer_by_the_new_weights(kind: str, tmp_path: Path) -> None:
    with running_engine(tmp_path, kind, **ALL_DEAR) as (engine, client):
        first = teach(engine, client, 1)
        begun = answer(engine, client, "begun", random_ids(64, 1))
        second = teach(engine, client, 2)
        # While anybody is served no talk is computed anew.
        engine.submit(request("busy", random_ids(8, 4), 450))
        turn = [*begun, *random_ids(9, 2)]
        going_on = answer(engine, client, "turn", turn)
        found = client.finished["turn"]
        assert found.version == second > first
        assert found.cached_tokens >= 56
        assert engine.status()["prefix"]["earlier_tokens"] == found.cached_tokens
        answer(engine, client, "later", [*going_on, *random_ids(9, 3)])
        assert client.finished["later"].cached_tokens > found.cached_tokens, "its own turn was found, too"
        assert "busy" not in client.finished
        engine.cancel("busy")
    if kind != "llama":
        return
    folders = {record.version: record.path for record in client.of(VersionSaved)}
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model-llama", dtype=torch.float32)
    model = PeftModel.from_pretrained(base, folders[first], adapter_name="first").eval()
    model.load_adapter(folders[second], "second")
    with torch.no_grad():
        cached = found.cached_tokens
        over = model(torch.tensor([turn[:cached]]), use_cache=True).past_key_values
        model.set_adapter("second")
        rest, wanted = turn[cached:], list[int]()
        for _ in client.ids("turn"):
            out = model(torch.tensor([rest]), past_key_values=over, use_cache=True)
            rest = [int(out.logits[0, -1].argmax())]
            wanted += rest
    assert client.ids("turn") == wanted


def test_a_talk_that_is_soon_computed_is_computed_anew(tmp_path: Path) -> None:
    with running_engine(tmp_path, **ALL_SAVED, scheduler__ttft_floor_ms=60_000.0) as (engine, client):
        teach(engine, client, 1)
        begun = answer(engine, client, "begun", random_ids(64, 1))
        teach(engine, client, 2)
        answer(engine, client, "turn", begun)
        assert client.finished["turn"].cached_tokens == 0


def test_an_answer_that_runs_across_a_rollback_does_not_bring_back_what_was_taken_back(tmp_path: Path) -> None:
    with running_engine(tmp_path, **ALL_DEAR) as (engine, client):
        teach(engine, client, 1)
        bad = teach(engine, client, 2)
        prompt = random_ids(64, 1)
        # While anybody is served no talk is computed anew.
        engine.submit(request("busy", random_ids(8, 4), 450))
        engine.submit(request("long", prompt, 100, "ann"))
        client.wait(lambda: client.tokens["long"])
        version = engine.rollback("ann", 1).result(10)
        assert client.tokens["long"][0].version == bad
        client.wait(lambda: "long" in client.finished)
        answer(engine, client, "turn", [*prompt, *client.ids("long")])
        found = client.finished["turn"]
        assert (found.version, found.cached_tokens) == (version, 0)
        assert "busy" not in client.finished
        engine.cancel("busy")


def test_a_talk_that_is_computed_anew_leaves_no_earlier_copy(tmp_path: Path) -> None:
    with running_engine(tmp_path, **ALL_SAVED, cache__memory_mb=16) as (engine, client):
        talk = answer(engine, client, "begun", random_ids(200, 1))
        cached = []
        for lesson in range(1, 5):
            engine.submit_pairs(random_pairs(4, "ann", lesson, first_id=100 * lesson))
            client.wait(lambda lesson=lesson: (engine.version("ann") or 0) >= lesson)
            wait_idle(engine)
            cached.append(engine.status()["pages"]["cached"])
        assert engine.status()["totals"]["renewals"] >= 3
        assert max(cached) <= 2 * len(talk) // 8 + 2, "the base's and one version's"


@pytest.mark.parametrize("way", ["pin", "rollback", "the base"])
def test_no_talk_goes_on_over_what_was_taken_back_or_is_the_bases_or_where_answers_are_pinned(
    way: str, tmp_path: Path
) -> None:
    settings = ALL_DEAR | ({"serving__on_update": "pin"} if way == "pin" else {})
    with running_engine(tmp_path, **settings) as (engine, client):
        first = 0 if way == "the base" else teach(engine, client, 1)
        begun = answer(engine, client, "begun", random_ids(64, 1))
        version = teach(engine, client, 2)
        if way == "rollback":
            version = engine.rollback("ann", first).result(10)
        answer(engine, client, "turn", begun)
        found = client.finished["turn"]
        assert (found.version, found.cached_tokens) == (version, 0)
        # Nor does anybody find what an adapter computed under the name of the base.
        engine.submit(request("base", begun, 4))
        client.wait(lambda: "base" in client.finished)
        assert client.finished["base"].cached_tokens <= (72 if way == "the base" else 0)
