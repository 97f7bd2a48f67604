"""Bodies as clients send them, of a chat with tools: each first one is answered with calls, each later one with text.

Those with a schema are answered with JSON of that schema. `client_bodies.json` has what openai-agents 0.24,
langchain-openai 1.7, llm 0.36, pydantic-ai 2.68, litellm 1.110, llama-index-llms-openai-like 0.8, smolagents 1.26,
instructor 1.17, npm's openai 6.49 and ai 6.0 sent while `tests/integrations` ran them, and bodies in the form of Home
Assistant's llama_cpp integration.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import jsonschema
import pytest

from tests.api.live import running
from tests.api.test_tools import AFTER, CITIES, QWEN3, SAID, SCRIPT, arguments_of
from tests.scripted import save_scripted

BODIES: dict[str, Any] = json.loads((Path(__file__).parent / "client_bodies.json").read_text())


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx2.Client]:
    root = tmp_path_factory.mktemp("bodies")
    save_scripted(root / "qwen", QWEN3.read_text(), SCRIPT, AFTER, context=32768)
    with running(root / "run", root / "qwen") as live, live.http() as http:
        yield http


def of_response(answer: httpx2.Response, stream: bool) -> tuple[str, list[Any], str]:
    """The same of the Responses API."""
    assert answer.status_code == 200, answer.text
    last = answer.text.rstrip().rpartition("\ndata: ")[2]
    response = json.loads(last)["response"] if stream else answer.json()
    items = response["output"]
    calls = [json.loads(item["arguments"]) for item in items if item["type"] == "function_call"]
    texts = [part["text"] for item in items if item["type"] == "message" for part in item["content"]]
    assert response["status"] == "completed"
    return "".join(texts), calls, "tool_calls" if calls else "stop"


def said(answer: httpx2.Response, stream: bool) -> tuple[str, list[Any], str]:
    """Content, arguments of calls and finish reason."""
    assert answer.status_code == 200, answer.text
    if not stream:
        choice = answer.json()["choices"][0]
        message = choice["message"]
        return message["content"] or "", arguments_of(message.get("tool_calls", ())), choice["finish_reason"]
    chunks = [json.loads(line.removeprefix("data: ")) for line in answer.text.split("\n\n")[:-2]]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    content = "".join(choice["delta"].get("content") or "" for choice in choices)
    calls = [each for choice in choices for each in choice["delta"].get("tool_calls", ())]
    return content, arguments_of(calls), choices[-1]["finish_reason"]


@pytest.mark.parametrize("name", BODIES)
def test_a_clients_chat_is_answered(http: httpx2.Client, name: str) -> None:
    body = BODIES[name]
    stream, turns = bool(body.get("stream")), body.get("messages") or body["input"]
    last = turns[-1] if isinstance(turns, list) else {"role": "user"}
    if "messages" in body:
        found = said(http.post("/v1/chat/completions", json=body), stream)
    else:
        found = of_response(http.post("/v1/responses", json=body), stream)
    if "setup" in name:
        assert found[1:] == ([], "length"), "a call that is cut is no error"
    elif isinstance(body.get("tool_choice"), dict):
        (tool,) = body["tools"]
        (call,) = found[1]
        jsonschema.validate(call, tool.get("function", tool)["parameters"])
    elif body.get("response_format") or body.get("text"):
        asked = body.get("response_format") or body["text"]["format"]
        jsonschema.validate(json.loads(found[0]), asked.get("json_schema", asked).get("schema", {"type": "object"}))
    elif body.get("tool_choice") == "required":
        assert found[2] == "tool_calls"
        assert found[1]
    elif not body.get("tools"):
        assert found[0], "smolagents asks for a last answer without tools"
    elif "tool" in last.get("role", "") or last.get("type") == "function_call_output":
        assert found == (AFTER, [], "stop")
    elif any(tool.get("function", tool).get("strict") for tool in body["tools"]):
        # What must come next is written in one way, and the script has another.
        assert (found[0], found[2]) == (SAID, "tool_calls")
        assert found[1]
        assert all(call in CITIES for call in found[1])
    else:
        assert found == (SAID, CITIES, "tool_calls")


def test_a_chat_with_twenty_eight_tools_is_answered(http: httpx2.Client) -> None:
    """Open WebUI sends as many with each chat, some 21 kB."""
    words = "Finds what the user saved before, by its words or its meaning, and returns the best of it with its place. "
    optional = {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None, "description": words}
    properties = {"query": {"type": "string", "description": words}, "count": optional}
    tools = [
        {
            "type": "function",
            "function": {
                "name": f"search_{number}",
                "description": 2 * words,
                "parameters": {"type": "object", "properties": properties, "required": ["query"]},
            },
        }
        for number in range(28)
    ]
    assert len(json.dumps(tools)) > 20_000
    messages = [{"role": "user", "content": "What did I write of Paris?"}]
    body = {"model": "qwen", "stream": True, "messages": messages, "tools": tools, "user": "ann"}
    assert said(http.post("/v1/chat/completions", json=body), True) == (SAID, CITIES, "tool_calls")
