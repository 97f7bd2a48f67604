"""Request bodies as pydantic models, and the fields of the query.

OpenAI's fields that have no effect here are ignored (`store`, `verbosity`, ...); fields that would
change the answer and cannot be honoured are refused (`tools`, `response_format` other than text, ...).
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Annotated, Any, Literal, NoReturn, Self, TypeVar
from weakref import WeakValueDictionary

from aiohttp import web
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from edged.align.feedback.signals import SIGNALS
from edged.http.access import caller_of
from edged.http.errors import ApiError, bad_request
from edged.http.loop_shares import SHARE
from edged.runtime import bounded_json
from edged.scheduler.reader import SPOKEN_WORDS_PER_MINUTE, TOKENS_PER_WORD, Pace
from edged.scheduler.task import ServiceClass
from edged.settings.access import NO_USER_NAME
from edged.settings.load import USER_NAME, ReadingSettings

_FIELD_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_TOLD_FIELDS = 8
_MAX_CHOICES = 128
_MAX_STOPS = 16
_MAX_TOKENS = 2**31
_MAX_BIASES = 1024
_MAX_MESSAGES = 10_000
_MAX_LINE = 500
"""Most characters of a written preference."""
_THREAD_BYTES = 1 << 16
"""Bodies from this size on are parsed and checked in a thread."""
_UNSUPPORTED = ("tools", "functions", "tool_choice", "function_call", "audio", "web_search_options", "suffix", "echo")
_NEUTRAL: tuple[Any, ...] = (None, False, "", "none", "auto", [], {})
"""Values of unsupported fields that request nothing."""

USER_PATTERN = f"^{USER_NAME.pattern}$"
"""`USER_NAME` as a JSON schema pattern; the OpenAPI document does not see validators."""
_FAIL_FAST = Field(fail_fast=True)
"""For lists: checked up to the first fault, since a body has room for hundreds of thousands."""
TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=_MAX_TOKENS)]], _FAIL_FAST]
T = TypeVar("T")


def _refuse(message: str) -> NoReturn:
    """Fail validation with this sentence as the message."""
    raise PydanticCustomError("edged", "{sentence}", {"sentence": message})


def _check_user(user: str) -> str:
    if not USER_NAME.fullmatch(user):
        _refuse(NO_USER_NAME.format(user[:80]))
    return user


def _at_most(most: int, what: str) -> Callable[[Any], Any]:
    """Return a validator that refuses a list or object with more than `most` entries."""

    def check(value: Any) -> Any:
        if isinstance(value, list | dict) and len(value) > most:
            _refuse(f"{len(value)} {what} are too many: at most {most}")
        return value

    return check


UserName = Annotated[str, Field(json_schema_extra={"pattern": USER_PATTERN}), AfterValidator(_check_user)]
OptionalUser = Annotated[UserName | None, BeforeValidator(lambda user: None if user == "" else user)]
AnswerTokens = Annotated[
    Annotated[int, Field(ge=1)] | None, BeforeValidator(lambda most: _MAX_TOKENS if most == -1 else most)
]
"""The most tokens of an answer; -1 is LM Studio's and llama.cpp's word for as many as the context holds."""
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
    *(Field(max_length=16), BeforeValidator(_at_most(16, "fields"))),
]
RUN_NAME = re.compile(r"[A-Za-z0-9._:@/+=-]{1,128}")
_LABELS = {"application": USER_NAME, "run": RUN_NAME}
"""What names in `metadata` must be to say which run of which application a call belongs to."""


class Body(BaseModel):
    """A JSON object that a client sends; unknown fields are ignored."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")
    _ignored: tuple[str, ...] = ()

    @property
    def ignored(self) -> str:
        """The first names of fields that have no effect, for a header."""
        return ", ".join([name for name in self._ignored if _FIELD_NAME.fullmatch(name)][:_TOLD_FIELDS])

    @classmethod
    def checked(cls, body: dict[str, Any]) -> Self:
        """Validate `body` as this model. Raises ApiError that names the first field at fault."""
        try:
            made = cls.model_validate(body)
        except ValidationError as error:
            raise _explain(error) from None
        made._ignored = tuple(name for name in body if name not in cls.model_fields)
        return made


