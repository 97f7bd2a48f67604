"""`POST /v1/chat/completions` and `POST /v1/completions`."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from functools import partial
from typing import Any

from aiohttp import web

from edged.api import openai_format
from edged.api.access import Caller, caller_of
from edged.api.errors import as_api_error, bad_request
from edged.api.generation import Ask, Generation
from edged.api.models import check_tokens, split_model
from edged.api.request_log import name_request, note
from edged.api.requests import ChatRequest, CompletionRequest, read_body
from edged.api.services import Services, services_of
from edged.engine.sampling.params import Sampling

log = logging.getLogger("edged.api")

_THREAD_CHARS = 20_000
"""Texts from this size on are tokenized beside the event loop, so that they do not hold up other clients' tokens."""
_MESSAGE_CHARS = 64
"""What a message costs beside its text, in the template around it."""


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """An answer to a conversation."""
    services, caller = services_of(request), caller_of(request)
    body = await read_body(request, ChatRequest.checked)
    _demand(services, caller, body)
    messages = tuple(message.plain() for message in body.messages)
    chars = sum(_MESSAGE_CHARS + len(message["content"]) for message in messages)
    prompt_ids = await _tokenize(services.codec.render_chat, messages, chars)
    ask = _ask(services, caller, body, prompt_ids, "chatcmpl-", messages=messages)
    return await _answer(request, services, ask, body)


async def completions(request: web.Request) -> web.StreamResponse:
    """A continuation of a text."""
    services, caller = services_of(request), caller_of(request)
    body = await read_body(request, CompletionRequest.checked)
    _demand(services, caller, body)
    if isinstance(body.prompt, str):
        prompt_ids = await _tokenize(services.codec.encode_prompt, body.prompt, len(body.prompt))
        ask = _ask(services, caller, body, prompt_ids, "cmpl-", prompt=body.prompt)
    else:
        ids: list[Any] = body.prompt
        check_tokens(services, ids, "prompt")
        ask = _ask(services, caller, body, ids, "cmpl-")
    return await _answer(request, services, ask, body)


def _demand(services: Services, caller: Caller, body: ChatRequest | CompletionRequest) -> None:
    """What can be refused before the work of tokenizing. Raises ApiError, LimitReached."""
    caller.demand_user(body.user, split_model(services, body.model)[1])
    services.limits.demand(_tenant(services, caller, body), body.n or 1)


def _tenant(services: Services, caller: Caller, body: ChatRequest | CompletionRequest) -> str:
    """Whose share a request counts as."""
    return body.user or split_model(services, body.model)[1] or caller.tenant


async def _tokenize(encode: Any, content: Any, chars: int) -> list[int]:
    ids: list[int] = await asyncio.to_thread(encode, content) if chars >= _THREAD_CHARS else encode(content)
    return ids


def _ask(
    services: Services,
    caller: Caller,
    body: ChatRequest | CompletionRequest,
    prompt_ids: list[int],
    prefix: str,
    messages: tuple[dict[str, str], ...] | None = None,
    prompt: str | None = None,
) -> Ask:
    """The request in the engine's terms. Raises ApiError."""
    model, adapter = split_model(services, body.model)
    return Ask(
        completion_id=prefix + secrets.token_hex(16),
        object="text_completion" if messages is None else "chat.completion",
        model=model,
        created_s=int(time.time()),
        prompt_ids=tuple(prompt_ids),
        sampling=_sampling(services, body, len(prompt_ids)),
        stops=_stops(services, body),
        choices=body.n or 1,
        tenant=_tenant(services, caller, body),
        teaches=caller.may("train"),
        user=body.user,
        adapter=adapter or body.user,
        messages=messages,
        prompt=prompt,
        service=body.service,
    )


def _stops(services: Services, body: ChatRequest | CompletionRequest) -> tuple[str, ...]:
    longest = services.settings.api.max_stop_chars
    for stop in body.stops:
        if len(stop) > longest:
            raise bad_request(
                f"a stop string of {len(stop)} characters is longer than api.max_stop_chars = {longest}", "stop"
            )
    return body.stops


