"""What cannot be served is refused in OpenAI's shape, names what is wrong, and does not disturb the daemon."""

from __future__ import annotations

import gzip
import json
import time
import zlib
from typing import Any

import httpx2
import openai
import pytest

from tests.api.live import LiveDaemon

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
SCHEMA = "response_format.json_schema.schema"
ENDLESS = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
DEEP = json.loads('{"items":' * 300 + "{}" + "}" * 300)
HELLO = {"messages": [{"role": "user", "content": "hello"}]}


def refused(response: httpx2.Response, status: int) -> dict[str, Any]:
    """The error object of a response that must have this status."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "Traceback" not in response.text
    return error


@pytest.fixture(autouse=True)
def still_serving(daemon: LiveDaemon) -> Any:
    yield
    with daemon.http() as http:
        assert http.post(CHAT, json={**HELLO, "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b'"text"', b"\xff\xfe", b'{"messages": NaN}', b"[" * 100_000, b'{"n": ' + b"9" * 5000 + b"}",
     b'{"model": "\\ud800"}', b'{"prompt": "a", "x": [' + b"[]," * 40_000 + b"[]]}",
     '{"prompt": "a"}'.encode("utf-16")],
    ids=["empty", "cut", "list", "string", "not utf-8", "nan", "deep", "long number", "half a surrogate pair",
         "forty thousand lists", "utf-16"],
)  # fmt: skip
@pytest.mark.parametrize("path", [CHAT, TEXT, "/v1/feedback"])
def test_a_body_that_is_no_json_object_is_refused(http: httpx2.Client, path: str, body: bytes) -> None:
    error = refused(http.post(path, content=body), 400)
    assert error["code"] == "malformed_json"
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("messages", [], "messages"),
        ("messages", "hello", "messages"),
        ("messages", None, "messages"),
        ("messages", [{"role": "user"}], "messages.0.content"),
        ("messages", [{"role": "robot", "content": "x"}], "messages.0.role"),
        ("messages", [{"role": "user", "content": 3}], "messages.0.content"),
        ("messages", [{"role": "user", "content": [{"type": "image_url"}]}], "messages.0.content.0"),
        ("max_tokens", "12", "max_tokens"),
        ("max_tokens", -2, "max_tokens"),
        ("max_tokens", 0, "max_tokens"),
        ("max_tokens", 1.5, "max_tokens"),
        ("max_tokens", True, "max_tokens"),
        ("temperature", -0.1, "temperature"),
        ("temperature", 1e300, "temperature"),
        ("temperature", "hot", "temperature"),
        ("top_p", 1.01, "top_p"),
        ("top_k", -2, "top_k"),
        ("min_p", 2, "min_p"),
        ("repetition_penalty", 0, "repetition_penalty"),
        ("repetition_penalty", 1e-45, "repetition_penalty"),
        ("presence_penalty", 2.5, "presence_penalty"),
        ("frequency_penalty", -9, "frequency_penalty"),
        ("response_format", {"type": "xml"}, "response_format.type"),
        ("response_format", {"type": "json_schema"}, "response_format"),
        ("response_format", {"type": "json_schema", "json_schema": {"schema": []}}, SCHEMA),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "x"}}, SCHEMA),
        ("response_format", {"type": "json_schema", "json_schema": {"schema": {"type": "text"}}}, SCHEMA),
        ("response_format", {"type": "json_schema", "json_schema": {"schema": ENDLESS}}, SCHEMA),
        ("response_format", {"type": "json_schema", "json_schema": {"schema": DEEP}}, SCHEMA),
        ("response_format", {"type": "json_object", "schema": {"enum": []}}, "response_format"),
        ("structured_outputs", {}, "structured_outputs"),
        ("structured_outputs", {"regex": "a", "choice": ["b"]}, "structured_outputs"),
        ("structured_outputs", {"choice": []}, "structured_outputs.choice"),
        ("structured_outputs", {"regex": "a", "backend": "x"}, "structured_outputs.backend"),
        ("structured_outputs", {"json": "{"}, "structured_outputs.json"),
        ("structured_outputs", {"json": "[" * 60_000}, "structured_outputs.json"),
        ("structured_outputs", {"regex": "("}, "structured_outputs.regex"),
        ("structured_outputs", {"regex": "(?=a)b"}, "structured_outputs.regex"),
        ("structured_outputs", {"regex": "(" * 30_000}, "structured_outputs.regex"),
        ("structured_outputs", {"regex": "a" * 70_000}, "structured_outputs.regex"),
        ("structured_outputs", {"grammar": "start: x"}, "structured_outputs.grammar"),
        ("structured_outputs", {"grammar": 'start: "a" start'}, "structured_outputs.grammar"),
        ("structured_outputs", {"grammar": 'root ::= "a" root'}, "structured_outputs.grammar"),
        ("structured_outputs", {"grammar": "start: " + "(" * 30_000}, "structured_outputs.grammar"),
        ("structured_outputs", {"choice": ["yes", "</s>"]}, "structured_outputs.choice"),
        ("structured_outputs", {"regex": r"a<\/s>"}, "structured_outputs.regex"),
        ("structured_outputs", {"json": {"const": "a</s>"}}, "structured_outputs.json"),
        ("response_format", {"type": "json_object", "schema": {"properties": {"</s>": {}}}}, "response_format"),
        ("guided_json", {"type": "object"}, "guided_json"),
        ("guided_json", {}, "guided_json"),
        ("grammar", 'root ::= "a"', "grammar"),
        ("n", 0, "n"),
        ("n", 10**9, "n"),
        ("seed", 2**70, "seed"),
        ("stop", "", "stop"),
        ("stop", ["a"] * 17, "stop"),
        ("stop", "x" * 10_000, "stop"),
        ("stop", [1], "stop.0"),
        ("stop_token_ids", [259], "stop_token_ids"),
        ("logit_bias", {"259": 1.0}, "logit_bias"),
        ("logit_bias", {"a": 1.0}, "logit_bias"),
        ("logit_bias", {"5": 200.0}, "logit_bias.5"),
        ("top_logprobs", 2, "top_logprobs"),
        ("user", "../../etc/passwd", "user"),
        ("user", "x" * 65, "user"),
        ("user", "a b", "user"),
        ("user", 7, "user"),
        ("stream", "yes", "stream"),
        ("stream_options", {"include_usage": True}, "stream_options"),
        ("tools", [{"type": "function"}], "tools.0.function"),
        ("tools", 5, "tools"),
        ("tool_choice", "sometimes", "tool_choice"),
        ("tool_choice", {"type": "function"}, "tool_choice.function"),
        ("tool_choice", "required", "tool_choice"),
        ("functions", [{"name": "a"}], "functions"),
        ("continue_final_message", True, "continue_final_message"),
        ("modalities", ["text", "audio"], "modalities.1"),
        ("best_of", 17, "best_of"),
        ("chat_template_kwargs", {"tokenize": False}, "chat_template_kwargs"),
    ],
)
def test_a_bad_field_of_a_chat_is_named(http: httpx2.Client, field: str, value: Any, param: str | None) -> None:
    data = json.dumps({**HELLO, field: value}).encode()
    error = refused(http.post(CHAT, content=data), 400)
    assert error["param"] == param
    assert error["message"]


@pytest.mark.parametrize(
    ("keyword", "schema"),
    [
        ("not", {"not": {"type": "string"}}),
        ("if", {"if": {"type": "string"}, "then": {"maxLength": 2}}),
        ("uniqueItems", {"type": "array", "uniqueItems": True}),
        ("oneOf", {"oneOf": [{"type": "integer"}, {"type": "number"}]}),
        ("format", {"type": "string", "format": "regex"}),
        ("pattern", {"type": "string", "pattern": "^(?!a)"}),
    ],
)
def test_a_keyword_that_cannot_be_kept_is_named_where_the_schema_is_strict(
    http: httpx2.Client, keyword: str, schema: dict[str, Any]
) -> None:
    def asked(strict: bool) -> dict[str, Any]:
        format_ = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": strict}}
        return {**HELLO, "max_tokens": 2, "response_format": format_}

    error = refused(http.post(CHAT, json=asked(True)), 400)
    assert error["param"] == SCHEMA
    assert f'"{keyword}"' in error["message"]
    answer = http.post(CHAT, json=asked(False))
    assert answer.status_code == 200, answer.text
    assert keyword in answer.headers["X-Edged-Ignored-Keywords"].split(", ")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_object"}}, "structured_outputs"),
        ({"ignore_eos": True}, "ignore_eos"),
        ({"min_tokens": 3}, "min_tokens"),
    ],
)
def test_what_does_not_go_with_a_grammar_is_named(http: httpx2.Client, fields: dict[str, Any], param: str) -> None:
    asked = {**HELLO, "max_tokens": 9, "structured_outputs": {"regex": "[a-z]{3}"}}
    assert refused(http.post(CHAT, json={**asked, **fields}), 400)["param"] == param
    neutral = {"response_format": {"type": "text"}, "ignore_eos": False, "min_tokens": 0}
    assert len(http.post(CHAT, json={**asked, **neutral}).json()["choices"][0]["message"]["content"]) == 3


@pytest.mark.parametrize(
    "change",
    [
        {"prompt": ""},
        {"prompt": []},
        {"prompt": ["a", "b"], "stream": True},
        {"prompt": [1, "a"]},
        {"prompt": [259]},
        {"prompt": [-1]},
        {"prompt": 5},
        {"prompt": "a", "echo": True, "stream": True},
        {"prompt": "a", "best_of": 4, "n": 5},
        {"prompt": "a", "logprobs": 21},
        {"prompt": "a", "logprobs": 20, "n": 128, "max_tokens": 100},
        {"prompt": "a", "min_tokens": 9, "max_tokens": 8},
        {},
    ],
)
def test_a_bad_text_completion_is_refused(http: httpx2.Client, change: dict[str, Any]) -> None:
    refused(http.post(TEXT, content=json.dumps(change).encode()), 400)


@pytest.mark.parametrize("model", ["gpt-4", "tiny2", "tiny:", "tiny:../x", "tiny:a b"])
def test_an_unknown_model_is_not_found(http: httpx2.Client, model: str) -> None:
    error = refused(http.post(CHAT, content=json.dumps({**HELLO, "model": model}).encode()), 404)
    assert error["code"] == "model_not_found"


def test_the_official_client_raises_its_own_exceptions(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.chat.completions.create(model="nope", messages=[{"role": "user", "content": "x"}])
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x"}], max_tokens=-5)


@pytest.mark.parametrize("characters", [513, 100_000])
def test_a_prompt_longer_than_the_context_is_refused(http: httpx2.Client, characters: int) -> None:
    error = refused(http.post(CHAT, json={"messages": [{"role": "user", "content": "x" * characters}]}), 400)
    assert error["code"] == "context_length_exceeded"
    assert "512 tokens" in error["message"]
    assert refused(http.post(TEXT, json={"prompt": "x" * characters}), 400)["param"] == "prompt"


def test_the_longest_prompt_that_fits_gets_its_one_token(http: httpx2.Client) -> None:
    answer = http.post(TEXT, json={"prompt": "x" * 511, "max_tokens": 50, "ignore_eos": True})
    assert answer.json()["usage"]["completion_tokens"] == 1


def test_a_body_over_the_limit_is_refused(http: httpx2.Client) -> None:
    assert refused(http.post(CHAT, json={"prompt": "x" * 300_000}), 413)["code"] == "body_too_large"


def test_unknown_urls_and_methods_are_told_apart(http: httpx2.Client) -> None:
    unknown = refused(http.get("/v2/nothing"), 404)
    assert (unknown["code"], unknown["message"][:29]) == ("unknown_url", "GET /v2/nothing: no such URL;")
    response = http.get(CHAT)
    error = refused(response, 405)
    assert (error["code"], error["message"]) == ("method_not_allowed", f"GET {CHAT}: this URL takes POST")
    assert "takes GET, HEAD" in refused(http.put("/v1/status"), 405)["message"]
    assert response.headers["Allow"] == "POST"


def test_bytes_that_are_not_http_do_no_harm(daemon: LiveDaemon) -> None:
    assert b"400" in daemon.send(b"\x00\x01\x02 nonsense\r\n\r\n", wait_for=b"400")
    daemon.send(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")


def test_a_body_that_cannot_be_decoded_is_told_so(http: httpx2.Client) -> None:
    response = http.post(CHAT, content=b"\x0b\x02\x80{}\x03", headers={"Content-Encoding": "br"})
    assert refused(response, 415)["code"] == "unknown_encoding"


PACKED = {"gzip": gzip.compress, "deflate": zlib.compress}


@pytest.mark.parametrize("encoding", PACKED)
def test_a_packed_body_is_read_like_a_plain_one(http: httpx2.Client, encoding: str) -> None:
    def post(content: bytes) -> httpx2.Response:
        return http.post(CHAT, content=content, headers={"Content-Encoding": encoding})

    body = json.dumps({**HELLO, "max_tokens": 1}).encode()
    packed = PACKED[encoding](body)
    assert post(packed).json()["usage"]["completion_tokens"] == 1
    for wrong in (body, packed[:-5], b""):
        assert refused(post(wrong), 400)["code"] == "bad_encoding"
    told = refused(post(PACKED[encoding](b'{"prompt": "' + b"x" * 30_000_000 + b'"}')), 413)
    assert (told["code"], "unpacked" in told["message"]) == ("body_too_large", True)


def test_a_refusal_in_parts_is_text(http: httpx2.Client) -> None:
    parts = [{"type": "refusal", "refusal": "I must not."}]
    messages = [*HELLO["messages"], {"role": "assistant", "content": parts}, *HELLO["messages"]]
    assert http.post(CHAT, json={"messages": messages, "max_tokens": 1}).status_code == 200


def test_unknown_and_ignored_fields_do_not_matter(http: httpx2.Client) -> None:
    extra = {
        "metadata": {"a": "b"},
        "store": True,
        "service_tier": "auto",
        "tools": [],
        "tool_choice": "none",
        "new": 1,
    }
    assert http.post(CHAT, json={**HELLO, **extra, "max_tokens": 1}).status_code == 200


def test_special_tokens_and_nul_in_a_message_are_text(http: httpx2.Client) -> None:
    messages = [{"role": "user", "content": "\x00</s><s> \U0001f600"}]
    assert http.post(CHAT, json={"messages": messages, "max_tokens": 2, "user": "odd"}).status_code == 200


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 2.0, "seed": 1.0, "n": 1.0, "top_k": 40.0, "min_tokens": 1.0, "logit_bias": {"65": 100.0}},
        {"max_tokens": -1, "stop": "a", "logit_bias": {"97": 100}},
        {"max_completion_tokens": -1.0, "stop": "a", "logit_bias": {"97": 100}},
        {"max_tokens": 2, "user": ""},
        {"max_tokens": 2, "model": "tiny:latest"},
    ],
)
def test_what_other_servers_take_is_taken(http: httpx2.Client, fields: dict[str, Any]) -> None:
    answer = http.post(CHAT, content=json.dumps({**HELLO, **fields}).encode())
    assert answer.status_code == 200, answer.text
    assert answer.json()["system_fingerprint"] == "base"
    assert "X-Edged-Adapter" not in answer.headers


def test_no_bound_is_the_contexts(http: httpx2.Client) -> None:
    asked = {"prompt": "x" * 500, "max_tokens": -1, "ignore_eos": True, "logit_bias": {"97": 100}}
    assert http.post(TEXT, json=asked).json()["usage"]["total_tokens"] == 512


def test_ollamas_name_of_the_base_model_is_the_base_model(http: httpx2.Client) -> None:
    assert http.get("/v1/models/tiny:latest").json()["id"] == "tiny"
    answer = http.post(CHAT, json={**HELLO, "max_tokens": 1, "model": "tiny:latest"})
    assert answer.json()["model"] == "tiny"
    pair = {"user": "latest", "prompt": "a", "chosen": "b", "rejected": "c"}
    assert http.post("/v1/feedback", json=pair).status_code == 200
    deadline = time.monotonic() + 60
    while http.get("/v1/models/tiny:latest").json()["adapter"] != "latest":
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert http.delete("/v1/adapters/latest").status_code == 200
    assert http.get("/v1/models/tiny:latest").json()["adapter"] is None


def test_free_text_in_metadata_is_said_to_be_ignored(http: httpx2.Client) -> None:
    metadata = {"application": "My App", "run": "a run\n", "trace": "any text, as other programs write it"}
    answer = http.post(CHAT, json={**HELLO, "max_tokens": 1, "metadata": metadata, "store": True})
    assert answer.status_code == 200, answer.text
    assert answer.headers["X-Edged-Ignored"] == "store, metadata.application, metadata.run"
    assert "My App" not in http.get("/v1/applications").text
