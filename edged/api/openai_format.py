"""OpenAI's response objects as JSON-ready dicts."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from aiohttp import web
from pydantic import BaseModel

from edged.api.generation import Ask, ChoiceText, Generation, TokenLogprob
from edged.api.limits import Remaining
from edged.scheduler.task import ServiceClass
from edged.text.tokenizer import Tokenizer

Json = dict[str, Any]
_LONG_LIST = 256
"""Longer ones are those of tokens, each of which is one piece."""


def dumps(value: Any) -> str:
    """Compact JSON; numbers that JSON cannot say (infinite, not a number) become null."""
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False)
    except ValueError:
        return json.dumps(_finite(value), separators=(",", ":"))


def dumps_piecewise(value: Any) -> str:
    """As `dumps`, in many short calls: on a thread of its own it lets the event loop go on."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{dumps(key)}:{dumps_piecewise(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        dump = dumps if len(value) > _LONG_LIST else dumps_piecewise
        return "[" + ",".join(map(dump, value)) + "]"
    return dumps(value)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


def json_answer(value: BaseModel | Json, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    """A model or a JSON object as a whole answer."""
    body = value.model_dump() if isinstance(value, BaseModel) else value
    return web.json_response(body, status=status, headers=headers, dumps=dumps)


def server_event(value: Json) -> bytes:
    """One server-sent event."""
    return f"data: {dumps(value)}\n\n".encode()


def rate_headers(remaining: Mapping[str, Remaining]) -> dict[str, str]:
    """What is left of a user's limits, in OpenAI's headers."""
    headers: dict[str, str] = {}
    for name, rate in remaining.items():
        headers[f"x-ratelimit-limit-{name}"] = str(rate.limit)
        headers[f"x-ratelimit-remaining-{name}"] = str(rate.left)
        headers[f"x-ratelimit-reset-{name}"] = f"{rate.reset_s:.3f}s"
    return headers


STREAM_END = b"data: [DONE]\n\n"


def usage(generation: Generation) -> Json:
    """Token counts over all choices; the prompt counts once."""
    prompt = len(generation.ask.prompt_ids)
    output = sum(len(answer.token_ids) for answer in generation.answers)
    cached = generation.answers[0].finish.cached_tokens if generation.answers[0].finish else 0
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def fingerprint(generation: Generation) -> str:
    """Which weights answered: `ADAPTER@VERSION`, or `base` where no adapter had learned anything."""
    version = generation.version
    return f"{generation.ask.adapter}@{version}" if version else "base"


def full(generation: Generation, codec: Tokenizer) -> Json:
    """The response of a request that does not stream."""
    ask = generation.ask
    return {
        **_head(ask, ask.object),
        "system_fingerprint": fingerprint(generation),
        "service_tier": "flex" if ask.service is ServiceClass.BATCH else "default",
        "choices": [_full_choice(ask, answer, codec) for answer in generation.answers],
        "usage": usage(generation),
    }


def chunks(generation: Generation, answer: ChoiceText, codec: Tokenizer) -> list[Json]:
    """What is new of one choice, as chunks of a stream.

    Its end has one of its own, without text: clients stop reading there.
    """
    ask, text, logprobs = generation.ask, answer.take_text(), answer.take_logprobs()
    chat, first = ask.messages is not None, not answer.announced
    choices: list[Json] = []
    if text or logprobs or first:
        answer.announced = True
        said = ({"role": "assistant"} if first else {}) | ({"content": text} if text or first else {})
        told = _logprobs(ask, logprobs, codec) if logprobs else None
        choices.append({**({"delta": said} if chat else {"text": text}), "logprobs": told, "finish_reason": None})
    if answer.finish is not None:
        end: Json = {"delta": {}} if chat else {"text": ""}
        choices.append({**end, "logprobs": None, "finish_reason": answer.reason})
    head = _head(ask, _chunk_object(ask))
    return [{**head, "choices": [{"index": answer.index, **choice}]} for choice in choices]


def usage_chunk(generation: Generation) -> Json:
    """The last chunk of a stream that asked for usage."""
    ask = generation.ask
    return {
        **_head(ask, _chunk_object(ask)),
        "system_fingerprint": fingerprint(generation),
        "choices": [],
        "usage": usage(generation),
    }


def _chunk_object(ask: Ask) -> str:
    return "chat.completion.chunk" if ask.object == "chat.completion" else ask.object


def _head(ask: Ask, kind: str) -> Json:
    return {"id": ask.completion_id, "object": kind, "created": ask.created_s, "model": ask.model}


def _full_choice(ask: Ask, answer: ChoiceText, codec: Tokenizer) -> Json:
    message = {"role": "assistant", "content": answer.text, "refusal": None}
    logprobs = answer.take_logprobs()
    return {
        "index": answer.index,
        **({"text": answer.text} if ask.messages is None else {"message": message}),
        "logprobs": None if ask.sampling.logprobs is None else _logprobs(ask, logprobs, codec),
        "finish_reason": answer.reason,
    }


def _logprobs(ask: Ask, entries: Sequence[TokenLogprob], codec: Tokenizer) -> Json:
    return (text_logprobs if ask.messages is None else chat_logprobs)(entries, codec)


def chat_logprobs(entries: Sequence[TokenLogprob], codec: Tokenizer) -> Json:
    """Log-probabilities (natural logarithm) in the chat shape, with the bytes of each token."""

    def token(token_id: int, logprob: float) -> Json:
        data = codec.token_bytes(token_id)
        return {"token": data.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(data)}

    return {
        "content": [
            {**token(entry.token_id, entry.logprob), "top_logprobs": [token(*other) for other in entry.top]}
            for entry in entries
        ],
        "refusal": None,
    }


def text_logprobs(entries: Sequence[TokenLogprob], codec: Tokenizer) -> Json:
    """Log-probabilities (natural logarithm) in the older shape: four parallel lists."""
    return {
        "tokens": [codec.token_text(entry.token_id) for entry in entries],
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": [{codec.token_text(other): value for other, value in entry.top} for entry in entries],
        "text_offset": [entry.offset for entry in entries],
    }
