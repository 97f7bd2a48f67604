"""`POST /v1/responses`: the official client's, with tools, schemas, streams and feedback."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.api.live import LiveDaemon, running
from tests.api.test_structured_outputs import Mood
from tests.api.test_tools import AFTER, ASKED, CITIES, QWEN3, SAID, SCRIPT, THOUGHT, WEATHER, exported
from tests.scripted import save_scripted

ROUTE = "/v1/responses"
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
TOOL: Any = {"type": "function", **WEATHER["function"]}
QUESTION = ASKED["content"]
MODEL = "tiny"


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveDaemon]:
    root = tmp_path_factory.mktemp("responses")
    save_scripted(root / "qwen", QWEN3.read_text(), SCRIPT, AFTER)
    with running(root / "run", root / "qwen") as live:
        yield live


@pytest.fixture
def qwen(live: LiveDaemon) -> Iterator[openai.OpenAI]:
    with live.openai() as client:
        yield client


def outputs(calls: Any) -> list[Any]:
    return [{"type": "function_call_output", "call_id": call.call_id, "output": "23 degrees"} for call in calls]


def calls_of(response: Response) -> list[Any]:
    return [item for item in response.output if item.type == "function_call"]


def events_of(http: httpx2.Client, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream, each as OpenAI's types have it, and named as its line says."""
    found = []
    for event in http.post(ROUTE, json={**body, "stream": True}).text.strip().split("\n\n"):
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
        EVENT.validate_python(found[-1])
    assert [event["sequence_number"] for event in found] == [*range(len(found))]
    return found


def unnamed(items: Any) -> Any:
    """Items of an answer without ids, which are never the same."""
    items = [item if isinstance(item, dict) else item.model_dump() for item in items]
    return [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in items]


def test_a_model_calls_functions_and_answers_with_what_they_gave(qwen: openai.OpenAI) -> None:
    asked: Any = {"model": "qwen", "tools": [TOOL], "instructions": "Be brief."}
    first = qwen.responses.create(input=QUESTION, **asked)
    Response.model_validate(first.model_dump(mode="json"))
    assert [item.type for item in first.output] == ["reasoning", "message", "function_call", "function_call"]
    assert first.output[0].content[0].text == THOUGHT
    assert (first.output_text, first.status, first.store) == (SAID, "completed", False)
    assert [json.loads(call.arguments) for call in calls_of(first)] == CITIES
    assert first.usage.output_tokens_details.reasoning_tokens > 3
    turns: Any = [{"role": "user", "content": QUESTION}, *first.output, *outputs(calls_of(first))]
    second = qwen.responses.create(input=turns, **asked)
    assert second.output_text == AFTER
    assert second.usage.input_tokens_details.cached_tokens > first.usage.input_tokens, "it is the chat that was served"


def test_every_event_of_a_stream_is_one_that_the_client_knows(live: LiveDaemon, qwen: openai.OpenAI) -> None:
    with live.http() as http:
        events = events_of(http, {"input": QUESTION, "tools": [TOOL]})
        whole = http.post(ROUTE, json={"input": QUESTION, "tools": [TOOL]}).json()
    kinds = [event["type"].removeprefix("response.") for event in events]
    item = ["output_item.added", "content_part.added", "TEXT.delta", "TEXT.done", "content_part.done"]
    call = ["function_call_arguments.delta", "function_call_arguments.done"]
    assert [*dict.fromkeys(kinds[: kinds.index("output_item.done")])] == [
        *("created", "in_progress"),
        *(kind.replace("TEXT", "reasoning_text") for kind in item),
    ]
    assert [kind for kind in kinds if "call" in kind] == [*call, *call]
    assert kinds[-1] == "completed"
    assert unnamed(events[-1]["response"]["output"]) == unnamed(whole["output"])
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"]
    for name, text in (("reasoning_text", THOUGHT), ("output_text", SAID)):
        assert "".join(event["delta"] for event in events if event["type"] == f"response.{name}.delta") == text
    with qwen.responses.stream(model="qwen", input=QUESTION, tools=[TOOL]) as stream:
        assert {event.type.removeprefix("response.") for event in stream} == {*kinds}
        final = stream.get_final_response()
    assert [call.parsed_arguments or json.loads(call.arguments) for call in calls_of(final)] == CITIES


