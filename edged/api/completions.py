"""`POST /v1/chat/completions` and `POST /v1/completions`: prompt, sampling parameters, answer or stream."""

import asyncio
import contextlib
import json
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any, Literal, TypeVar, cast

from aiohttp import web

from edged.align.feedback.pair_bounds import CHARS_PER_TOKEN
from edged.align.taste.edits import Operator
from edged.align.taste.model import Taste
from edged.align.taste.opinions import question_of
from edged.api import openai_format
from edged.api import openai_responses_format as responses_format
from edged.api.best_of import Chooser, chooser_of, may_choose
from edged.api.chat_turns import ChatTurns, chat_turns
from edged.api.errors import as_api_error
from edged.api.generation import Generation, prompt_sum
from edged.api.models import check_tokens, split_model
from edged.api.openai_format import ChunkStream
from edged.api.openai_responses import ResponseChat
from edged.api.openai_responses_format import ResponseOutput
from edged.api.request_log import chosen_id, name_request, note
from edged.api.requests import BegunStream, ChatRequest, CompletionRequest, read_asked, reading_turn
from edged.api.runs import RunNames, names_of
from edged.api.services import Services, services_of
from edged.api.starts import begin_with_default
from edged.api.tastes import is_sure
from edged.engine.sampling.params import Sampling
from edged.http.access import caller_of
from edged.http.connections import has_begun
from edged.http.errors import ApiError, bad_request
from edged.http.json_format import dumps_piecewise, json_answer
from edged.scheduler.reader import Pace
from edged.store import utc_now, utc_text
from edged.store.completions import Completion, is_further_prompt, prompt_id
from edged.text.grammar import Grammar, GrammarRefused
from edged.text.preference import prompts
from edged.text.tokenizer import TokenizerError

T = TypeVar("T")
R = TypeVar("R")
MAX_STOP_CHARS, MAX_SCHEMA_KB = 1024, 64
"""Longest stop string; largest schema or grammar of an answer in KiB."""
MAX_LOGPROBS = 131_072
"""Most log-probabilities of an answer that is no stream: n x max_tokens x (1 + alternatives)."""
_THREAD_CHARS = 20_000
"""Texts from this size on are tokenized in a thread, so that they do not hold up other clients' tokens."""
_MESSAGE_CHARS = 64
"""Characters that the chat template adds around a message, for that size."""
_CONTRASTED = 3
"""Number of answers from which on some may be the base's."""


_OWN_WAY = {"max_tokens", "min_tokens", "top_k", "logit_bias", "logprobs", "stop_token_ids"}
"""Fields of both that `_sampling` computes."""
_SAMPLED = {field.name for field in fields(Sampling)} & CompletionRequest.model_fields.keys() - _OWN_WAY
"""Fields that a request and `Sampling` share; `Sampling`'s defaults for those not given are OpenAI's."""
Body = ChatRequest | CompletionRequest


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """An answer to a conversation."""
    return await _answer(request, await read_asked(request, ChatRequest.checked))


async def completions(request: web.Request) -> web.StreamResponse:
    """A continuation of a text."""
    body = await read_asked(request, CompletionRequest.checked)
    if len(body.prompts) == 1:
        return await _answer(request, body)
    each = [body.model_copy(update={"prompt": prompt}) for prompt in body.prompts]
    first = _new_id(request, body)
    ids = [first, *(prompt_id(first, number) for number in range(1, len(each)))]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_answer(request, one, name)) for one, name in zip(each, ids, strict=True)]
    except BaseExceptionGroup as errors:
        # The first that fails ends the others.
        raise errors.exceptions[0] from None
    texts = [str(cast(web.Response, task.result()).text) for task in tasks]
    told = await asyncio.to_thread(lambda: dumps_piecewise(openai_format.joined([json.loads(text) for text in texts])))
    kept = {name: value for name, value in tasks[0].result().headers.items() if name.startswith("X-")}
    return web.json_response(text=told, headers=kept)


async def responses(request: web.Request) -> web.StreamResponse:
    """An answer to a conversation, as OpenAI's Responses API has it; it is known to feedback alone."""
    body = await read_asked(request, ResponseChat.of)
    try:
        return await _answer(request, body)
    except ApiError as error:
        raise body.renamed(error) from None


