"""Request bodies as pydantic models, and the fields of the query.

OpenAI's fields that have no effect here are ignored (`store`, `verbosity`, ...); fields that would
change the answer and cannot be honoured are refused (`functions`, `guided_json`, ...).
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Annotated, Any, ClassVar, Literal, NoReturn, Self, TypeVar, cast
from weakref import WeakValueDictionary

from aiohttp import web
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    Tag,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError

from edged.align.feedback.signals import SIGNALS
from edged.http.access import caller_of
from edged.http.checks import read_unpacked
from edged.http.errors import ApiError, bad_request
from edged.http.loop_shares import SHARE
from edged.runtime import bounded_json
from edged.scheduler.reader import SPOKEN_WORDS_PER_MINUTE, TOKENS_PER_WORD, Pace
from edged.scheduler.task import ServiceClass
from edged.settings.access import NO_USER_NAME
from edged.settings.fleet import NODE_NAME
from edged.settings.load import TEMPLATE_OWN, USER_NAME, ReadingSettings
from edged.text.call_form import PLAIN_NAME
from edged.text.grammar import CalledTools, Constraint

_FIELD_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_TOLD_FIELDS = 8
_READ_AFTER_MS = 1000.0
"""Time to the first token that is no wait for a reader, where a request says nothing of its own."""
_MAX_CHOICES = 128
_MAX_STOPS = 16
_MAX_TOKENS = 2**31
_MAX_BIASES = 1024
_MAX_MESSAGES = 10_000
_MAX_TOOLS = 128
_MAX_CALLS = 8
"""Most calls of an answer that a grammar has call: small models would go on to the last token."""
_MAX_LINE = 500
"""Most characters of a written preference."""
_THREAD_BYTES = 1 << 16
"""Bodies from this size on are parsed and checked in a thread."""
_UNSUPPORTED = (
    *("tools", "functions", "tool_choice", "function_call", "audio", "web_search_options", "suffix", "echo"),
    *("chat_template", "continue_final_message"),
)
_RENAMED = {
    **{f"guided_{kind}": f"structured_outputs.{kind}" for kind in ("json", "regex", "choice", "grammar")},
    "grammar": "structured_outputs.grammar",
    "json_schema": "response_format.json_schema.schema",
}
"""Fields of other servers that constrain the answer, with those that do so here."""
_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
_NEUTRAL: tuple[Any, ...] = (None, False, "", "none", "auto", [], {})
"""Values of unsupported fields that request nothing."""

USER_PATTERN = f"^{USER_NAME.pattern}$"
"""`USER_NAME` as a JSON schema pattern; the OpenAPI document does not see validators."""
_FAIL_FAST = Field(fail_fast=True)
"""For lists: checked up to the first fault, since a body has room for hundreds of thousands."""
TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=_MAX_TOKENS)]], _FAIL_FAST]
T = TypeVar("T")
G = TypeVar("G", bound="GenerationRequest")


def _refuse(message: str, field: str | None = None) -> NoReturn:
    """Fail validation with this sentence as the message; `field` is at fault where not all of what is validated is."""
    raise PydanticCustomError("edged", "{sentence}", {"sentence": message, "field": field})


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
        made._ignored = tuple(name for name in body if name not in cls.model_fields) + cls._unread(body)
        return made

    @classmethod
    def _unread(cls, body: dict[str, Any]) -> tuple[str, ...]:
        """The names of fields within fields that have no effect."""
        return ()

    @classmethod
    def named(cls, field: str) -> str:
        """Return the name that the client knows a field by."""
        return field


class TextPart(Body):
    """One part of a message's content."""

    type: Annotated[str, Field(json_schema_extra={"enum": [*_TEXT_PARTS]})]
    text: str | None = None
    refusal: str | None = None

    @model_validator(mode="after")
    def _only_text(self) -> TextPart:
        if self.type not in _TEXT_PARTS or self.said is None:
            _refuse(f'content part of type "{self.type}" is not supported: this model reads text only')
        return self

    @property
    def said(self) -> str | None:
        """The part's text."""
        return self.refusal if self.type == "refusal" else self.text


def _an_object(text: str) -> str:
    with suppress(ValueError):
        if not text.strip() or isinstance(bounded_json.loads(text), dict):
            return text
    _refuse("is no JSON object: give the arguments that the call came with")


