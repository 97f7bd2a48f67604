"""The official OpenAI client against a real daemon over its Unix socket."""

from __future__ import annotations

import asyncio
import json

import httpx2
import openai
import pytest

from tests.api.live import LiveDaemon
from tests.models import byte_tokenizer

HELLO = [{"role": "user", "content": "hello"}]
GREEDY = {"model": "tiny", "messages": HELLO, "temperature": 0.0, "max_tokens": 24}


def test_a_chat_has_an_answer_usage_and_an_id(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**GREEDY, extra_body={"ignore_eos": True})
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == "tiny"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 24
    assert answer.usage.prompt_tokens == len("<s>user: hello\nassistant: ") - 2
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 24


def test_what_has_no_effect_is_told_in_headers(http: httpx2.Client) -> None:
    body = {"model": "tiny:zed", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    answer = http.post("/v1/chat/completions", json={**body, "temprature": 3, "a\nb": 1, "store": True})
    assert answer.headers["X-Edged-Ignored"] == "temprature, store"
    assert answer.headers["X-Edged-Adapter"] == "zed has learned nothing yet: the base model answers"
    answer = http.post("/v1/chat/completions", json={**body, "model": "tiny"})
    assert not {"X-Edged-Ignored", "X-Edged-Adapter"} & answer.headers.keys()


def test_flex_is_the_batch_class(client: openai.OpenAI) -> None:
    assert client.chat.completions.create(**GREEDY, service_tier="flex").service_tier == "flex"
    assert client.chat.completions.create(**GREEDY).service_tier == "default"
    with pytest.raises(openai.BadRequestError, match="service_tier"):
        client.chat.completions.create(**GREEDY, service_tier="free")  # type: ignore[call-overload]


def test_a_stream_joins_to_the_same_answer_and_ends_with_usage(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**GREEDY)
    chunks = list(client.chat.completions.create(**GREEDY, stream=True, stream_options={"include_usage": True}))
    pieces = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    assert "".join(pieces) == whole.choices[0].message.content
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == whole.choices[0].finish_reason
    (end,) = [choice for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert not end.delta.content, "clients stop reading at the end, and would lose what comes with it"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_n_choices_are_streamed_side_by_side(client: openai.OpenAI) -> None:
    options = {**GREEDY, "temperature": 1.0, "seed": 7, "n": 3}
    whole = client.chat.completions.create(**options)
    texts = {0: "", 1: "", 2: ""}
    finished = set()
    for chunk in client.chat.completions.create(**options, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            finished |= {choice.index} if choice.finish_reason else set()
    assert [choice.message.content for choice in whole.choices] == list(texts.values())
    assert len(set(texts.values())) == 3
    assert finished == {0, 1, 2}


def test_a_seed_repeats_an_answer(client: openai.OpenAI) -> None:
    options = {**GREEDY, "temperature": 1.0}
    texts = [client.chat.completions.create(**options, seed=seed).choices[0].message.content for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_answer_before_it(client: openai.OpenAI, stream: bool) -> None:
    options = {**GREEDY, "max_tokens": 60, "extra_body": {"ignore_eos": True}}
    text = client.chat.completions.create(**options).choices[0].message.content or ""
    stop = text[20:24]
    expected = text[: text.index(stop)]
    if not stream:
        answer = client.chat.completions.create(**options, stop=[stop, "never"])
        assert answer.choices[0].message.content == expected
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage is not None
        assert answer.usage.completion_tokens < 60
        return
    chunks = list(client.chat.completions.create(**options, stop=stop, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_generation_ends_with_the_stop_string(client: openai.OpenAI, daemon: LiveDaemon) -> None:
    text = client.chat.completions.create(**GREEDY, extra_body={"ignore_eos": True}).choices[0].message.content or ""
    before = daemon.status()["totals"]["output_tokens"]
    client.chat.completions.create(**{**GREEDY, "max_tokens": 450}, stop=text[:4], extra_body={"ignore_eos": True})
    assert daemon.idle()
    assert daemon.status()["totals"]["output_tokens"] - before < 450


def test_a_stop_token_is_not_part_of_the_answer(client: openai.OpenAI) -> None:
    tokenizer = byte_tokenizer()
    whole = client.chat.completions.create(**GREEDY, logprobs=True, extra_body={"ignore_eos": True}).choices[0]
    assert whole.logprobs is not None
    bytes_ = [entry.bytes or [] for entry in whole.logprobs.content or []]
    at = next(i for i in range(3, 24) if bytes_[i] not in bytes_[:i] and 32 <= bytes_[i][0] < 127)
    (token,) = tokenizer.encode(chr(bytes_[at][0]))
    answer = client.chat.completions.create(**GREEDY, logprobs=True, extra_body={"stop_token_ids": [token]}).choices[0]
    assert answer.finish_reason == "stop"
    assert answer.message.content == b"".join(map(bytes, bytes_[:at])).decode("utf-8", "replace")
    assert answer.logprobs is not None
    assert len(answer.logprobs.content or []) == at


def test_min_tokens_holds_stop_strings_off(client: openai.OpenAI) -> None:
    options = {**GREEDY, "max_tokens": 40}
    text = client.chat.completions.create(**options, extra_body={"ignore_eos": True}).choices[0].message.content or ""
    answer = client.chat.completions.create(**options, stop=text[0], extra_body={"ignore_eos": True, "min_tokens": 12})
    assert answer.usage is not None
    assert answer.usage.completion_tokens >= 12


def test_logprobs_name_tokens_bytes_and_alternatives(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**GREEDY, logprobs=True, top_logprobs=3, extra_body={"ignore_eos": True})
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 24
    for entry in logprobs.content:
        assert entry.logprob <= 0.0
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].logprob == pytest.approx(entry.logprob)
    data = b"".join(bytes(entry.bytes or ()) for entry in logprobs.content if "<" not in entry.token)
    assert data.decode("utf-8", "replace") == answer.choices[0].message.content


def test_streamed_logprobs_are_those_of_the_whole_answer(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**GREEDY, logprobs=True).choices[0].logprobs
    streamed = []
    for chunk in client.chat.completions.create(**GREEDY, logprobs=True, stream=True):
        if chunk.choices[0].logprobs:
            streamed += chunk.choices[0].logprobs.content or []
    assert whole is not None
    assert [entry.token for entry in streamed] == [entry.token for entry in whole.content or []]


def test_text_completions_take_text_and_tokens_and_logprobs(client: openai.OpenAI) -> None:
    by_text = client.completions.create(model="tiny", prompt="abc", temperature=0, max_tokens=8, logprobs=2)
    ids = [3 + byte for byte in range(3)]
    by_ids = client.completions.create(model="tiny", prompt=ids, temperature=0, max_tokens=8)
    assert by_text.id.startswith("cmpl-")
    assert by_text.object == "text_completion"
    logprobs = by_text.choices[0].logprobs
    assert logprobs is not None
    assert len(logprobs.tokens or []) == len(logprobs.token_logprobs or []) == len(logprobs.text_offset or [])
    assert by_ids.usage is not None
    assert by_ids.usage.prompt_tokens == 3
    pieces = client.completions.create(model="tiny", prompt="abc", temperature=0, max_tokens=8, stream=True)
    assert "".join(chunk.choices[0].text for chunk in pieces) == by_text.choices[0].text


def test_max_completion_tokens_is_the_newer_name(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=HELLO, max_completion_tokens=5, extra_body={"ignore_eos": True}
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 5


def test_vllms_extensions_are_taken(client: openai.OpenAI) -> None:
    extra = {"top_k": 1, "min_p": 0.1, "repetition_penalty": 1.3, "min_tokens": 4, "ignore_eos": True}
    texts = {
        client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=6, extra_body=extra)
        .choices[0]
        .message.content
        for _ in range(3)
    }
    assert len(texts) == 1


def test_an_answer_too_long_for_the_context_is_cut_by_it(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=10**9, temperature=0, extra_body={"ignore_eos": True}
    )
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.total_tokens == 512


def test_content_parts_and_developer_messages_are_text(client: openai.OpenAI) -> None:
    parts = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
    ]
    plain = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "one\ntwo"}]
    options = {"model": "tiny", "temperature": 0.0, "max_tokens": 8}
    texts = [
        client.chat.completions.create(messages=messages, **options).choices[0].message.content
        for messages in (parts, plain)
    ]
    assert texts[0] == texts[1]


def test_models_are_listed_by_name_and_adapter(client: openai.OpenAI) -> None:
    assert next(iter(client.models.list())).id == "tiny"
    assert client.models.retrieve("tiny").owned_by == "edged"
    with pytest.raises(openai.NotFoundError, match='use "tiny"'):
        client.models.retrieve("gpt-4")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("tiny:nobody")


def test_a_users_name_chooses_an_adapter_either_way(client: openai.OpenAI) -> None:
    by_user = client.chat.completions.create(**GREEDY, user="dora")
    by_model = client.chat.completions.create(**{**GREEDY, "model": "tiny:dora"})
    assert by_user.choices[0].message.content == by_model.choices[0].message.content
    assert by_model.model == "tiny:dora"


def test_a_repeated_prompt_reports_its_cached_tokens(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "a long question that fills several pages of the cache, twice"}]
    for _ in range(2):
        answer = client.chat.completions.create(model="tiny", messages=messages, max_tokens=2)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert (answer.usage.prompt_tokens_details.cached_tokens or 0) >= 48


async def test_two_hundred_clients_at_once_are_all_answered(daemon: LiveDaemon) -> None:
    async with daemon.async_openai() as client:
        asked = [
            client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": f"{i}"}], max_tokens=4, user=f"u{i % 7}"
            )
            for i in range(200)
        ]
        answers = await asyncio.gather(*asked)
    assert len({answer.id for answer in answers}) == 200
    assert daemon.idle()


async def test_beyond_the_queue_a_client_is_told_to_come_back(daemon: LiveDaemon) -> None:
    async with daemon.async_openai() as client:
        asked = [
            client.chat.completions.create(
                model="tiny", messages=HELLO, max_tokens=16, n=100, extra_body={"ignore_eos": True}
            )
            for _ in range(6)
        ]
        answers = await asyncio.gather(*asked, return_exceptions=True)
    refused = [answer for answer in answers if isinstance(answer, openai.RateLimitError)]
    assert refused
    assert 1 <= int(refused[0].response.headers["Retry-After"]) <= 60
    assert any(not isinstance(answer, BaseException) for answer in answers)
    assert daemon.idle()


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_vanishes_frees_its_pages(daemon: LiveDaemon, stream: bool) -> None:
    body = json.dumps({"messages": HELLO, "max_tokens": 480, "ignore_eos": True, "stream": stream}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    before = daemon.status()["totals"]["output_tokens"]
    if stream:
        assert b"200 OK" in daemon.send(head + body, wait_for=b"content")
    else:
        daemon.send(head + body)
    assert daemon.idle()
    assert daemon.status()["totals"]["output_tokens"] - before < 480