def _new_id(request: web.Request, body: Body) -> str:
    node = services_of(request).settings.api.node
    return "".join((body.id_prefix, node and f"{node}.", secrets.token_hex(16)))


async def _answer(request: web.Request, body: Body, name: str = "") -> web.StreamResponse:
    """Answer a request, or one prompt of several under the id `name`."""
    services, caller = services_of(request), caller_of(request)
    task_header = services.settings.api.task_header
    # A program asks for a chat's title or tags: it is no turn of a person's.
    is_task = bool(task_header and request.headers.get(task_header, "").strip())
    if is_task:
        body = body.model_copy(update={"service_tier": "flex"})
    if body.resume is not None:
        caller.demand_fleet("resume")
    limits, (model, adapter) = services.limits, split_model(services, caller, body.model)
    caller.demand_user(adapter)
    caller.demand_person(body.user)
    named = body.user or adapter
    # Each job would give its owner further limits.
    tenant = caller.tenant if named is None or caller.job_adapters.owner(named) else named
    # Refuse before the work of tokenizing what can be refused there.
    if body.drawn > (most := services.settings.limits.best_of) and body.drawn > body.choices:
        raise bad_request(f'"best_of" = {body.best_of} is more than limits.best_of = {most}', "best_of")
    limits.demand(tenant, body.drawn)
    name = name or _new_id(request, body)
    await begin_with_default(services, adapter or body.user)
    completion, asked_ids, turns = await _record(services, body, name, model, adapter or body.user, caller.tenant)
    grammar = await _grammar(services, body, turns, completion.prompt_ids, caller.tenant)
    sampling = replace(_sampling(services, body, len(completion.prompt_ids)), grammar=grammar)
    if body.stream_options is not None and not body.stream:
        raise bad_request('"stream_options" needs "stream": true', "stream_options")
    pace = await _pace(services, body)
    fairness_key = caller.fairness_key(body.user or adapter, services.settings.fairness.weights)
    names = names_of(request.headers, body)
    if begun := body.begun:
        completion = replace(completion, id=begun.id)
    if not is_further_prompt(completion.id):
        # Of several prompts the first is the one that the client knows by either id.
        completion = replace(completion, request_id=chosen_id(request))
        name_request(request, completion.id)
    prompt_tokens = len(completion.prompt_ids)
    note(request, completion=completion.id, user=body.user, adapter=completion.adapter, prompt_tokens=prompt_tokens)
    max_tokens = prompt_tokens + body.drawn * sampling.max_tokens
    if begun:
        _check_begun(services, begun, completion, sampling)
    teaches = caller.may("train")
    if begun or is_task:
        # What was sent of a stream is the model's own, and so is the rest.
        chooser, contrast, operator = None, False, None
    else:
        chooser = await _chooser(services, body, completion, sampling)
        contrast = teaches and await _contrasts(services, body, completion, sampling)
        operator = await _operator(services, body, completion, sampling)
    about = services, body, completion, asked_ids, sampling, tenant, fairness_key, teaches
    generation = Generation(*about, pace, chooser, contrast, operator, kept=not is_task)
    with counted(services, generation, names, max_tokens):
        headers = {**limits.headers(tenant), **notice_headers(services, body, adapter, turns.ignored if turns else ())}
        if grammar is not None and grammar.ignored:
            headers["X-Edged-Ignored-Keywords"] = ", ".join(grammar.ignored)
        if contrast:
            headers["X-Edged-Base-Choices"] = ", ".join(map(str, generation.base_choices))
        try:
            await generation.start()
            has_begun(request)
            if body.stream:
                return await _stream(request, generation, headers)
            async for _ in generation.updates():
                pass
            await generation.store()
            if generation.chosen_of > 1 or body.best_of:
                headers["X-Edged-Best-Of"] = str(generation.chosen_of)
            if generation.edited:
                headers["X-Edged-Edited"] = "true"
        except BaseException:
            # The client disconnected (the handler is cancelled), or it will get an error.
            generation.abandon()
            raise
        finally:
            note(request, **generation.facts())
    full = responses_format.full if isinstance(body, ResponseChat) else openai_format.full
    if sampling.logprobs is None:
        return json_answer(full(generation), headers=headers)
    # Log-probabilities are a hundred times as long as the text: they must not hold up other clients' tokens.
    text = await asyncio.to_thread(lambda: dumps_piecewise(full(generation)))
    return web.json_response(text=text, headers=headers)