FunctionName = Annotated[str, Field(min_length=1, max_length=256)]


class CalledFunction(Body):
    """The function of a call; `arguments` is a JSON object as text."""

    name: FunctionName
    arguments: Annotated[str, AfterValidator(_an_object)] = ""


class ToolCall(Body):
    """A call in a turn of the assistant's."""

    id: Annotated[str, Field(max_length=256)] = ""
    type: Literal["function"] = "function"
    function: CalledFunction

    def plain(self) -> dict[str, Any]:
        """Return the call for chat templates: its arguments are an object."""
        arguments = bounded_json.loads(self.function.arguments) if self.function.arguments.strip() else {}
        return {"id": self.id, "type": self.type, "function": {"name": self.function.name, "arguments": arguments}}


class Message(Body):
    """One turn of a conversation; only the assistant's may have no content."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], _FAIL_FAST] | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[ToolCall], _FAIL_FAST] | None = None
    tool_call_id: Annotated[str, Field(max_length=256)] | None = None

    @model_validator(mode="after")
    def _is_whole(self) -> Message:
        if self.content is None and self.role != "assistant":
            _refuse("has no content: give a text", "content")
        if self.tool_calls and self.role != "assistant":
            _refuse(f'a message of role "{self.role}" calls no tools: leave "tool_calls" out', "tool_calls")
        return self

    def plain(self) -> dict[str, Any]:
        """Return the message for chat templates and the store: `developer` becomes `system`, parts are joined."""
        parts = (
            [self.content or ""] if not isinstance(self.content, list) else [part.said or "" for part in self.content]
        )
        plain: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role}
        plain["content"] = "\n".join(parts)
        if self.role == "assistant" and self.reasoning_content:
            plain["reasoning_content"] = self.reasoning_content
        if self.tool_calls:
            plain["tool_calls"] = [call.plain() for call in self.tool_calls]
        if self.role == "tool" and self.tool_call_id:
            plain["tool_call_id"] = self.tool_call_id
        return plain


class FunctionTool(Body):
    """A function that an answer may call; `parameters` is a JSON schema."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """A tool that is offered to the model."""

    type: Literal["function"]
    function: FunctionTool

    def plain(self) -> dict[str, Any]:
        """Return the tool for chat templates."""
        about, parameters = self.function, self.function.parameters or {"type": "object", "properties": {}}
        described = {} if about.description is None else {"description": about.description}
        return {"type": "function", "function": {"name": about.name, **described, "parameters": parameters}}


class NamedFunction(Body):
    """The name of a tool that must be called."""

    name: FunctionName


class NamedTool(Body):
    """The form of `tool_choice` that names a tool."""

    type: Literal["function"]
    function: NamedFunction


def _scalars(arguments: Any) -> Any:
    if isinstance(arguments, dict):
        for name, value in arguments.items():
            if name in TEMPLATE_OWN:
                _refuse(f'"{name[:80]}" is not the request\'s to say in chat_template_kwargs: leave it out')
            if isinstance(value, list | dict):
                _refuse(
                    f'"{name[:80]}" is {"a list" if isinstance(value, list) else "an object"}: give a text or number'
                )
    return arguments


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


def _prompts(prompt: Any) -> Any:
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        if len(prompt) > _MAX_CHOICES:
            _refuse(f"{len(prompt)} prompts are too many: at most {_MAX_CHOICES}")
        if not all(prompt):
            _refuse("one of the prompts is empty")
        prompt = prompt[0] if len(prompt) == 1 else prompt
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


def _schema_text(schema: Any) -> str:
    """Return the text of a JSON schema, which may come as such; the order of its properties is the answer's."""
    try:
        found = bounded_json.loads(schema) if isinstance(schema, str) else schema
        if isinstance(found, dict):
            return json.dumps(found)
    except ValueError as error:
        _refuse(f"the schema cannot be read: {str(error)[:200]}")
    except RecursionError:
        _refuse("the schema is nested too deeply")
    _refuse("a schema is a JSON object")


SchemaText = Annotated[str, BeforeValidator(_schema_text)]
_AS_OBJECT: dict[str, Any] = {"type": "object"}