def _sampling(services: Services, body: ChatRequest | CompletionRequest, prompt_tokens: int) -> Sampling:
    """Sampling parameters with OpenAI's defaults; an answer that would not fit the context is cut short by it."""
    context = services.engine.max_context_tokens
    if prompt_tokens >= context:
        raise bad_request(
            f"the prompt has {prompt_tokens} tokens, and this model's context is {context} tokens with the answer",
            "prompt" if isinstance(body, CompletionRequest) else "messages",
            "context_length_exceeded",
        )
    wanted = body.answer_tokens or services.settings.serving.default_max_tokens
    if body.min_tokens and body.answer_tokens and body.min_tokens > body.answer_tokens:
        raise bad_request(f"min_tokens = {body.min_tokens} is more than max_tokens = {wanted}", "min_tokens")
    max_tokens = min(wanted, context - prompt_tokens)
    alternatives, most = body.top_alternatives, services.settings.api.max_logprobs
    if alternatives is not None and not body.stream:
        choices, each = body.n or 1, max_tokens * (1 + alternatives)
        if choices * each > most:
            raise bad_request(
                f"n x max_tokens x (1 + alternatives) = {choices} x {max_tokens} x {1 + alternatives} = "
                f"{choices * each} log-probabilities are more than api.max_logprobs = {most}: "
                "ask for fewer, or for a stream",
                "logprobs",
            )
    biases = {int(token): value for token, value in (body.logit_bias or {}).items()}
    check_tokens(services, biases, "logit_bias")
    stop_ids = tuple(body.stop_token_ids or ())
    check_tokens(services, stop_ids, "stop_token_ids")

    def given(value: float | None, default: float) -> float:
        return default if value is None else value

    return Sampling(
        max_tokens=max_tokens,
        min_tokens=min(body.min_tokens or 0, max_tokens),
        temperature=given(body.temperature, 1.0),
        top_p=given(body.top_p, 1.0),
        top_k=max(0, body.top_k or 0),
        min_p=body.min_p or 0.0,
        seed=body.seed,
        repetition_penalty=given(body.repetition_penalty, 1.0),
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias=biases,
        logprobs=None if alternatives is None else min(alternatives, services.vocab_size),
        ignore_eos=bool(body.ignore_eos),
        stop_token_ids=stop_ids if body.ignore_eos else tuple({*stop_ids, *services.codec.eos_ids}),
    )


async def _answer(
    request: web.Request, services: Services, ask: Ask, body: ChatRequest | CompletionRequest
) -> web.StreamResponse:
    if body.stream_options is not None and not body.stream:
        raise bad_request('"stream_options" needs "stream": true', "stream_options")
    generation, limits = Generation(services, ask), services.limits
    name_request(request, ask.completion_id)
    note(request, completion=ask.completion_id, user=ask.user, adapter=ask.adapter, prompt_tokens=len(ask.prompt_ids))
    most_tokens = len(ask.prompt_ids) + ask.choices * ask.sampling.max_tokens
    limits.begin(ask.tenant, ask.choices, most_tokens)
    headers = openai_format.rate_headers(limits.remaining(ask.tenant))
    try:
        await generation.start()
        if body.stream:
            with_usage = bool(body.stream_options and body.stream_options.include_usage)
            return await _stream(request, services, generation, with_usage, headers)
        async for _ in generation.updates():
            pass
        await generation.store()
    except BaseException:
        # The client vanished (the handler is cancelled), or it will get an error.
        generation.abandon()
        raise
    finally:
        limits.end(ask.tenant, ask.choices, most_tokens - generation.tokens)
        note(request, **generation.facts())
    if ask.sampling.logprobs is None:
        return openai_format.json_answer(openai_format.full(generation, services.codec), headers=headers)
    # Log-probabilities are a hundred times as long as the text: they must not hold up other clients' tokens.
    full = partial(openai_format.full, generation, services.codec)
    text = await asyncio.to_thread(lambda: openai_format.dumps_piecewise(full()))
    return web.json_response(text=text, headers=headers)


async def _stream(
    request: web.Request, services: Services, generation: Generation, with_usage: bool, headers: dict[str, str]
) -> web.StreamResponse:
    """The answer in server-sent events. A failure after the first byte becomes an error event, as OpenAI's is."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache", **headers})
    await response.prepare(request)
    extra: openai_format.Json = {"usage": None} if with_usage else {}
    try:
        async for touched in generation.updates():
            if all(answer.finish for answer in generation.answers):
                # Whoever reads the last chunk may give feedback on it at once.
                await generation.store()
            chunks = [item for answer in touched for item in openai_format.chunks(generation, answer, services.codec)]
            data = b"".join(openai_format.server_event({**item, **extra}) for item in chunks)
            if data:
                await response.write(data)
        if with_usage:
            await response.write(openai_format.server_event(openai_format.usage_chunk(generation)))
        await response.write(openai_format.STREAM_END)
    except ConnectionResetError:
        generation.abandon()
    except Exception as error:
        generation.abandon()
        answer = as_api_error(error)
        note(request, error=answer.code)
        await _last_words(response, answer.body())
    return response


async def _last_words(response: web.StreamResponse, body: openai_format.Json) -> None:
    try:
        await response.write(openai_format.server_event(body))
    except ConnectionResetError:
        log.debug("a client left before it could be told of an error")