def _check_begun(services: Services, begun: BegunStream, completion: Completion, sampling: Sampling) -> None:
    """Raise ApiError for a stream that cannot go on here: 400 for its tokens, 409 for another version or prompt."""
    for index, choice in enumerate(begun.choices):
        token_ids = choice.token_ids if choice is not None else []
        check_tokens(services, token_ids, f"resume.begun.choices.{index}.token_ids")
        if len(token_ids) > sampling.max_tokens:
            message = f"choice {index} has {len(token_ids)} tokens, and max_tokens = {sampling.max_tokens}"
            raise bad_request(message, f"resume.begun.choices.{index}.token_ids")
    adapter = completion.adapter
    version = services.engine.version(adapter) or 0 if adapter is not None else 0
    if version != begun.version or prompt_sum(completion.prompt_ids) != begun.prompt:
        served = f'version {version} of "{adapter}"' if version else "the base model"
        message = f"an answer by version {begun.version} cannot go on here, where {served} answers, or another prompt"
        raise ApiError(409, message, "resume.begun", "other_version")


def notice_headers(services: Services, body: Body, adapter: str | None, unread: Sequence[str]) -> dict[str, str]:
    """Return headers on fields without an effect, and on a model that names an adapter which does not exist.

    `unread` are those that this model's chat template does not read.
    """
    ignored = ", ".join(filter(None, [*map(body.named, unread), body.ignored]))
    headers = {"X-Edged-Ignored": ignored} if ignored else {}
    if adapter is not None and not services.engine.version(adapter):
        headers["X-Edged-Adapter"] = f"{adapter} has learned nothing yet: the base model answers"
    return headers


@contextlib.contextmanager
def counted(services: Services, generation: Generation, names: RunNames, max_tokens: int) -> Iterator[None]:
    """Count a request, of at most so many tokens, for its tenant's limits and its run until it ends, however it does.

    Raises LimitReached.
    """
    known, tenant, choices = generation.completion, generation.tenant, generation.body.drawn
    services.limits.begin(tenant, choices, max_tokens)
    try:
        said = known.prompt or "\n".join(message["content"] for message in known.messages or ())
        call = (said, len(known.prompt_ids), choices, generation.sampling.max_tokens)
        run = generation.run = services.runs.begin(tenant, names, known.id, call, generation.fairness_key)
        try:
            yield
        finally:
            answers = [len(answer.token_ids) for answer in generation.answers]
            services.runs.end(run, len(known.prompt_ids), answers)
    finally:
        services.limits.end(tenant, choices, max_tokens - generation.num_tokens)


async def _grammar(
    services: Services, body: Body, turns: ChatTurns | None, prompt_ids: Sequence[int], caller: str
) -> Grammar | None:
    """Return the grammar that answers are to follow, if any. Raises ApiError that names the field."""
    constraint = body.constraint if turns is None else turns.constraint
    if constraint is None:
        return None
    size, most = constraint.size, 1024 * MAX_SCHEMA_KB
    if size > most:
        told = f'"{constraint.field}" has {size} bytes, more than {most}'
        raise bad_request(told, constraint.field)
    reasoning = services.tokenizer.reasoning_before(prompt_ids) if turns is not None else None
    try:
        async with reading_turn(caller):
            return await services.grammars.compile(constraint, reasoning)
    except GrammarRefused as error:
        raise bad_request(f'"{constraint.field}": {error}', constraint.field) from None


async def _chooser(services: Services, body: Body, completion: Completion, sampling: Sampling) -> Chooser | None:
    """Return what chooses the answer among several; None where it is not chosen, or by its likelihood."""
    if (body.choices > 1 and body.best_of is None) or (body.drawn == body.choices and body.best_of is not None):
        return None
    if body.best_of is None and not may_choose(services, sampling, bool(body.stream)):
        return None
    taste = await _taste(services, completion)
    question = question_of(completion.messages, completion.prompt)
    if body.best_of is None:
        return chooser_of(services, taste, question)
    return Chooser(taste, question, 1) if taste is not None and is_sure(taste) else None