class SchemaFormat(Body):
    """The JSON schema of a `response_format`."""

    name: str | None = None
    description: str | None = None
    schema_: SchemaText = Field(alias="schema", json_schema_extra=_AS_OBJECT)
    strict: bool | None = None


class ResponseFormat(Body):
    """OpenAI's `response_format`; `schema` beside `json_object` is llama.cpp's."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaFormat | None = None
    schema_: SchemaText | None = Field(None, alias="schema", json_schema_extra=_AS_OBJECT)

    @model_validator(mode="after")
    def _has_schema(self) -> ResponseFormat:
        if self.type == "json_schema" and self.json_schema is None:
            _refuse('"json_schema" is missing')
        return self

    @property
    def constraint(self) -> Constraint | None:
        """The constraint on the answer."""
        if self.type == "json_schema" and (given := self.json_schema) is not None:
            return Constraint("json", given.schema_, "response_format.json_schema.schema", bool(given.strict))
        if self.type == "json_object":
            return Constraint("json", self.schema_ or json.dumps(_AS_OBJECT), "response_format")
        return None


class StructuredOutputs(Body):
    """vLLM's `structured_outputs`: one of its fields."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    json_: SchemaText | None = Field(None, alias="json", json_schema_extra=_AS_OBJECT)
    regex: str | None = None
    choice: Annotated[list[str], Field(min_length=1), _FAIL_FAST] | None = None
    grammar: str | None = None

    @model_validator(mode="after")
    def _one(self) -> StructuredOutputs:
        if len(self._given) != 1:
            _refuse("give one of json, regex, choice and grammar")
        return self

    @property
    def _given(self) -> dict[str, str]:
        choice = None if self.choice is None else json.dumps(self.choice)
        each = {"json": self.json_, "regex": self.regex, "choice": choice, "grammar": self.grammar}
        return {kind: text for kind, text in each.items() if text is not None}

    @property
    def constraint(self) -> Constraint:
        """The constraint on the answer."""
        ((kind, text),) = self._given.items()
        return Constraint(cast(Any, kind), text, f"structured_outputs.{kind}")


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
        ttft_ms = _READ_AFTER_MS if self.ttft_ms is None else self.ttft_ms
        return Pace(self.tokens_per_second or TOKENS_PER_WORD * words_per_s, ttft_ms / 1e3)


class BegunChoice(_Own):
    """One answer of a stream as its client has it: its tokens, and how many characters of their text have left."""

    token_ids: TokenIds
    chars: Annotated[int, Field(ge=0)]
    ended: bool
    """Whether the client has its last chunk."""
    calls: Annotated[int, Field(ge=0)] = 0
    """The number of tool calls that it has."""


class BegunStream(_Own):
    """A stream that another node of a fleet began, and what it was made from."""

    id: Annotated[str, Field(pattern=r"^(chat)?cmpl-[A-Za-z0-9.-]{8,80}$")]
    created: Annotated[int, Field(ge=0)]
    version: Annotated[int, Field(ge=0)]
    """The adapter's version that sampled it; 0 is the base."""
    prompt: int
    """The prompt's `prompt_sum`."""
    choices: list[BegunChoice | None]
    """By index; None where the client has no chunk of one."""


class ResumeRequest(_Own):
    """The field of a fleet's ingress: any node gives the same answer for it, or goes on with one that has begun."""

    seed: Annotated[int, Field(ge=0, lt=2**63)]
    """The seed of an answer whose request names none."""
    begun: BegunStream | None = None