@pytest.mark.parametrize("most", [3, 9])
def test_an_answer_that_is_cut_is_incomplete(live: LiveDaemon, most: int) -> None:
    with live.http() as http:
        asked = {"input": QUESTION, "max_output_tokens": most}
        events, whole = events_of(http, asked), http.post(ROUTE, json=asked).json()
    assert (whole["status"], whole["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert whole["output"][-1]["status"] == "incomplete"
    assert whole["usage"]["output_tokens"] == most
    assert events[-1]["type"] == "response.incomplete"
    assert unnamed(events[-1]["response"]["output"]) == unnamed(whole["output"])


def test_reasoning_and_other_turns_reach_the_chat_as_they_were(live: LiveDaemon) -> None:
    call = {"function": {"name": "weather", "arguments": '{"city": "Rome"}'}, "id": "c"}
    chat = [
        {"role": "system", "content": "Be brief.\n\nIn English."},
        ASKED,
        {"role": "assistant", "content": SAID, "reasoning_content": THOUGHT, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "23\ndegrees"},
    ]
    parts = [{"type": "output_text", "text": each, "annotations": []} for each in ("23", "degrees")]
    items = [
        {"role": "developer", "content": [{"type": "input_text", "text": "In English."}]},
        {"type": "message", "role": "user", "content": QUESTION},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": THOUGHT}]},
        {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed", "content": SAID},
        {"type": "function_call", "id": "fc_1", "call_id": "c", **call["function"]},  # type: ignore[dict-item]
        {"type": "function_call_output", "call_id": "c", "output": parts},
    ]
    with live.http() as http:
        theirs = http.post("/v1/chat/completions", json={"messages": chat, "tools": [WEATHER]}).json()
        ours = http.post(ROUTE, json={"instructions": "Be brief.", "input": items, "tools": [TOOL]}).json()
        assert ours["usage"]["input_tokens"] == theirs["usage"]["prompt_tokens"]
        assert ours["usage"]["input_tokens_details"]["cached_tokens"] >= theirs["usage"]["prompt_tokens"] - 16
        usual = http.post(ROUTE, json={"input": QUESTION}).json()
        effort = http.post(ROUTE, json={"input": QUESTION, "reasoning": {"effort": "none"}}).json()
    assert effort["reasoning"]["effort"] == "none"
    assert effort["usage"]["input_tokens"] > usual["usage"]["input_tokens"], "the template ends the reasoning itself"


def test_an_answer_follows_a_schema(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "input": "How was your day?", "text_format": Mood, "max_output_tokens": 200}
    parsed = client.responses.parse(**asked, extra_body={"seed": 5}).output_parsed
    assert isinstance(parsed, Mood)
    with client.responses.stream(**asked, extra_body={"seed": 5}) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_parsed == parsed


def test_log_probabilities_are_those_of_the_text(http: httpx2.Client, live: LiveDaemon) -> None:
    asked = {"input": "Hello", "top_logprobs": 2, "max_output_tokens": 8, "seed": 1}
    whole = http.post(ROUTE, json=asked).json()["output"][0]["content"][0]
    deltas = [each for each in events_of(http, asked) if each["type"] == "response.output_text.delta"]
    assert [entry for each in deltas for entry in each["logprobs"]] == whole["logprobs"]
    chat = {"messages": [{"role": "user", "content": "Hello"}], "logprobs": True, "max_tokens": 8, "seed": 1}
    theirs = http.post("/v1/chat/completions", json={**chat, "top_logprobs": 2}).json()["choices"][0]
    assert whole["logprobs"] == theirs["logprobs"]["content"]
    assert {len(entry["top_logprobs"]) for entry in whole["logprobs"]} == {2}
    with live.http() as other:
        body = {"input": QUESTION, "tools": [TOOL], "include": ["message.output_text.logprobs"]}
        said = other.post(ROUTE, json=body).json()["output"][1]["content"][0]
    assert "".join(entry["token"] for entry in said["logprobs"]).startswith("\n\n" + SAID)


def test_feedback_names_a_response(http: httpx2.Client) -> None:
    def ask(seed: int) -> str:
        body = {"input": "Name a city", "user": "resa", "max_output_tokens": 6, "seed": seed}
        name: str = http.post(ROUTE, json=body).json()["id"]
        assert name.startswith("resp_")
        return name

    def teach(name: str, signal: str, **more: Any) -> None:
        body = {"completion_id": name, "signal": signal, **more}
        taken = http.post("/v1/feedback", json=body)
        assert taken.status_code == 200, taken.text

    teach(ask(1), "up")
    teach(ask(2), "down")
    teach(ask(3), "edit", text="Rome")
    assert {pair["source"] for pair in exported(http, "resa")} >= {"edit"}
    assert [pair["chosen"] for pair in exported(http, "resa") if pair["source"] == "edit"] == ["Rome"]
    turns = [{"role": "user", "content": "Name a city"}]
    assert exported(http, "resa")[-1]["messages"] == turns
    two = {"messages": turns, "user": "resa", "n": 2, "max_tokens": 6}
    teach(http.post("/v1/chat/completions", json=two).json()["id"], "chosen", choice=1)


def test_what_has_no_effect_is_told(http: httpx2.Client) -> None:
    body = {
        "input": "Hello",
        "max_output_tokens": 2,
        "store": False,
        "text": {"verbosity": "low"},
        "reasoning": {"summary": "auto"},
        "include": ["reasoning.encrypted_content"],
        "tools": [{"type": "web_search"}, {"type": "custom", "name": "patch"}],
        "truncation": "auto",
    }
    answer = http.post(ROUTE, json=body)
    assert answer.status_code == 200, answer.text
    told = set(answer.headers["X-Edged-Ignored"].split(", "))
    wanted = {"text.verbosity", "reasoning.summary", "include", "tools.web_search", "tools.custom", "truncation"}
    assert told == wanted
    assert answer.json()["tools"] == []
    quiet = http.post(ROUTE, json={"input": "Hello", "max_output_tokens": 2, "text": {}, "include": [], "tools": []})
    assert "X-Edged-Ignored" not in quiet.headers


LONG = {"type": "json_schema", "name": "a", "strict": True, "schema": {"type": "array", "uniqueItems": True}}


@pytest.mark.parametrize(
    ("param", "body"),
    [
        ("previous_response_id", {"previous_response_id": "resp_1"}),
        ("conversation", {"conversation": {"id": "conv_1"}}),
        ("background", {"background": True}),
        ("store", {"store": True}),
        ("prompt", {"prompt": {"id": "p"}}),
        ("n", {"n": 2}),
        ("response_format", {"response_format": {"type": "json_object"}}),
        ("max_output_tokens", {"max_output_tokens": 0}),
        ("input", {"input": []}),
        ("input", {"input": "x" * 9000}),
        ("input.0", {"input": [{"type": "item_reference", "id": "msg_1"}]}),
        ("input.0.content.0", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}),
        ("input.0.arguments", {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "[1]"}]}),
        ("tools.0.name", {"tools": [{"type": "function"}]}),
        ("tool_choice", {"tool_choice": {"type": "web_search"}}),
        ("text.format.schema", {"text": {"format": LONG}}),
        ("text.format.schema", {"text": {"format": {"type": "json_schema", "name": "a"}}}),
        ("model", {"model": "other"}),
        ("user", {"user": "a b"}),
    ],
    ids=lambda value: str(value)[:40],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_had_is_refused_by_name(
    http: httpx2.Client, param: str, body: dict[str, Any], stream: bool
) -> None:
    refused = http.post(ROUTE, json={"input": "Hello", "stream": stream, **body})
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (404 if param == "model" else 400, param)
    assert "messages" not in error["message"].partition(" holds ")[0]
    assert "response_format.json" not in error["message"]
