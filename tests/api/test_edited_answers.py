"""Answers that are edited as their user edits them: from the third edit alike on, until it is taken off or struck."""

from __future__ import annotations

import json
import time
from typing import Any

import httpx2
import pytest

from tests.models import byte_tokenizer

OPENING = "Dear Ann, "
WORDS = {str(byte_tokenizer().convert_tokens_to_ids(letter)): 100 for letter in ("a", "b", "c", "Ġ")}
"""Token biases by which a model that knows no words draws some."""


def answered(http: httpx2.Client, user: str, number: int = 0, **fields: Any) -> httpx2.Response:
    asked = [{"role": "user", "content": f"How are you, {number}?"}]
    body = {"messages": asked, "user": user, "max_tokens": 40, "logit_bias": WORDS, **fields}
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer


def text_of(answer: httpx2.Response) -> str:
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


def edit(http: httpx2.Client, answer: httpx2.Response, text: str) -> None:
    body = {"completion_id": answer.json()["id"], "signal": "edit", "text": text}
    assert http.post("/v1/feedback", json=body).status_code == 200


def until(http: httpx2.Client, user: str, edited: bool) -> httpx2.Response:
    deadline = time.monotonic() + 30.0
    while (answer := answered(http, user, 99)).headers.get("X-Edged-Edited") != ("true" if edited else None):
        assert time.monotonic() < deadline, "it did not come about in time"
        time.sleep(0.1)
    return answer


def teach(http: httpx2.Client, user: str) -> None:
    for number in range(3):
        answer = answered(http, user, number)
        assert "X-Edged-Edited" not in answer.headers, "fewer than three edits are alike"
        edit(http, answer, OPENING + text_of(answer).strip())
    until(http, user, edited=True)


@pytest.fixture
def edith(http: httpx2.Client) -> str:
    if not http.get("/v1/adapters/edith").is_success:
        teach(http, "edith")
    return "edith"


def test_an_answer_is_edited_and_says_so_and_is_stored_as_it_was_served(http: httpx2.Client, edith: str) -> None:
    answer = answered(http, edith, 5)
    assert text_of(answer).startswith(OPENING)
    assert not text_of(answer).startswith(OPENING * 2)
    assert answer.json()["system_fingerprint"].endswith("+edits")
    edit(http, answer, text_of(answer) + "!")
    exported = map(json.loads, http.get("/v1/feedback", params={"user": edith}).text.splitlines())
    assert text_of(answer) in json.dumps([line["rejected"] for line in exported])


def test_a_stream_is_edited_too_and_says_so_at_its_end(http: httpx2.Client, edith: str) -> None:
    body = {"messages": [{"role": "user", "content": "How are you?"}], "user": edith, "max_tokens": 40, "stream": True}
    body["logit_bias"] = WORDS
    with http.stream("POST", "/v1/chat/completions", json=body) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    chunks = [json.loads(line) for line in lines[:-1]]
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert text.startswith(OPENING)
    assert chunks[-1]["edged"]["edited"] is True


@pytest.mark.parametrize(
    "fields", [{"logprobs": True}, {"max_tokens": 8}, {"stop": ["Ann"]}], ids=["logprobs", "no room", "a stop string"]
)
def test_what_an_edit_would_break_is_left_alone(http: httpx2.Client, edith: str, fields: dict[str, Any]) -> None:
    answer = answered(http, edith, 6, **fields)
    assert "X-Edged-Edited" not in answer.headers
    assert not text_of(answer).startswith(OPENING)


def test_others_get_answers_as_they_are(http: httpx2.Client, edith: str) -> None:
    assert edith
    assert "X-Edged-Edited" not in answered(http, "someone").headers


def test_a_line_that_is_struck_is_edited_no_more(http: httpx2.Client) -> None:
    teach(http, "sten")
    found = http.get("/v1/adapters/sten").json()["beliefs"]
    assert found[0] == {
        "key": "edit:begins:Dear Ann, ", "text": 'begins with "Dear Ann,"', "likes": True, "agree": 3, "of": 3,
    }  # fmt: skip
    assert http.post("/v1/adapters/sten/strike", json={"key": "edit:begins:Dear Ann, "}).status_code == 200
    until(http, "sten", edited=False)
    assert (
        http.post("/v1/adapters/sten/strike", json={"key": "edit:begins:Dear Ann, ", "undo": True}).status_code == 200
    )
    until(http, "sten", edited=True)


def test_two_edits_that_take_it_off_end_it(http: httpx2.Client) -> None:
    teach(http, "otto")
    for number in (7, 8):
        answer = answered(http, "otto", number)
        edit(http, answer, text_of(answer).removeprefix(OPENING))
    until(http, "otto", edited=False)