class TextPart(Body):
    """One part of a message's content."""

    type: Annotated[str, Field(json_schema_extra={"enum": ["text", "input_text"]})]
    text: str | None = None

    @model_validator(mode="after")
    def _only_text(self) -> TextPart:
        if self.type not in ("text", "input_text") or self.text is None:
            _refuse(f'content part of type "{self.type}" is not supported: this model reads text only')
        return self


class Message(Body):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], _FAIL_FAST]

    def plain(self) -> dict[str, str]:
        """Return the message for chat templates and the store: `developer` becomes `system`, parts are joined."""
        parts = [self.content] if isinstance(self.content, str) else [part.text or "" for part in self.content]
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": "\n".join(parts)}


Messages = Annotated[
    list[Message], Field(min_length=1, fail_fast=True), BeforeValidator(_at_most(_MAX_MESSAGES, "messages"))
]


def _no_empty_stop(stop: Any) -> Any:
    if stop == "" or (isinstance(stop, list) and "" in stop):
        _refuse("a stop string is empty")
    return stop


def _token_keys(biases: dict[str, float] | None) -> dict[str, float] | None:
    if any(not (key.isascii() and key.isdigit() and len(key) < 10) for key in biases or ()):
        _refuse('keys are token ids written as text, such as "42"')
    return biases


def _one_prompt(prompt: Any) -> Any:
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        if len(prompt) > 1:
            _refuse(f"{len(prompt)} prompts in one request are not supported: send one request each")
        prompt = prompt[0]
    if len(prompt) == 0:
        _refuse("is empty")
    return prompt


Stops = Annotated[
    str | Annotated[list[str], _FAIL_FAST] | None,
    AfterValidator(_at_most(_MAX_STOPS, "stop strings")),
    AfterValidator(_no_empty_stop),
]
Biases = Annotated[
    dict[str, Annotated[float, Field(ge=-100, le=100)]] | None,
    BeforeValidator(_at_most(_MAX_BIASES, "biased tokens")),
    AfterValidator(_token_keys),
]


class StreamOptions(Body):
    """OpenAI's `stream_options`."""

    include_usage: bool | None = None


class ResponseFormat(Body):
    """OpenAI's `response_format`; only text can be had."""

    type: Literal["text"]


