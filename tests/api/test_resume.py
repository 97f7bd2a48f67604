"""A stream that broke off goes on behind any of its chunks, as an ingress of a fleet asks for it."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest
from aiohttp import web

from edged.fleet.resume import ResumableAnswer

ON_BEHALF = {"X-Edged-Caller": json.dumps({"name": "ann", "roles": ["use", "train"], "users": ["*"]})}
CHAT = {"messages": [{"role": "user", "content": "Tell me of rice"}], "max_tokens": 24, "ignore_eos": True}
BEGUN: dict[str, Any] = {"id": "chatcmpl-other.0123456789", "created": 5, "version": 0, "prompt": 1, "choices": [None]}


def ask(http: httpx2.Client, data: bytes | dict[str, Any], **headers: str) -> httpx2.Response:
    content = data if isinstance(data, bytes) else json.dumps(data).encode()
    sent = {"Content-Type": "application/json", **ON_BEHALF, **headers}
    return http.post("/v1/chat/completions", content=content, headers=sent)


def chunks_of(stream: bytes) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in stream.splitlines() if line.startswith(b"data: {")]


def said(stream: bytes, close: bool = False) -> list[Any]:
    """What a client makes of a stream, but for what the cache had of the prompt."""
    chunks = chunks_of(stream)
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    found: list[Any] = []
    for index in sorted({choice["index"] for choice in choices}):
        own = [choice for choice in choices if choice["index"] == index]
        told = [entry for choice in own if choice["logprobs"] for entry in choice["logprobs"]["content"]]
        tokens, logprobs = [entry["token"] for entry in told], [entry["logprob"] for entry in told]
        reasons = [choice["finish_reason"] for choice in own if choice["finish_reason"]]
        roles = [choice["delta"]["role"] for choice in own if "role" in choice["delta"]]
        found.append(("".join(choice["delta"].get("content", "") for choice in own), tokens, reasons, roles))
        found.append(pytest.approx(logprobs, abs=1e-3) if close else logprobs)
    used = {key: value for key, value in chunks[-1]["usage"].items() if key.endswith("_tokens")}
    return [*found, used, {(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}]


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0},
        {"seed": 7},
        {},
        {"n": 3, "temperature": 1.5},
        {"seed": 7, "stop": [(2, 6, "no"), (12, 14, "")]},
        {"seed": 3, "logprobs": True, "top_logprobs": 2, "stop": [(2, 6, "no"), (9, 12, "no")]},
        {"seed": 9, "ignore_eos": False, "temperature": 2.0, "min_tokens": 4},
        {"temperature": 0, "frequency_penalty": 1.0, "repetition_penalty": 1.2},
        {"temperature": 0, "qoe": {"deliver": "smooth", "words_per_minute": 6000}},
    ],
)
def test_a_stream_goes_on_behind_each_of_its_chunks(http: httpx2.Client, fields: dict[str, Any]) -> None:
    body = {**CHAT, **fields, "stream": True, "stream_options": {"include_usage": True}}
    if "stop" in fields:
        # Parts of the answer: one that ends it, others whose beginnings hold text back for a while.
        text = said(ask(http, {**body, "stop": None}).content)[0][0]
        body["stop"] = [text[start:end] + more for start, end, more in fields["stop"]]
    choices = fields.get("n", 1)
    begun = ResumableAnswer(json.dumps(body).encode(), choices)
    events = [event + b"\n\n" for event in ask(http, begun.data).content.split(b"\n\n")[:-1]]
    whole = begun.take(b"".join(events))
    assert b"\n: " not in whole
    for cut in range(1, len(events)):
        answer = ResumableAnswer(begun.body, choices, begun.seed)
        first = answer.take(b"".join(events[:cut]) + events[cut][: len(events[cut]) // 2])
        rest = ask(http, answer.data)
        assert rest.status_code == 200, rest.text
        answer.begin(web.StreamResponse(), "other")
        joined = first + answer.take(rest.content)
        assert said(joined) == said(whole, close=True), cut
        usage = chunks_of(joined)[-1]["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] <= usage["prompt_tokens"]


def test_text_that_the_client_has_beyond_its_tokens_is_not_sent_again(http: httpx2.Client) -> None:
    whole = ResumableAnswer(json.dumps({**CHAT, "temperature": 0, "stream": True}).encode(), 1)
    events = [event + b"\n\n" for event in ask(http, whole.data).content.split(b"\n\n")[:-1]]
    text = "".join(choice["delta"].get("content", "") for c in chunks_of(b"".join(events)) for choice in c["choices"])
    whole.take(b"".join(events[:4]))
    resume = json.loads(whole.data)
    resume["resume"]["begun"]["choices"][0]["chars"] = 12
    rest = chunks_of(ask(http, resume).content)
    assert "".join(choice["delta"].get("content", "") for c in rest for choice in c["choices"]) == text[12:]


def test_an_answer_that_went_on_is_stored_under_its_first_id(http: httpx2.Client) -> None:
    begun = ResumableAnswer(json.dumps({**CHAT, "user": "goes-on", "stream": True}).encode(), 1)
    events = ask(http, begun.data).content.split(b"\n\n")
    begun = ResumableAnswer(begun.body, 1, begun.seed)
    begun.take(b"\n\n".join(events[:6]).replace(b"chatcmpl-", b"chatcmpl-other.") + b"\n\n")
    name = chunks_of(ask(http, begun.data).content)[0]["id"]
    assert name.startswith("chatcmpl-other.")
    told = {"completion_id": name, "signal": "edit", "text": "No."}
    assert http.post("/v1/feedback", json=told).json()["pair_ids"]


@pytest.mark.parametrize(
    ("resume", "status", "told"),
    [
        ({"seed": -1}, 400, '"resume.seed" = -1'),
        ({}, 400, '"resume.seed" is missing'),
        ({"seed": 1, "token_ids": [1]}, 400, "resume.token_ids"),
        ({"seed": 1, "begun": {**BEGUN, "choices": [None, None]}}, 400, 'has 2 choices, where "n" = 1'),
        ({"seed": 1, "begun": {**BEGUN, "id": "../x"}}, 400, '"resume.begun.id"'),
        ({"seed": 1, "begun": BEGUN}, 409, "cannot go on here"),
        ({"seed": 1, "begun": {**BEGUN, "version": 3}}, 409, "an answer by version 3 cannot go on here"),
        *(
            ({"seed": 1, "begun": {**BEGUN, "choices": [{"token_ids": ids, "chars": 0, "ended": False}]}}, 400, told)
            for ids, told in (
                ([5, 259], "token id 259 is not one of this model's 259 tokens"),
                ("abc", '"resume.begun.choices.0.token_ids" = "abc"'),
                ([1, -1], '"resume.begun.choices.0.token_ids.1" = -1'),
                ([5] * 25, "choice 0 has 25 tokens, and max_tokens = 24"),
            )
        ),
    ],
)
def test_what_cannot_be_resumed_is_refused(http: httpx2.Client, resume: dict[str, Any], status: int, told: str) -> None:
    answer = ask(http, {**CHAT, "stream": True, "resume": resume})
    assert answer.status_code == status, answer.text
    assert told in answer.json()["error"]["message"]


def test_what_goes_on_is_a_stream(http: httpx2.Client) -> None:
    refused = ask(http, {**CHAT, "resume": {"seed": 1, "begun": BEGUN}})
    assert (refused.status_code, "needs a stream" in refused.text) == (400, True)


def test_only_an_ingress_of_a_fleet_resumes(http: httpx2.Client) -> None:
    refused = http.post("/v1/chat/completions", json={**CHAT, "resume": {"seed": 1}})
    assert (refused.status_code, refused.json()["error"]["param"]) == (403, "resume")
    assert '"resume" is for an ingress of a fleet' in refused.json()["error"]["message"]


def test_nothing_is_told_of_a_stream_to_others(http: httpx2.Client) -> None:
    stream = http.post("/v1/chat/completions", json={**CHAT, "stream": True}).content
    assert b"\n: " not in stream