class GenerationRequest(Body):
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
    structured_outputs: StructuredOutputs | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=_MAX_TOKENS)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=_MAX_TOKENS)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[TokenIds, Field(max_length=_MAX_STOPS)] | None = None
    metadata: Metadata | None = None
    prompt_cache_key: Annotated[str, Field(max_length=512)] | None = None
    service_tier: Literal["auto", "default", "priority", "scale", "fast", "flex"] | None = None
    resume: ResumeRequest | None = None

    @model_validator(mode="before")
    @classmethod
    def _supported(cls, body: Any) -> Any:
        for name in _UNSUPPORTED:
            if isinstance(body, dict) and body.get(name) not in _NEUTRAL and name not in cls.model_fields:
                _refuse(f'"{name}" is not supported: leave it out', name)
        for name, ours in _RENAMED.items():
            # An empty schema is one, too: of any JSON.
            if isinstance(body, dict) and (body.get(name) == {} or body.get(name) not in _NEUTRAL):
                _refuse(f'"{name}" is not supported: send it as "{ours}"', name)
        return body

    @model_validator(mode="after")
    def _best_of_n(self) -> Self:
        if self.best_of is not None and self.best_of < self.choices:
            _refuse(
                f'"best_of" = {self.best_of} is less than "n" = {self.choices}: ask for as many at least', "best_of"
            )
        if self.best_of is not None and self.best_of > self.choices and self.stream:
            told = '"best_of" over "n" cannot be streamed: an answer is chosen when all are there; leave "stream" out'
            _refuse(told, "best_of")
        return self

    @model_validator(mode="after")
    def _begun_fits(self) -> Self:
        if (begun := self.begun) is not None and (not self.stream or len(begun.choices) != self.choices):
            told = f'has {len(begun.choices)} choices, where "n" = {self.choices}' if self.stream else "needs a stream"
            _refuse(f'"resume.begun" {told}: it tells of each choice of a stream')
        return self

    @property
    def begun(self) -> BegunStream | None:
        """The stream that this request goes on with, if it does."""
        return self.resume.begun if self.resume is not None else None

    @model_validator(mode="after")
    def _one_constraint(self) -> Self:
        if self.structured_outputs is not None and self.response_format and self.response_format.constraint:
            _refuse('give either "response_format" or "structured_outputs"', "structured_outputs")
        for name in ("ignore_eos", "min_tokens") if self.constraint else ():
            if getattr(self, name):
                _refuse(f'"{name}" would go on behind the end of an answer that follows a grammar: leave it out', name)
        return self

    @property
    def constraint(self) -> Constraint | None:
        """The constraint on the answers, if there is one."""
        given = self.structured_outputs or self.response_format
        return given.constraint if given is not None else None

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