class _Own(Body):
    """A body of edged's own routes; unknown fields are refused."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    @classmethod
    def checked(cls, body: dict[str, Any]) -> Self:
        """Validate `body` as this model. Raises ApiError that names the first field at fault."""
        if unknown := next((name for name in body if name not in cls.model_fields), ""):
            raise bad_request(f'unknown field "{unknown[:80]}"', unknown[:80])
        return super().checked(body)


class QoeRequest(_Own):
    """The person who reads a streamed answer: how fast, and after how long a wait for the first token."""

    tokens_per_second: Annotated[float, Field(ge=0.5, le=200, allow_inf_nan=False)] | None = None
    words_per_minute: Annotated[float, Field(ge=30, le=6000, allow_inf_nan=False)] | None = None
    speech: Annotated[str, Field(json_schema_extra={"enum": [*SPOKEN_WORDS_PER_MINUTE]})] | None = None
    ttft_ms: Annotated[float, Field(ge=0, le=600_000, allow_inf_nan=False)] | None = None
    deliver: Literal["as_made", "smooth"] | None = None

    @model_validator(mode="after")
    def _one_pace(self) -> QoeRequest:
        paces = ("tokens_per_second", "words_per_minute", "speech")
        if sum(getattr(self, name) is not None for name in paces) > 1:
            _refuse(f"give one of {', '.join(paces)}: a reader has one pace")
        if self.speech is not None and self.speech not in SPOKEN_WORDS_PER_MINUTE:
            _refuse(f'speech "{self.speech[:80]}" is not known: it may be {", ".join(SPOKEN_WORDS_PER_MINUTE)}')
        return self

    def pace(self, reading: ReadingSettings, words_per_s: float) -> Pace:
        """Return the reader's pace; `reading` and the user's `words_per_s` say what the request leaves open."""
        words_per_minute = self.words_per_minute or SPOKEN_WORDS_PER_MINUTE.get(self.speech or "")
        words_per_s = words_per_minute / 60.0 if words_per_minute else words_per_s
        ttft_ms = reading.ttft_ms if self.ttft_ms is None else self.ttft_ms
        return Pace(self.tokens_per_second or TOKENS_PER_WORD * words_per_s, ttft_ms / 1e3)


class _Generation(Body):
    """Fields of both kinds of completion request. vLLM's extensions are from `min_tokens` on."""

    model: str | None = None
    user: OptionalUser = None
    n: Annotated[int, Field(ge=1, le=_MAX_CHOICES)] | None = None
    best_of: Annotated[int, Field(ge=1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: Stops = None
    max_tokens: AnswerTokens = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: Biases = None
    response_format: ResponseFormat | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=_MAX_TOKENS)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=_MAX_TOKENS)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[TokenIds, Field(max_length=_MAX_STOPS)] | None = None
    metadata: Metadata | None = None
    prompt_cache_key: Annotated[str, Field(max_length=512)] | None = None
    service_tier: Literal["auto", "default", "priority", "scale", "fast", "flex"] | None = None

    @model_validator(mode="before")
    @classmethod
    def _supported(cls, body: Any) -> Any:
        for name in _UNSUPPORTED:
            if isinstance(body, dict) and body.get(name) not in _NEUTRAL:
                _refuse(f'"{name}" is not supported: leave it out')
        return body

    @model_validator(mode="after")
    def _best_of_n(self) -> Self:
        if self.best_of is not None and self.best_of < self.choices:
            _refuse(f'"best_of" = {self.best_of} is less than "n" = {self.choices}: ask for as many at least')
        if self.best_of is not None and self.best_of > self.choices and self.stream:
            _refuse('"best_of" over "n" cannot be streamed: an answer is chosen when all are there; leave "stream" out')
        return self

    @property
    def drawn(self) -> int:
        """The number of answers that are drawn for `choices`; those of temperature 0 would all be equal."""
        return self.choices if self.temperature == 0 else self.best_of or self.choices

    @property
    def labels(self) -> dict[str, str]:
        """The application and run that `metadata` names; free text, which other programs write there, names none."""
        given = self.metadata or {}
        return {name: given[name] for name, usable in _LABELS.items() if usable.fullmatch(given.get(name, ""))}

    @property
    def ignored(self) -> str:
        """The first names of fields that have no effect, for a header."""
        unused = [f"metadata.{name}" for name in _LABELS.keys() & (self.metadata or {}).keys() - self.labels.keys()]
        return ", ".join(filter(None, [super().ignored, *sorted(unused)]))

    @property
    def choices(self) -> int:
        """The number of answers."""
        return self.n or 1

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings, as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def service(self) -> ServiceClass:
        """The scheduler's class: "flex" processing is batch, all else interactive."""
        return ServiceClass.BATCH if self.service_tier == "flex" else ServiceClass.INTERACTIVE

    @property
    def reading(self) -> QoeRequest | None:
        """The reader of the answer while it is made, if anybody is."""
        return None

    @property
    def answer_tokens(self) -> int | None:
        """The most tokens of an answer; None for the default."""
        return self.max_tokens


