"""Limits of a running daemon: who reaches one is told when to come again, and nobody else notices."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Iterator
from typing import Any

import httpx2
import openai
import pytest

from tests.api.live import LiveDaemon, running
from tests.api.test_quarantine import until
from tests.models import save_tiny

HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveDaemon]:
    root = tmp_path_factory.mktemp("limits")
    save_tiny(root / "tiny", max_position_embeddings=512)
    limits = {"limits__requests_per_minute": 3, "limits__tokens_per_minute": 1000, "limits__feedback_per_minute": 2}
    with running(root / "run", root / "tiny", **limits) as live:
        yield live


def ask(http: httpx2.Client, **fields: Any) -> httpx2.Response:
    return http.post("/v1/completions", json={"prompt": "hello", "max_tokens": 4, "ignore_eos": True, **fields})


def refused(response: httpx2.Response, setting: str) -> int:
    """The seconds to wait of an answer that must be a refusal because of a setting."""
    assert response.status_code == 429, response.text
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_reached")
    assert f"limits.{setting}" in error["message"]
    return int(response.headers["Retry-After"])


def test_requests_beyond_the_limit_are_refused_and_others_are_served(limited: LiveDaemon) -> None:
    with limited.http() as http:
        answers = [ask(http, user="ann") for _ in range(3)]
        assert [answer.headers["x-ratelimit-remaining-requests"] for answer in answers] == ["2", "1", "0"]
        assert answers[0].headers["x-ratelimit-limit-requests"] == "3"
        assert 1 <= refused(ask(http, user="ann"), "requests_per_minute") <= 20
        assert ask(http, user="bob").status_code == 200


def test_a_refusal_comes_before_the_prompt_is_looked_at(limited: LiveDaemon) -> None:
    too_long = "word " * 2000
    with limited.http() as http:
        assert ask(http, user="jo", prompt=too_long).json()["error"]["code"] == "context_length_exceeded"
        for _ in range(3):
            assert ask(http, user="jo").status_code == 200
        refused(ask(http, user="jo", prompt=too_long), "requests_per_minute")
        chat = {"messages": [{"role": "user", "content": too_long}], "user": "jo"}
        refused(http.post("/v1/chat/completions", json=chat), "requests_per_minute")


def test_tokens_of_long_answers_count(limited: LiveDaemon) -> None:
    with limited.http() as http:
        assert ask(http, user="cy", max_tokens=480, n=8).status_code == 200
        # Nearly four minutes' worth, less what came back while it was made.
        assert refused(ask(http, user="cy"), "tokens_per_minute") > 20


def test_tokens_that_were_not_needed_are_given_back(limited: LiveDaemon) -> None:
    with limited.http() as http:
        first = ask(
            http, user="dan", max_tokens=400, stop=["a", "e", "i", "o", "u", " "] + [chr(c) for c in range(97, 107)]
        )
        assert first.status_code == 200
        used = first.json()["usage"]["total_tokens"]
        left = int(ask(http, user="dan").headers["x-ratelimit-remaining-tokens"])
        assert left >= 1000 - used - 9 - 1


def test_a_stream_says_what_is_left_too(limited: LiveDaemon) -> None:
    with limited.http() as http:
        assert ask(http, user="eve", stream=True).headers["x-ratelimit-remaining-requests"] == "2"


def test_feedback_beyond_the_limit_is_refused(limited: LiveDaemon) -> None:
    with limited.http() as http:
        for i in range(2):
            pair = {"user": "ann", "prompt": f"q{i}", "chosen": "good", "rejected": "bad"}
            assert http.post("/v1/feedback", json=pair).status_code == 200
        pair = {"user": "ann", "prompt": "q", "chosen": "good", "rejected": "bad"}
        assert 1 <= refused(http.post("/v1/feedback", json=pair), "feedback_per_minute") <= 30


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveDaemon]:
    """One that learns a pair of each user an hour, and lets three wait."""
    root = tmp_path_factory.mktemp("slow")
    save_tiny(root / "tiny", max_position_embeddings=512)
    limits = {"limits__queued_pairs": 3, "feedback__pairs_per_hour": 1, "guard__held_out_share": 0}
    with running(root / "run", root / "tiny", **limits, limits__feedback_per_minute=60) as live:
        yield live


def test_no_more_pairs_are_taken_of_a_user_of_whom_so_many_wait_and_others_are_heard(slow: LiveDaemon) -> None:
    with slow.http() as http:
        pairs = [{"user": "kim", "prompt": f"q{i}", "chosen": "good", "rejected": "bad"} for i in range(5)]
        first = http.post("/v1/feedback", json=pairs[0]).json()["id"]
        until(lambda: http.get(f"/v1/feedback/{first}").json()["settled"])
        assert [http.post("/v1/feedback", json=pair).status_code for pair in pairs[1:4]] == [200, 200, 200]
        last = http.post("/v1/feedback", json=pairs[4])
        assert (last.status_code, last.json()["error"]["code"]) == (429, "pair_queue_full")
        assert (
            '3 pairs of user "kim" wait to be learned, and limits.queued_pairs = 3' in last.json()["error"]["message"]
        )
        assert int(last.headers["Retry-After"]) >= 1
        assert http.post("/v1/feedback", json={**pairs[4], "user": "lea"}).status_code == 200
        # Answers go on, and what their next turns say is not learned.
        assert signals_about(slow, *[next_turn(http, user, 1) for user in ("kim", "lea")]) == [0, 1]


def next_turn(http: httpx2.Client, user: str, number: int, **fields: Any) -> str:
    """Ask, take the answer back with the next message, and return the answer's id."""
    talk = [{"role": "user", "content": f"Name city {number}, please"}]
    # Never an empty answer: it could not be taken back.
    asked = {"user": user, "max_tokens": 8, "ignore_eos": True, "temperature": 0, **fields}
    first = http.post("/v1/chat/completions", json={"messages": talk, **asked}).json()
    answer = {"role": "assistant", "content": first["choices"][0]["message"]["content"]}
    again = [*talk, answer, {"role": "user", "content": "No, I meant a small city"}]
    response = http.post("/v1/chat/completions", json={"messages": again, **asked})
    assert response.status_code == 200, response.text
    return str(first["id"])