async def _taste(services: Services, completion: Completion) -> Taste | None:
    # Where no pair has come, there is no taste to wait for.
    known = completion.adapter is not None and services.engine.version(completion.adapter) is not None
    return await services.tastes.of(completion.adapter) if known else None


async def _operator(services: Services, body: Body, completion: Completion, sampling: Sampling) -> Operator | None:
    """Return the change that is made to the answers, since the user makes it to most that are like them.

    None for plain completions, where log-probabilities tell of the model's own tokens, where answers follow a grammar
    or are not to be changed by taste, and where it would not fit: in `max_tokens`, in the model's characters, or beside
    a stop string.
    """
    if (
        sampling.logprobs is not None
        or sampling.grammar is not None
        or not (services.settings.serving.by_taste and isinstance(body, ChatRequest))
    ):
        return None
    taste = await _taste(services, completion)
    found = taste.edit(question_of(completion.messages, completion.prompt)) if taste is not None else None
    if found is None:
        return None
    added = found.begins + found.ends
    if body.stops and (found.case or any(s in p for s in body.stops for p in (added, *found.replaced.values()))):
        return None
    try:
        num_tokens = len(services.tokenizer.encode_answer(added))
        services.tokenizer.encode_answer(" ".join(found.replaced.values()))
    except TokenizerError:
        return None
    return found if 2 * num_tokens <= sampling.max_tokens else None


async def _contrasts(services: Services, body: Body, completion: Completion, sampling: Sampling) -> bool:
    """Whether some of several answers to pick from are to be the base's.

    An adapter that has learned a taste gives answers that are all alike, and a user who has changed his mind could not
    say so. So it is after a signal that went against the others, or that was about answers alike.
    """
    alone = not completion.adapter or not services.engine.version(completion.adapter)
    if alone or body.choices < _CONTRASTED or body.best_of or not may_choose(services, sampling, False):
        return False
    taste = await _taste(services, completion)
    return taste is not None and taste.doubted


async def _pace(services: Services, body: Body) -> Pace | None:
    """Return the pace at which each of the answers is read, if any is: several share one reader."""
    if body.reading is None:
        return None
    pace = body.reading.pace(services.settings.reading, await services.reading_speeds.of(body.user))
    return replace(pace, tokens_per_s=pace.tokens_per_s / body.choices)


async def _record(
    services: Services, body: Body, name: str, model: str, adapter: str | None, caller: str
) -> tuple[Completion, Sequence[int], ChatTurns | None]:
    """Return the record `name` of a request without answers yet, and the tokens of its prompt without what edged adds.

    Third comes a chat as its template gets it. The record's own tokens are those to be served: with the user's written
    preference. Raises ApiError.
    """
    messages, prompt, turns, reading = None, None, None, reading_turn(caller)
    asked_ids: Sequence[int] = ()
    if isinstance(body, ChatRequest):
        _demand_room(services, len(body.messages), "messages", "messages")
        turns = chat_turns(services, body)
        messages, chars = turns.messages, turns.chars
        _demand_room(services, chars, "characters", "messages")
        chars += _MESSAGE_CHARS * len(messages)
        preference = services.preferences.in_prompt(adapter)
        most = services.engine.max_context_tokens
        render = partial(prompts, services.tokenizer, text=preference, max_tokens=most, arguments=turns.arguments)
        asked_ids, prompt_ids = await _tokenize(reading, render, messages, chars)
    elif isinstance(body.prompt, str):
        prompt = body.prompt
        _demand_room(services, len(prompt), "characters", "prompt")
        prompt_ids = await _tokenize(reading, services.tokenizer.encode_prompt, prompt, len(prompt))
    else:
        ids: list[Any] = body.prompt
        check_tokens(services, ids, "prompt", of_text=True)
        prompt_ids = ids
    completion = Completion(
        id=name,
        created_at=utc_text(utc_now()),
        object="text_completion" if messages is None else "chat.completion",
        model=model,
        prompt_ids=tuple(prompt_ids),
        choices=(),
        user=body.user,
        adapter=adapter,
        messages=messages,
        prompt=prompt,
        template_arguments=turns.arguments if turns else None,
    )
    return completion, asked_ids or completion.prompt_ids, turns