class ChatRequest(_Generation):
    """`POST /v1/chat/completions`."""

    messages: Messages
    max_completion_tokens: AnswerTokens = None
    logprobs: bool | None = None
    qoe: QoeRequest | None = QoeRequest()
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @model_validator(mode="after")
    def _logprobs_agree(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            _refuse('"top_logprobs" needs "logprobs": true')
        return self

    @model_validator(mode="after")
    def _smooth_is_read(self) -> ChatRequest:
        if self.qoe is not None and self.qoe.deliver == "smooth" and self.reading is None:
            _refuse('"deliver": "smooth" is for readers: it needs "stream": true, and neither "logprobs" nor "flex"')
        return self

    @property
    def reading(self) -> QoeRequest | None:
        """The reader of the answer while it is made: a person in front of a stream, unless the request denies it."""
        read = self.stream and not self.logprobs and self.service is ServiceClass.INTERACTIVE
        return self.qoe if read else None

    @property
    def answer_tokens(self) -> int | None:
        """`max_completion_tokens`, or its older name."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def top_alternatives(self) -> int | None:
        """How many alternatives to report beside each token's log-probability; None reports nothing."""
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(_Generation):
    """`POST /v1/completions`: one prompt, as text or as token ids."""

    prompt: Annotated[
        str | TokenIds | Annotated[list[str], _FAIL_FAST] | Annotated[list[TokenIds], _FAIL_FAST],
        AfterValidator(_one_prompt),
    ]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @property
    def top_alternatives(self) -> int | None:
        """How many alternatives to report beside each token's log-probability; None reports nothing."""
        return self.logprobs


class SignalRequest(_Own):
    """`POST /v1/feedback` about a completion."""

    completion_id: Annotated[str, Field(min_length=1, max_length=200)]
    signal: Annotated[str, Field(json_schema_extra={"enum": [*SIGNALS]})]
    user: OptionalUser = None
    choice: int | None = None
    text: str | None = None
    seconds: float | None = None


class PairRequest(_Own):
    """`POST /v1/feedback` with an explicit pair."""

    user: UserName
    chosen: str
    rejected: str
    messages: Messages | None = None
    prompt: Annotated[str, Field(min_length=1)] | None = None
    prompt_ids: Annotated[TokenIds, Field(min_length=1)] | None = None
    weight: Annotated[float, Field(gt=0, le=1)] = 1.0
    imported: bool = False

    @model_validator(mode="after")
    def _one_prompt(self) -> PairRequest:
        if sum(given is not None for given in (self.messages, self.prompt, self.prompt_ids)) != 1:
            _refuse('give either "messages", "prompt" or "prompt_ids"')
        return self


class RollbackRequest(_Own):
    """`POST /v1/adapters/{name}/rollback`."""

    version: Annotated[int, Field(ge=0, lt=_MAX_TOKENS)]


def _check_preference(text: str) -> str:
    # One line, so that it cannot look like further turns.
    line = " ".join(text.split())
    if not line:
        _refuse("is empty")
    if len(line) > _MAX_LINE:
        _refuse(f"{len(line)} characters are too many: at most {_MAX_LINE}")
    return line


class PreferenceRequest(_Own):
    """`PUT /v1/adapters/{name}/preference`; `text` becomes one line."""

    text: Annotated[str, Field(json_schema_extra={"maxLength": _MAX_LINE}), AfterValidator(_check_preference)]


class StrikeRequest(_Own):
    """`POST /v1/adapters/{name}/strike`."""

    key: Annotated[str, Field(min_length=1, max_length=200)]
    undo: bool = False


class QuarantineRequest(_Own):
    """`POST /v1/quarantine/{pair}`."""

    action: Literal["release", "drop"]


class UserQuarantineRequest(QuarantineRequest):
    """`POST /v1/quarantine`."""

    user: UserName


def parse_feedback(body: dict[str, Any]) -> SignalRequest | PairRequest:
    """Validate either form of feedback, distinguished by its fields. Raises ApiError."""
    if "completion_id" in body or "signal" in body:
        return SignalRequest.checked(body)
    if "chosen" in body or "rejected" in body:
        return PairRequest.checked(body)
    pair = '{"user", "messages" or "prompt", "chosen", "rejected"}'
    raise bad_request(f'feedback is {{"completion_id", "signal", ...}} or {pair}')


_reading: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()


def reading_turn(caller: str) -> asyncio.Lock:
    """Return the turns of a caller's large bodies and long prompts: of many, one at a time is before other callers'."""
    return _reading.setdefault(caller, asyncio.Lock())


async def read_body(request: web.Request, check: Callable[[dict[str, Any]], T]) -> T:
    """Read a request's JSON object and return `check` of it. Raises ApiError."""
    data = await request.read()
    if len(data) < _THREAD_BYTES:
        return check(parse_json(data))
    async with reading_turn(caller_of(request).tenant):
        return await asyncio.wrap_future(_large_bodies.check(data, check))


class _LargeBodies:
    """The thread that parses and checks large bodies, and that rests after each for four times as long as it took.

    The parser keeps the interpreter to itself to its end: of several bodies at once nobody else would have a turn.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "edged-bodies")
        self._rests_until_s = 0.0

    def check(self, data: bytes, check: Callable[[dict[str, Any]], T]) -> Future[T]:
        """Return `check` of a body's object, or its error."""
        return self._thread.submit(self._check, data, check)

    def _check(self, data: bytes, check: Callable[[dict[str, Any]], T]) -> T:
        time.sleep(max(0.0, self._rests_until_s - time.monotonic()))
        began_s = time.monotonic()
        try:
            return check(parse_json(data))
        finally:
            ended_s = time.monotonic()
            self._rests_until_s = ended_s + (ended_s - began_s) * (1.0 / SHARE - 1.0)


_large_bodies = _LargeBodies()


def parse_json(data: bytes) -> dict[str, Any]:
    """Parse a body that is a JSON object. Raises ApiError."""

    def refuse(name: str) -> NoReturn:
        raise ValueError(f"{name} is no number")

    try:
        body = bounded_json.loads(data.decode("utf-8-sig"), parse_constant=refuse)
    except ValueError as error:
        raise bad_request(f"the body cannot be read: {str(error)[:200]}", code="malformed_json") from None
    if not isinstance(body, dict):
        raise bad_request("the body is not a JSON object", code="malformed_json")
    return body


def _explain(error: ValidationError) -> ApiError:
    """Turn the first field's error into a sentence; for a union, the error of the branch that matched deepest."""
    found: list[Any] = error.errors(include_url=False, include_input=True)
    same_field = [item for item in found if item["loc"][:1] == found[0]["loc"][:1]]
    first = max(same_field, key=lambda item: len(_fields(item["loc"])))
    where = _fields(first["loc"])
    param = ".".join(map(str, where)) or None
    message = str(first["msg"])
    if first["type"] == "missing":
        return bad_request(f'"{param}" is missing', param)
    if param is None or first["type"] == "edged":
        return bad_request(message if param is None else f'"{param}": {message}', param)
    return bad_request(f'"{param}" = {_short(first["input"])}: {message[0].lower() + message[1:]}', param)


def _fields(location: tuple[int | str, ...]) -> list[int | str]:
    """Return the fields and indices in pydantic's location, without the parts that name a union's branches."""
    return [part for part in location if isinstance(part, int) or not ("[" in part or part in ("str", "int"))]


def _short(value: Any) -> str:
    """Encode a value as JSON, cut to 60 characters; a long list or object is told by its size."""
    if isinstance(value, list | dict) and len(value) > 8:
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)}"
    text = json.dumps(value[:60] if isinstance(value, str) else value)
    return text if len(text) <= 60 else text[:57] + "..."


def queried_user(request: web.Request) -> str | None:
    """The user name in `?user=`; None without it. Raises ApiError."""
    user = request.query.get("user")
    if user is not None and not USER_NAME.fullmatch(user):
        raise bad_request(f'"{user[:80]}" cannot name a user', "user")
    return user


def queried_integer(request: web.Request, name: str, default: int, least: int, most: int) -> int:
    """A field of the query, a whole number from `least` to `most`. Raises ApiError."""
    text = request.query.get(name, str(default))
    if not (text.isascii() and text.isdigit() and least <= int(text[:9]) <= most):
        raise bad_request(f'{name} = "{text[:40]}" is not a number from {least} to {most}', name)
    return int(text[:9])
