"""A body that fills `api.max_body_kb` costs the event loop no more than reading it, whatever is wrong with it."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiohttp import web

from edged.api import requests
from edged.api.completions import _record
from edged.api.requests import ChatRequest, CompletionRequest, PairRequest, parse_feedback, parse_json, read_body
from edged.api.services import Services
from edged.http.access import CALLER
from edged.http.errors import ApiError
from edged.settings.load import Settings
from edged.text.tokenizer import Tokenizer
from tests.models import byte_tokenizer

MANY = 100_000
SOME = 10_001
MESSAGES = '"messages": [{"role": "user", "content": "x"}]'
BODIES: dict[str, tuple[Callable[[dict[str, Any]], object], str, str]] = {
    "token ids": (CompletionRequest.checked, '{"prompt": [' + "-1," * MANY + "-1]}", '"prompt.0" = -1'),
    "token ids in a list": (CompletionRequest.checked, '{"prompt": [[' + "-1," * MANY + "-1]]}", '"prompt.0.0" = -1'),
    "messages that are none": (ChatRequest.checked, '{"messages": [' + "0," * 9_000 + "0]}", '"messages.0" = 0'),
    "empty messages": (ChatRequest.checked, '{"messages": [' + "{}," * 9_000 + "{}]}", '"messages.0.role" is missing'),
    "parts": (
        ChatRequest.checked,
        '{"messages": [{"role": "user", "content": [' + "{}," * SOME + "{}]}]}",
        '"messages.0.content.0.type" is missing',
    ),
    "stops": (ChatRequest.checked, f"{{{MESSAGES}, " + '"stop": [' + "0," * MANY + "0]}", '"stop.0" = 0'),
    "stop ids": (
        ChatRequest.checked,
        f"{{{MESSAGES}, " + '"stop_token_ids": [' + "-1," * MANY + "0]}",
        '"stop_token_ids.0" = -1',
    ),
    "biases": (
        ChatRequest.checked,
        f"{{{MESSAGES}, " + '"logit_bias": {' + ",".join(f'"{n}": 999' for n in range(SOME)) + "}}",
        f"{SOME} biased tokens are too many: at most 1024",
    ),
    "too many messages": (
        ChatRequest.checked,
        '{"messages": [' + ",".join(['{"role": "user", "content": ""}'] * SOME) + "]}",
        f"{SOME} messages are too many: at most 10000",
    ),
    "unknown fields": (
        parse_feedback,
        '{"user": "ann", "chosen": "a", "rejected": "b",' + ",".join(f'"f{n}": 1' for n in range(SOME)) + "}",
        'unknown field "f0"',
    ),
    "a pair's ids": (
        PairRequest.checked,
        '{"user": "ann", "chosen": "a", "rejected": "b", "prompt_ids": [' + "-1," * MANY + "0]}",
        '"prompt_ids.0" = -1',
    ),
}


@pytest.mark.parametrize("what", BODIES)
def test_the_first_fault_is_told_and_the_others_are_not_looked_for(what: str) -> None:
    check, text, said = BODIES[what]
    body = parse_json(text.encode())
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    sys.setprofile(count)
    try:
        with pytest.raises(ApiError) as refused:
            check(body)
    finally:
        sys.setprofile(None)
    assert said in refused.value.message
    assert len(refused.value.message) < 300
    # Each error that pydantic makes costs calls; ten thousand were as many.
    assert calls < SOME / 10


async def test_large_bodies_are_parsed_one_after_the_other_and_in_turns_of_their_callers() -> None:
    running, most, callers = 0, 0, iter(["ann", "ann", "ann", "bob"])
    done: list[str] = []

    class Sent(web.Request):
        def __init__(self) -> None:
            """A request whose body has come."""
            self._state = {CALLER: SimpleNamespace(tenant=next(callers), demand_user=lambda user: None)}
            self._cache = {"headers": {}}

        async def read(self) -> bytes:
            return json.dumps({"prompt": "x" * MANY, "user": self[CALLER].tenant}).encode()

    def check(body: dict[str, Any]) -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        time.sleep(0.05)
        running -= 1
        done.append(body["user"])
        return len(body["prompt"])

    assert await asyncio.gather(*(read_body(Sent(), check) for _ in range(4))) == [MANY] * 4
    assert most == 1
    assert done == ["ann", "bob", "ann", "ann"]


def test_after_a_large_body_others_have_four_times_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    now, slept = 1000.0, list[float]()
    clock = SimpleNamespace(monotonic=lambda: now, sleep=slept.append)
    monkeypatch.setattr(requests, "time", clock)
    bodies = requests._LargeBodies()

    def check(_: dict[str, Any]) -> None:
        nonlocal now
        now += 2.0

    for _ in range(2):
        bodies.check(b"{}", check).result()
    assert slept == [0.0, 8.0]


def with_context(tokens: int, tokenizer: Tokenizer | None = None) -> Services:
    """What a prompt meets before the engine, whose context has so many tokens."""
    engine = SimpleNamespace(max_context_tokens=tokens)
    preferences = SimpleNamespace(in_prompt=lambda adapter: "")
    parts = {"engine": engine, "tokenizer": tokenizer, "preferences": preferences, "settings": Settings()}
    return cast(Services, SimpleNamespace(**parts))


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"messages": [{"role": "user", "content": ""}] * 101}, "101 messages, "),
        ({"messages": [{"role": "user", "content": "<|system|>" * 321}]}, "3210 characters, "),
        ({"prompt": "x " * 1_601}, "3202 characters"),
    ],
)
async def test_what_no_context_holds_is_refused_before_it_is_tokenized(body: dict[str, Any], said: str) -> None:
    checked = (ChatRequest if "messages" in body else CompletionRequest).checked(body)
    with pytest.raises(ApiError, match=f"the prompt has {said}.* 100 tokens .* 3200 characters") as refused:
        await _record(with_context(100), checked, "cmpl-1", "tiny", None, "ann")
    assert refused.value.code == "context_length_exceeded"


def test_many_empty_messages_are_rendered_beside_the_event_loop() -> None:
    """They have no characters, and the chat template writes each of them all the same."""
    threads: list[threading.Thread] = []

    class Watched(Tokenizer):
        def render_chat(
            self, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any] | None = None
        ) -> list[int]:
            threads.append(threading.current_thread())
            return super().render_chat(messages, arguments)

    services = with_context(2_000, Watched(byte_tokenizer(), "watched"))
    for many in (3, 1_000):
        body = ChatRequest.checked({"messages": [{"role": "user", "content": ""}] * many})
        completion, *_ = asyncio.run(_record(services, body, "cmpl-1", "watched", None, "ann"))
        assert len(completion.prompt_ids) > 5 * many
    assert threads[0] is threading.main_thread()
    assert threads[1] is not threading.main_thread()