def signals_about(live: LiveDaemon, *completions: str) -> list[int]:
    with sqlite3.connect(f"file:{live.data}/edged.db?mode=ro", uri=True) as db:
        count = "SELECT count(*) FROM signals WHERE completion_id = ?"
        return [int(db.execute(count, [name]).fetchone()[0]) for name in completions]


@pytest.fixture(scope="module")
def sparing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveDaemon]:
    """One that takes two signals a minute and keeps a megabyte of a user."""
    root = tmp_path_factory.mktemp("sparing")
    save_tiny(root / "tiny", max_position_embeddings=512)
    limits = {"limits__feedback_per_minute": 2, "limits__stored_mb": 1, "api__max_body_kb": 4096}
    learning = {"align__enabled": "false", "align__max_pair_tokens": 40_000}
    with running(root / "run", root / "tiny", **limits, **learning) as live:
        yield live


def test_next_turns_count_as_feedback_and_stop_at_its_limit(sparing: LiveDaemon) -> None:
    with sparing.http() as http:
        for _ in range(5):
            assert ask(http, user="fay").status_code == 200
        asked = [next_turn(http, "fay", number) for number in range(4)]
        assert signals_about(sparing, *asked) == [1, 1, 0, 0]
        pair = {"user": "fay", "prompt": "q", "chosen": "good", "rejected": "bad"}
        refused(http.post("/v1/feedback", json=pair), "feedback_per_minute")


def test_a_turn_that_says_nothing_about_the_answer_before_counts_for_nothing(sparing: LiveDaemon) -> None:
    with sparing.http() as http:
        for number in range(6):
            chat = {"messages": [{"role": "user", "content": f"talk {number}"}], "user": "gus", "max_tokens": 4}
            assert http.post("/v1/chat/completions", json=chat).status_code == 200
        assert signals_about(sparing, *[next_turn(http, "gus", number) for number in range(2)]) == [1, 1]