class ChatRequest(GenerationRequest):
    """`POST /v1/chat/completions`."""

    id_prefix: ClassVar[str] = "chatcmpl-"
    messages: Messages
    max_completion_tokens: AnswerTokens = None
    logprobs: bool | None = None
    qoe: QoeRequest | None = QoeRequest()
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Annotated[list[Tool], _FAIL_FAST, BeforeValidator(_at_most(_MAX_TOOLS, "tools"))] | None = None
    tool_choice: Literal["none", "auto", "required"] | Annotated[NamedTool, Tag("[named]")] | None = None
    parallel_tool_calls: bool | None = None
    modalities: list[Literal["text"]] | None = None
    reasoning_effort: Annotated[str, Field(max_length=32)] | None = None
    chat_template_kwargs: Annotated[
        dict[str, str | int | float | bool | None] | None,
        *(Field(max_length=16), BeforeValidator(_at_most(16, "arguments")), BeforeValidator(_scalars)),
    ] = None

    @property
    def offered(self) -> list[dict[str, Any]]:
        """The tools that the answer may call, for chat templates."""
        return [] if self.tool_choice == "none" else [tool.plain() for tool in self.tools or ()]

    @property
    def called(self) -> list[Tool]:
        """The tools of which the answer must call one; none where the model decides."""
        if isinstance(self.tool_choice, NamedTool):
            return [tool for tool in self.tools or () if tool.function.name == self.tool_choice.function.name]
        return list(self.tools or ()) if self.tool_choice == "required" else []

    @property
    def constraint(self) -> Constraint | None:
        """The constraint on the answers, if there is one; what calls a tool has no other content."""
        if not (called := self.called):
            return super().constraint
        return Constraint("text", "", "tools", calls=self.calls(called, must=True))

    def calls(self, tools: Sequence[Tool], must: bool = False) -> CalledTools:
        """Return tools as a grammar calls them; unless a call `must` come, only strict ones keep to their schemas."""
        about = [(tool.plain()["function"], bool(tool.function.strict)) for tool in tools]
        held = [(each["name"], each["parameters"] if must or strict else {}, strict) for each, strict in about]
        one = self.parallel_tool_calls is False or isinstance(self.tool_choice, NamedTool)
        return CalledTools(json.dumps(held), 1 if one else _MAX_CALLS, must)

    @model_validator(mode="after")
    def _has_what_it_calls(self) -> ChatRequest:
        choice = self.tool_choice
        if (choice == "required" or isinstance(choice, NamedTool)) and not self.called:
            named = f'the function "{choice.function.name[:80]}"' if isinstance(choice, NamedTool) else "a call"
            _refuse(f'{named} is asked for, and "tools" has none: offer it, or send "auto"', "tool_choice")
        for tool in self.called:
            if not PLAIN_NAME.fullmatch(name := tool.function.name):
                told = f'a call of "{name[:80]}" cannot be promised: name it by letters, digits, "_", "-" and "."'
                _refuse(told, "tools")
        return self

    @model_validator(mode="after")
    def _logprobs_agree(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            _refuse('"top_logprobs" needs "logprobs": true', "top_logprobs")
        return self

    @model_validator(mode="after")
    def _smooth_is_read(self) -> ChatRequest:
        if self.qoe is not None and self.qoe.deliver == "smooth" and self.reading is None:
            told = '"deliver": "smooth" is for readers: it needs "stream": true, and neither "logprobs" nor "flex"'
            _refuse(told, "qoe")
        return self

    @classmethod
    def _unread(cls, body: dict[str, Any]) -> tuple[str, ...]:
        names = {name for each in body["messages"] for name, value in each.items() if value not in _NEUTRAL}
        return tuple(f"messages.{name}" for name in sorted(names - Message.model_fields.keys()))

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


class CompletionRequest(GenerationRequest):
    """`POST /v1/completions`: a prompt as text or as token ids, or several."""

    id_prefix: ClassVar[str] = "cmpl-"
    prompt: Annotated[
        str | TokenIds | Annotated[list[str], _FAIL_FAST] | Annotated[list[TokenIds], _FAIL_FAST],
        AfterValidator(_prompts),
    ]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    max_tokens: Annotated[
        Annotated[int, Field(ge=0)] | None, BeforeValidator(lambda most: _MAX_TOKENS if most == -1 else most)
    ] = None

    @property
    def prompts(self) -> list[Any]:
        """The prompts, each a text or a list of token ids."""
        several = isinstance(self.prompt, list) and not isinstance(self.prompt[0], int)
        return cast(list[Any], self.prompt) if several else [self.prompt]

    @model_validator(mode="after")
    def _is_told_whole(self) -> CompletionRequest:
        if len(self.prompts) * self.choices > _MAX_CHOICES:
            _refuse(
                f"prompts x n = {len(self.prompts)} x {self.choices} are too many: at most {_MAX_CHOICES}", "prompt"
            )
        if self.stream and len(self.prompts) > 1:
            _refuse(f"{len(self.prompts)} prompts cannot be streamed: send one request each", "prompt")
        if self.stream and self.echo:
            _refuse('a prompt is not streamed: leave it out, or "stream"', "echo")
        return self

    @property
    def top_alternatives(self) -> int | None:
        """How many alternatives to report beside each token's log-probability; None reports nothing."""
        return self.logprobs


class SignalRequest(_Own):
    """`POST /v1/feedback` about a completion."""

    completion_id: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    request_id: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    """The `X-Request-Id` that the client gave its request."""
    signal: Annotated[str, Field(json_schema_extra={"enum": [*SIGNALS]})]
    user: OptionalUser = None
    choice: int | None = None
    text: str | None = None
    seconds: float | None = None

    @model_validator(mode="after")
    def _names_one(self) -> SignalRequest:
        if (self.completion_id is None) == (self.request_id is None):
            _refuse('give either "completion_id" or "request_id"', "completion_id")
        return self


class _ExplicitRequest(_Own):
    """Feedback that brings its prompt and answers along."""

    user: UserName
    messages: Messages | None = None
    prompt: Annotated[str, Field(min_length=1)] | None = None
    prompt_ids: Annotated[TokenIds, Field(min_length=1)] | None = None
    weight: Annotated[float, Field(gt=0, le=1)] = 1.0

    @model_validator(mode="after")
    def _one_prompt(self) -> Self:
        if sum(given is not None for given in (self.messages, self.prompt, self.prompt_ids)) != 1:
            _refuse('give either "messages", "prompt" or "prompt_ids"')
        return self


class PairRequest(_ExplicitRequest):
    """`POST /v1/feedback` with an explicit pair."""

    chosen: str
    rejected: str
    imported: bool = False


class RatingRequest(_ExplicitRequest):
    """`POST /v1/feedback` with an explicit single rating."""

    completion: str
    label: bool
    """Whether the answer `completion` is good."""

    @property
    def chosen(self) -> str:
        """The answer where it is good, else an empty text."""
        return self.completion if self.label else ""

    @property
    def rejected(self) -> str:
        """The answer where it is bad, else an empty text."""
        return "" if self.label else self.completion


class RollbackRequest(_Own):
    """`POST /v1/adapters/{name}/rollback`."""

    version: Annotated[int, Field(ge=0, lt=_MAX_TOKENS)]


class ConsentRequest(_Own):
    """`PUT /v1/federated/consent/{user}`: the hash of the text that the user was shown."""

    text_sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class LeaseRequest(_Own):
    """`PUT /v1/leases/{name}`: the one writer of an adapter, and the greatest number that any version of it has."""

    node: Annotated[str, Field(pattern=f"^{NODE_NAME.pattern}$")]
    epoch: Annotated[int, Field(ge=1)]
    newest: Annotated[int, Field(ge=0)] = 0


class CopiedPairsRequest(_Own):
    """`POST /v1/leases/{name}/pairs`: rows of tables, as `GET` gives them at another node."""

    signals: list[dict[str, Any]]
    pairs: list[dict[str, Any]]
    quarantine: list[dict[str, Any]]


class HandedOnRequest(_Own):
    """`PUT /v1/leases/{name}/pairs`: the pairs that the writer of an epoch has on its disk."""

    origins: list[str]
    epoch: Annotated[int, Field(ge=0)]


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


def parse_feedback(body: dict[str, Any]) -> SignalRequest | PairRequest | RatingRequest:
    """Validate a form of feedback, distinguished by its fields. Raises ApiError."""
    if body.keys() & {"completion_id", "request_id", "signal"}:
        return SignalRequest.checked(body)
    if "chosen" in body or "rejected" in body:
        return PairRequest.checked(body)
    if "completion" in body or "label" in body:
        return RatingRequest.checked(body)
    explicit = (
        '{"user", "messages" or "prompt", "chosen", "rejected"}, or "completion" and "label" in the place of these'
    )
    raise bad_request(f'feedback is {{"completion_id" or "request_id", "signal", ...}} or {explicit}')


_reading: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()


def reading_turn(caller: str) -> asyncio.Lock:
    """Return the turns of a caller's large bodies and long prompts: of many, one at a time is before other callers'."""
    return _reading.setdefault(caller, asyncio.Lock())


async def read_body(request: web.Request, check: Callable[[dict[str, Any]], T]) -> T:
    """Read a request's JSON object and return `check` of it; the caller may speak for its `user`. Raises ApiError."""
    data, caller = await read_unpacked(request), caller_of(request)
    if len(data) < _THREAD_BYTES:
        body = check(parse_json(data))
    else:
        async with reading_turn(caller.tenant):
            body = await asyncio.wrap_future(_large_bodies.check(data, check))
    caller.demand_user(getattr(body, "user", None))
    return body


async def read_asked(request: web.Request, check: Callable[[dict[str, Any]], G]) -> G:
    """Read a completion's body, of the user whom its caller's rule or token says. Raises ApiError."""
    caller = caller_of(request)

    def named(body: dict[str, Any]) -> G:
        given = body.get("user")
        if (user := caller.user_of(request.headers, given)) == given:
            return check(body)
        made = check(body | {"user": user})
        made._ignored = (*made._ignored, *["user"] * bool(given))
        return made

    return await read_body(request, named)


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
    where += [field] if (field := first.get("ctx", {}).get("field")) else []
    param = ".".join(map(str, where)) or None
    message = str(first["msg"])
    if first["type"] == "missing":
        return bad_request(f'"{param}" is missing', param)
    if param is None or first["type"] == "edged":
        return bad_request(message if param is None or where == [field] else f'"{param}": {message}', param)
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
