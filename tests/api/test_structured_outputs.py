"""Answers that follow a schema, a regular expression, a choice or a grammar, as clients ask for them."""

from __future__ import annotations

import json
import re
import time
from itertools import pairwise
from typing import Any, Literal

import httpx2
import openai
import pytest
from pydantic import BaseModel, Field

from tests.api.live import LiveDaemon
from tests.api.test_edited_answers import answered, edit, text_of
from tests.models import byte_tokenizer

CHAT = "/v1/chat/completions"
HELLO: Any = [{"role": "user", "content": "How was your day?"}]
CLOSING = {str(byte_tokenizer().convert_tokens_to_ids(mark)): 20.0 for mark in '"}'}
"""Biases by which a model that knows no words ends texts and objects."""


class Mood(BaseModel):
    """What an application wants to know."""

    mood: Literal["good", "bad"]
    score: int
    why: str = Field(max_length=20)


def content(answer: httpx2.Response) -> str:
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


def test_the_official_client_parses_an_answer_into_its_model(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(model="tiny", messages=HELLO, response_format=Mood, max_tokens=200)
    assert isinstance(answer.choices[0].message.parsed, Mood)
    assert answer.choices[0].finish_reason == "stop"
    assert abs(answer.choices[0].message.parsed.score) < 2**53


def test_the_official_client_parses_a_stream(client: openai.OpenAI) -> None:
    asked = {"model": "tiny", "messages": HELLO, "response_format": Mood, "max_tokens": 200, "seed": 5}
    with client.chat.completions.stream(**asked) as stream:
        kinds = {event.type for event in stream}
        streamed = stream.get_final_completion().choices[0].message
    assert {"content.delta", "content.done"} <= kinds
    assert streamed.parsed == client.chat.completions.parse(**asked).choices[0].message.parsed


@pytest.mark.parametrize(
    ("given", "pattern"),
    [
        ({"regex": "[0-9]{3}-[a-z]{2}"}, "[0-9]{3}-[a-z]{2}"),
        ({"choice": ["yes", 'no, "never"\n', "é"]}, 'yes|no, "never"\n|é'),
        ({"grammar": 'root ::= ("ab" | "c") [0-9]'}, "(ab|c)[0-9]"),
        ({"grammar": 'start: WORD "!"\nWORD: /[a-z]{2}/'}, "[a-z]{2}!"),
        (
            {"json": {"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 2}},
            r"\[\s*[12]\s*,\s*[12]\s*\]",
        ),
        ({"json": '{"type": "boolean"}'}, "true|false"),
    ],
    ids=lambda given: str(given)[:40],
)
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_structured_outputs_are_vllms(
    client: openai.OpenAI, given: dict[str, Any], pattern: str, temperature: float
) -> None:
    body = {"structured_outputs": given}
    answer = client.completions.create(
        model="tiny", prompt="x", temperature=temperature, max_tokens=60, extra_body=body
    )
    assert re.fullmatch(pattern, answer.choices[0].text)
    assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("schema", [None, {"type": "object", "properties": {"ok": {"type": "boolean"}}}])
def test_a_json_object_is_one(http: httpx2.Client, schema: dict[str, Any] | None) -> None:
    form = {"type": "json_object"} | ({"schema": schema} if schema else {})
    asked = {"messages": HELLO, "response_format": form, "logit_bias": CLOSING, "max_tokens": 100}
    for seed in range(5):
        assert isinstance(json.loads(content(http.post(CHAT, json={**asked, "seed": seed}))), dict)


def test_several_answers_stop_strings_and_log_probabilities_go_with_a_schema(http: httpx2.Client) -> None:
    asked = {"messages": HELLO, "structured_outputs": {"regex": "[a-c]{6}"}, "n": 4, "logprobs": True}
    choices = http.post(CHAT, json={**asked, "max_tokens": 20, "seed": 1}).json()["choices"]
    assert len({choice["message"]["content"] for choice in choices}) > 1
    for choice in choices:
        assert re.fullmatch("[a-c]{6}", choice["message"]["content"])
        assert len(choice["logprobs"]["content"]) == 6
    cut = http.post(CHAT, json={**asked, "max_tokens": 20, "seed": 1, "stop": "a"}).json()["choices"]
    assert [each["message"]["content"] for each in cut] == [
        each["message"]["content"].partition("a")[0] for each in choices
    ]
    short = http.post(CHAT, json={**asked, "max_tokens": 3}).json()["choices"][0]
    assert (short["finish_reason"], len(short["message"]["content"])) == ("length", 3)


def test_the_best_of_several_follows_the_schema_and_alone_it_is_not_chosen(http: httpx2.Client) -> None:
    asked = {"messages": HELLO, "structured_outputs": {"regex": "[a-c]{6}"}, "max_tokens": 20, "user": "bea"}
    best = http.post(CHAT, json={**asked, "best_of": 4})
    assert best.headers["X-Edged-Best-Of"] == "4"
    assert re.fullmatch("[a-c]{6}", content(best))
    assert "X-Edged-Best-Of" not in http.post(CHAT, json=asked).headers


def test_an_answer_that_follows_a_schema_is_never_edited(http: httpx2.Client) -> None:
    for number in range(3):
        answer = answered(http, "ferdinand", number)
        edit(http, answer, "Dear Ann, " + text_of(answer).strip())
    deadline = time.monotonic() + 30
    while "X-Edged-Edited" not in answered(http, "ferdinand", 9).headers:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    answer = answered(http, "ferdinand", 9, structured_outputs={"regex": "[a-c]{6}"})
    assert re.fullmatch("[a-c]{6}", text_of(answer))
    assert "X-Edged-Edited" not in answer.headers


def test_feedback_on_such_an_answer_is_learned_from(http: httpx2.Client) -> None:
    asked = {"messages": HELLO, "structured_outputs": {"choice": ["yes", "no"]}, "user": "gil", "n": 2, "max_tokens": 9}
    answer = http.post(CHAT, json={**asked, "seed": 3}).json()
    texts = {choice["message"]["content"] for choice in answer["choices"]}
    assert texts <= {"yes", "no"}
    body = {"completion_id": answer["id"], "signal": "edit", "choice": 0, "text": "maybe"}
    assert http.post("/v1/feedback", json=body).status_code == 200


def test_a_client_that_leaves_takes_its_answer_along(http: httpx2.Client, daemon: LiveDaemon) -> None:
    asked = {"messages": HELLO, "structured_outputs": {"regex": "[a-z]+"}, "max_tokens": 300, "stream": True}
    bias = {"2": -100.0}
    with http.stream("POST", CHAT, json={**asked, "logit_bias": bias}) as stream:
        assert any("content" in line for line in stream.iter_lines())
    assert daemon.idle()


def test_a_grammar_that_takes_too_long_is_the_callers_error(http: httpx2.Client) -> None:
    slow = {"grammar": 'start: (x y)*\nx: x x | "a"\ny: y y | "a"'}
    asked = {"messages": HELLO, "structured_outputs": slow, "max_tokens": 400, "logit_bias": {"2": -100.0}}
    answer = http.post(CHAT, json=asked)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "grammar_failed"
    assert answer.json()["error"]["param"] == "structured_outputs.grammar"


def test_what_recurses_deeply_is_compiled_or_refused_and_does_no_harm(http: httpx2.Client) -> None:
    names = [f"{number:x}" for number in range(1700)]
    parts = {name: {"items": {"$ref": f"#/{after}"}} for name, after in pairwise(names)}
    rules = [f"r{number}: r{number + 1}" for number in range(4500)]
    chains: list[dict[str, Any]] = [
        {"json": {"$ref": "#/0", **parts, names[-1]: {"type": "integer"}}},
        {"grammar": "\n".join(["start: r0", *rules, 'r4500: "a"'])},
    ]
    for chain in chains:
        assert len(json.dumps(chain)) < 64 << 10
        assert (
            http.post(CHAT, json={"messages": HELLO, "structured_outputs": chain, "max_tokens": 4}).status_code == 200
        )