def test_a_next_turn_teaches_nothing_where_no_more_of_a_user_may_be_kept(sparing: LiveDaemon) -> None:
    with sparing.http() as http:
        pair = {"user": "hal", "prompt": "q" * 1_100_000, "chosen": "good", "rejected": "bad"}
        assert http.post("/v1/feedback", json=pair).status_code == 200
        shared = {"model": "tiny:recipes"}
        told = [next_turn(http, user, 1, **shared) for user in ("hal", "ida")]
        assert signals_about(sparing, *told) == [0, 1]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveDaemon]:
    root = tmp_path_factory.mktemp("small")
    save_tiny(root / "tiny", max_position_embeddings=512)
    with running(root / "run", root / "tiny", serving__max_sequences=2, serving__max_queue=40) as live:
        yield live


async def waiting(live: LiveDaemon, least: int) -> None:
    """Until so many requests wait."""
    for _ in range(200):
        if (await asyncio.to_thread(live.status))["queue"]["waiting"] >= least:
            return
        await asyncio.sleep(0.02)
    raise AssertionError("the flood did not come")


async def test_one_users_flood_does_not_hold_up_another(small: LiveDaemon) -> None:
    async with small.async_openai() as client:
        done: list[str] = []

        async def chat(user: str) -> None:
            fields = {"max_tokens": 450, "extra_body": {"ignore_eos": True}}
            await client.chat.completions.create(model="tiny", messages=HELLO, user=user, **fields)
            done.append(user)

        flood = [asyncio.create_task(chat("ann")) for _ in range(30)]
        await waiting(small, 15)
        before = len(done)
        await chat("bob")
        # Two run, two more are the engine's already, and bob's turn comes with the next.
        assert len(done) - before <= 10, "bob waited for more than a few of ann's"
        for task in flood:
            task.cancel()
        await asyncio.gather(*flood, return_exceptions=True)
    assert await asyncio.to_thread(small.idle)


async def test_a_request_for_as_many_choices_as_there_are_seats_does_not_hold_up_another(small: LiveDaemon) -> None:
    async with small.async_openai() as client:
        ended: list[str] = []

        async def chat(user: str, choices: int, tokens: int) -> Any:
            fields = {"max_tokens": tokens, "n": choices, "extra_body": {"ignore_eos": True}}
            answer = await client.chat.completions.create(model="tiny", messages=HELLO, user=user, **fields)
            ended.append(user)
            return answer

        flood = [asyncio.create_task(chat("ann", 16, 200)) for _ in range(2)]
        await waiting(small, 25)
        for _ in range(3):
            await chat("bob", 1, 1)
        assert ended == ["bob"] * 3, "bob waited for a whole request of ann's"
        answers = await asyncio.gather(*flood)
        assert [len(answer.choices) for answer in answers] == [16, 16]
        assert all(answer.usage.completion_tokens == 16 * 200 for answer in answers)
        assert len((await chat("ann", 100, 1)).choices) == 100, "more than may wait"
    assert await asyncio.to_thread(small.idle)


async def test_a_full_queue_turns_the_flood_away_and_not_the_others(small: LiveDaemon) -> None:
    async with small.async_openai() as client:

        async def chat(user: str) -> Any:
            fields = {"max_tokens": 200, "extra_body": {"ignore_eos": True}}
            return await client.chat.completions.create(model="tiny", messages=HELLO, user=user, **fields)

        flood = [asyncio.create_task(chat("ann")) for _ in range(60)]
        await waiting(small, 30)
        assert (await chat("bob")).choices
        answers = await asyncio.gather(*flood, return_exceptions=True)
    refusals = [answer for answer in answers if isinstance(answer, openai.RateLimitError)]
    assert refusals
    assert all(int(answer.response.headers["Retry-After"]) >= 1 for answer in refusals)
    assert json.loads(refusals[0].response.text)["error"]["code"] == "queue_full"
    assert await asyncio.to_thread(small.idle)