async def _tokenize(reading: asyncio.Lock, encode: Callable[[T], R], content: T, chars: int) -> R:
    if chars < _THREAD_CHARS:
        return encode(content)
    async with reading:
        return await asyncio.to_thread(encode, content)


def _demand_room(services: Services, amount: int, what: Literal["messages", "characters"], field: str) -> None:
    """Raise ApiError for texts that are too long for the context whatever their tokens are: to count takes long."""
    context = services.engine.max_context_tokens
    max_chars = CHARS_PER_TOKEN * context
    if amount > (context if what == "messages" else max_chars):
        raise bad_request(
            f"the prompt has {amount} {what}, and this model's context of {context} tokens holds as many messages at "
            f"most, and {max_chars} characters",
            field,
            "context_length_exceeded",
        )


def _sampling(services: Services, body: Body, prompt_tokens: int) -> Sampling:
    """Return sampling parameters with OpenAI's defaults; the context bounds `max_tokens`. Raises ApiError."""
    context, longest = services.engine.max_context_tokens, MAX_STOP_CHARS
    if prompt_tokens >= context:
        raise bad_request(
            f"the prompt has {prompt_tokens} tokens, and this model's context is {context} tokens with the answer",
            "prompt" if isinstance(body, CompletionRequest) else "messages",
            "context_length_exceeded",
        )
    wanted = services.settings.serving.default_max_tokens if body.answer_tokens is None else body.answer_tokens or 1
    if body.min_tokens and body.answer_tokens and body.min_tokens > body.answer_tokens:
        raise bad_request(f"min_tokens = {body.min_tokens} is more than max_tokens = {wanted}", "min_tokens")
    max_tokens = min(wanted, context - prompt_tokens)
    alternatives, most, echoed = body.top_alternatives, MAX_LOGPROBS, False
    if alternatives is not None and not body.stream:
        choices, each = body.drawn, max_tokens * (1 + alternatives)
        echoed = isinstance(body, CompletionRequest) and bool(body.echo)
        if echoed:
            each += prompt_tokens * (1 + alternatives)
        if choices * each > most:
            tokens = each // (1 + alternatives)
            raise bad_request(
                f"answers x tokens x (1 + alternatives) = {choices} x {tokens} x {1 + alternatives} = "
                f"{choices * each} log-probabilities are more than {most}: "
                "ask for fewer, or for a stream",
                "logprobs",
            )
    if (chars := max(map(len, body.stops), default=0)) > longest:
        raise bad_request(f"a stop string of {chars} characters is longer than {longest}", "stop")
    biases = {int(token): value for token, value in (body.logit_bias or {}).items()}
    check_tokens(services, biases, "logit_bias")
    stop_ids = tuple(body.stop_token_ids or ())
    check_tokens(services, stop_ids, "stop_token_ids")
    return Sampling(
        max_tokens=max_tokens,
        min_tokens=min(body.min_tokens or 0, max_tokens),
        top_k=max(0, body.top_k or 0),
        logit_bias=biases,
        prompt_logprobs=echoed,
        logprobs=None if alternatives is None else min(alternatives, services.tokenizer.vocab_size),
        stop_token_ids=stop_ids if body.ignore_eos else tuple({*stop_ids, *services.tokenizer.eos_ids}),
        **body.model_dump(include=_SAMPLED, exclude_none=True),
    )


async def _stream(request: web.Request, generation: Generation, headers: dict[str, str]) -> web.StreamResponse:
    """Send the answer as server-sent events. A failure after the first byte becomes an error event, as OpenAI's is."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache", **headers})
    await response.prepare(request)
    form = ResponseOutput(generation) if isinstance(generation.body, ResponseChat) else ChunkStream(generation)
    try:
        if data := form.begin():
            await response.write(data)
        async for touched in generation.updates():
            if all(answer.finish for answer in generation.answers):
                # A client that reads the last chunk may give feedback on it at once.
                await generation.store()
            if data := form.update(touched):
                await response.write(data)
        await response.write(form.end())
    except ConnectionResetError:
        generation.abandon()
    except Exception as error:
        generation.abandon()
        answer = as_api_error(error)
        note(request, error=answer.code)
        with contextlib.suppress(ConnectionResetError):
            await response.write(form.error(answer))
    return response
