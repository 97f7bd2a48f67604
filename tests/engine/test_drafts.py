"""Drafts: an answer's tokens are the same with them and without, and they are tried only where they bring something."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edged.engine import drafts
from edged.engine.sampling.draft_lookup import MOST, NGRAM, DraftLookup
from tests.engine.harness import random_ids, random_pairs, request, running_engine, wait_idle

NO_TESTS = {"guard__held_out_share": 0.0}


def tokens_of(folder: Path, requests: list[Any], lookup: bool, **settings: Any) -> tuple[dict[str, list[int]], Any]:
    """The tokens of each request's answer, and the totals."""
    with running_engine(folder, serving__prompt_lookup=lookup, **settings) as (engine, client):
        for each in requests:
            engine.submit(each)
        client.wait(lambda: len(client.finished) == len(requests))
        wait_idle(engine)
        return {each.request_id: client.ids(each.request_id) for each in requests}, engine.status()["totals"]


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is found is tried, also where it costs more than it brings, as on a model as small as these."""
    monkeypatch.setattr(drafts, "_LEAST_GAIN", 0.0)


def repetitive(seed: int, count: int = 12) -> list[int]:
    """A prompt of one phrase again and again, which tiny random models go on with."""
    return random_ids(6, seed) * count


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma2"])
def test_answers_are_the_same_with_drafts_and_without(tmp_path: Path, kind: str) -> None:
    requests = [
        request("greedy", repetitive(1), 80),
        request("drawn", repetitive(2), 80, temperature=0.7, seed=3),
        request("logprobs", repetitive(3), 40, logprobs=2),
        request("short", repetitive(4), 5, min_tokens=5),
        request("plain", random_ids(40, 5), 40, temperature=1.0, seed=9),
        request("penalized", repetitive(6), 40, repetition_penalty=1.3),
    ]
    with_drafts, totals = tokens_of(tmp_path, requests, True, kind=kind)
    without, none = tokens_of(tmp_path, requests, False, kind=kind)
    assert with_drafts == without
    assert totals["output_tokens"] == none["output_tokens"] == sum(map(len, without.values()))
    assert 0 < totals["drafted_right"] <= totals["drafted_tokens"]
    assert none["drafted_tokens"] == 0


@pytest.mark.usefixtures("eager")
def test_an_answer_that_repeats_itself_takes_fewer_iterations(tmp_path: Path) -> None:
    (_, totals), (_, none) = (tokens_of(tmp_path, [request("r", repetitive(3), 300)], on) for on in (True, False))
    assert totals["iterations"] == none["iterations"] - totals["drafted_right"]
    assert totals["drafted_right"] > 20


@pytest.mark.usefixtures("eager")
@pytest.mark.slow
def test_little_memory_changes_nothing(tmp_path: Path) -> None:
    requests = [request(f"r{seed}", repetitive(seed, 8), 300) for seed in range(6)]
    few = {"cache__memory_mb": 1, "cache__page_size": 8}
    with_drafts, totals = tokens_of(tmp_path, requests, True, **few)
    assert with_drafts == tokens_of(tmp_path, requests, False, **few)[0]
    assert totals["drafted_right"] > 0


@pytest.mark.usefixtures("eager")
def test_a_cancel_and_training_in_the_middle_leave_nothing_behind(tmp_path: Path) -> None:
    with running_engine(tmp_path, **NO_TESTS) as (engine, client):
        engine.submit_pairs(random_pairs(8, adapter="ann"))
        for seed in range(4):
            engine.submit(request(f"r{seed}", repetitive(seed), 400, adapter="ann" if seed % 2 else None))
        client.wait(lambda: engine.status()["totals"]["drafted_right"] > 0)
        engine.cancel("r0")
        engine.cancel("r1")
        client.wait(lambda: len(client.finished) == 4)
        wait_idle(engine)
        pages = engine.status()["pages"]
        assert pages["free"] + pages["cached"] == pages["total"]


def test_what_followed_the_latest_tokens_before_is_drafted() -> None:
    lookup = DraftLookup()
    assert lookup.find([1, 2], 4) is None
    found = lookup.find([1, 2, 3, 4, 5, 6, 1, 2, 3], 4)
    assert found is not None
    assert found.tokens == [4, 5, 6, 1]
    longer = lookup.find([1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 6], 2)
    assert longer is not None
    assert longer.tokens == [1, 2]
    assert longer.kind > found.kind, "six tokens are alike, not three"


def test_drafts_that_mislead_are_expected_to() -> None:
    lookup = DraftLookup()
    before = lookup.share(0)
    for _ in range(50):
        lookup.learn(0, 0, 1)
    assert lookup.share(0) < 0.1 < before
    assert lookup.share(2) > before, "others are not to blame"
    for _ in range(200):
        lookup.learn(0, 4, 4)
    assert lookup.share(0) > 0.9


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, MOST))
def test_a_draft_is_a_part_of_the_text_that_a_run_like_the_latest_precedes(tokens: list[int], most: int) -> None:
    lookup = DraftLookup()
    for count in range(1, len(tokens) + 1):
        found = lookup.find(tokens[:count], most)
        run = tokens[count - NGRAM : count]
        ends = [end for end in range(NGRAM, count) if tokens[end - NGRAM : end] == run] if count > NGRAM else []
        assert (found is not None) == bool(ends)
        if found is not None:
            assert found.tokens == tokens[ends[-1] : min(ends[-1] + most, count)]
