"""Bodies of `POST /v1/responses`: what is asked, as the chat request that it is, and OpenAI's answer.

A response is stateless: the whole conversation is in `input`, and an answer is known by its id to feedback alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag

from edged.api.requests import (
    AnswerTokens,
    Body,
    CalledFunction,
    ChatRequest,
    FunctionName,
    FunctionTool,
    GenerationRequest,
    QoeRequest,
    SchemaFormat,
    TextPart,
)
from edged.api.responses import Answer, CompletionTokenDetails, PromptTokenDetails, TokenLogprobs
from edged.http.errors import ApiError
from edged.settings.access import refuse

LOGPROBS = "message.output_text.logprobs"
"""The entry of `include` that asks for log-probabilities."""
_FAIL_FAST = Field(fail_fast=True)
_MAX_ITEMS = 10_000
_MAX_TOOLS = 128
_NAMES = (
    (re.compile(r"^messages\b.*"), "input"),
    (re.compile(r"^response_format(\.json_schema)?\b"), "text.format"),
    (re.compile(r"^(tools(\.\d+)?|tool_choice)\.function\b"), r"\1"),
    (re.compile(r"^max_(completion_)?tokens$"), "max_output_tokens"),
    (re.compile(r"^reasoning_effort$"), "reasoning.effort"),
)
"""Fields of a chat, and their names here."""


def _nothing(otherwise: str) -> BeforeValidator:
    """Return a validator of a field that may ask for nothing; `otherwise` says why and what to do."""

    def check(value: Any) -> Any:
        return refuse(otherwise) if value else None

    return BeforeValidator(check)


def _few(most: int, what: str) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if isinstance(value, list) and len(value) > most:
            refuse(f"{len(value)} {what} are too many: at most {most}")
        return value

    return check


_NOT_KEPT = _nothing('no response is kept here: send the whole conversation as "input"')
_Nothing = Annotated[None, _NOT_KEPT]


class ReasoningPart(Body):
    """One part of a model's reasoning."""

    text: str


Parts = str | Annotated[list[TextPart], _FAIL_FAST]


def _joined(parts: Parts) -> str:
    return parts if isinstance(parts, str) else "\n".join(part.said or "" for part in parts)


class InputMessage(Body):
    """One turn of a conversation."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Parts

    @property
    def turn(self) -> dict[str, Any]:
        """The turn as a chat has it."""
        return {"role": self.role, "content": _joined(self.content)}


class InputCall(CalledFunction):
    """A call that an answer made."""

    type: Literal["function_call"]
    call_id: Annotated[str, Field(max_length=256)]

    @property
    def turn(self) -> dict[str, Any]:
        """The turn as a chat has it."""
        call = {"id": self.call_id, "function": {"name": self.name, "arguments": self.arguments}}
        return {"role": "assistant", "tool_calls": [call]}


class InputCallOutput(Body):
    """The result of a function."""

    type: Literal["function_call_output"]
    call_id: Annotated[str, Field(max_length=256)]
    output: Parts

    @property
    def turn(self) -> dict[str, Any]:
        """The turn as a chat has it."""
        return {"role": "tool", "tool_call_id": self.call_id, "content": _joined(self.output)}


class InputReasoning(Body):
    """The reasoning before an answer."""

    type: Literal["reasoning"]
    content: Annotated[list[ReasoningPart], _FAIL_FAST] | None = None
    summary: Annotated[list[ReasoningPart], _FAIL_FAST] | None = None

    @property
    def turn(self) -> dict[str, Any]:
        """The turn as a chat has it."""
        text = "\n".join(part.text for part in self.content or self.summary or ())
        return {"role": "assistant", "reasoning_content": text}


def _kind(item: Any) -> str | None:
    kind = item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", None)
    return f"[{kind}]" if isinstance(kind, str) else None


InputItem = Annotated[
    Annotated[InputMessage, Tag("[message]")]
    | Annotated[InputCall, Tag("[function_call]")]
    | Annotated[InputCallOutput, Tag("[function_call_output]")]
    | Annotated[InputReasoning, Tag("[reasoning]")],
    Discriminator(
        _kind,
        custom_error_type="edged",
        custom_error_message="is no message, function_call, function_call_output or reasoning: leave it out, or send"
        ' the item that it names, as clients do with "store": false',
    ),
]


class ResponseTool(FunctionTool):
    """A function that the answer may call; tools of other types are left out."""

    type: Literal["function"]


class NamedResponseTool(Body):
    """The form of `tool_choice` that names a function."""

    type: Literal["function"]
    name: FunctionName

    @property
    def of_chat(self) -> dict[str, Any]:
        """The form that a chat has for it."""
        return {"type": "function", "function": {"name": self.name}}


class TextForm(SchemaFormat):
    """The form of the answer's text."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    schema_: Any = Field(None, alias="schema", json_schema_extra={"type": "object"})


class ResponseText(Body):
    """OpenAI's `text`."""

    format: TextForm | None = None


class ResponseReasoning(Body):
    """OpenAI's `reasoning`."""

    effort: Annotated[str, Field(max_length=32)] | None = None


def _functions(tools: Any) -> Any:
    """Leave out tools that are no functions."""
    return [tool for tool in tools if _is_function(tool)] if isinstance(tools, list) else tools


def _is_function(tool: Any) -> bool:
    return not isinstance(tool, dict) or not isinstance(kind := tool.get("type"), str) or kind == "function"


def _function_alone(choice: Any) -> Any:
    if isinstance(choice, dict) and choice.get("type") != "function":
        refuse('names no function: give none, auto, required or {"type": "function", "name"}')
    return choice


def _some(items: Any) -> Any:
    return items or refuse("is empty")


class ResponsesRequest(GenerationRequest):
    """`POST /v1/responses`; further fields are those of chats."""

    input: Annotated[
        str | Annotated[list[InputItem], _FAIL_FAST, BeforeValidator(_few(_MAX_ITEMS, "items"))], AfterValidator(_some)
    ]
    instructions: str | None = None
    max_output_tokens: AnswerTokens = None
    tools: Annotated[
        list[ResponseTool] | None, BeforeValidator(_functions), BeforeValidator(_few(_MAX_TOOLS, "tools"))
    ] = None
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | Annotated[NamedResponseTool, Tag("[named]")] | None,
        BeforeValidator(_function_alone),
    ] = None
    parallel_tool_calls: bool | None = None
    text: ResponseText | None = None
    reasoning: ResponseReasoning | None = None
    include: Annotated[list[str], Field(max_length=16)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    qoe: QoeRequest | None = QoeRequest()
    chat_template_kwargs: dict[str, str | int | float | bool | None] | None = None
    store: Annotated[Literal[False] | None, _NOT_KEPT] = None
    previous_response_id: _Nothing = None
    conversation: _Nothing = None
    prompt: Annotated[None, _nothing('no prompts are kept here: send "instructions" and "input"')] = None
    background: Annotated[Literal[False] | None, _nothing("an answer is made while the client waits: leave it out")] = (
        None
    )
    n: Annotated[int, Field(ge=1, le=1)] | None = None
    response_format: Annotated[None, _nothing('is sent as "text.format" here')] = None
    resume: Annotated[None, _nothing("is for chats of a fleet: leave it out")] = None

    @classmethod
    def _unread(cls, body: dict[str, Any]) -> tuple[str, ...]:
        given = {name: body.get(name) or {} for name in ("text", "reasoning")}
        known = {"text": ResponseText.model_fields, "reasoning": ResponseReasoning.model_fields}
        unread = [f"{name}.{each}" for name, value in given.items() for each in value if each not in known[name]]
        left_out = dict.fromkeys(f"tools.{tool['type']}" for tool in body.get("tools") or () if not _is_function(tool))
        asked_for = ["include"] if set(body.get("include") or ()) - {LOGPROBS} else []
        return (*left_out, *unread, *asked_for)

    @property
    def wants_logprobs(self) -> bool:
        """Whether the answer is to have log-probabilities."""
        return self.top_logprobs is not None or LOGPROBS in (self.include or ())

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The conversation as a chat has it: what the model made at once is one turn."""
        turns: list[dict[str, Any]] = []
        if self.instructions:
            turns.append({"role": "system", "content": self.instructions})
        items: list[dict[str, Any]] = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else []
        items += [item.turn for item in self.input if not isinstance(item, str)]
        for at, turn in enumerate(items):
            last = turns[-1] if turns else {}
            if at == 0 and last and turn["role"] in ("system", "developer"):
                # Some templates take one system turn alone.
                last["content"] += f"\n\n{turn['content']}"
            elif last.get("role") == turn["role"] == "assistant" and _goes_on(last, turn):
                last["tool_calls"] = last.get("tool_calls", []) + turn.pop("tool_calls", [])
                last.update(turn)
            else:
                turns.append(turn)
        return turns

    def body_of_chat(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return the body of the chat that this asks for; `given` is the body that this was made of."""
        form, choice = self.text.format if self.text else None, self.tool_choice
        own: dict[str, Any] = {
            "messages": self.messages,
            "tools": self.tools
            and [{"type": "function", "function": tool.model_dump(exclude={"type"})} for tool in self.tools],
            "tool_choice": choice.of_chat if isinstance(choice, NamedResponseTool) else choice,
            "reasoning_effort": self.reasoning and self.reasoning.effort,
            "logprobs": self.wants_logprobs or None,
            "max_completion_tokens": self.max_output_tokens,
            "response_format": None,
        }
        if form is not None:
            schema = form.model_dump(by_alias=True, exclude={"type"}, exclude_none=True)
            own["response_format"] = {"type": form.type} | (
                {"json_schema": schema} if form.type == "json_schema" else {}
            )
        shared = given.keys() & ChatRequest.model_fields.keys() & type(self).model_fields.keys()
        return {name: given[name] for name in shared - own.keys()} | {name: each for name, each in own.items() if each}


def _goes_on(last: dict[str, Any], turn: dict[str, Any]) -> bool:
    """Whether what follows an assistant's turn is of the same answer."""
    return "reasoning_content" not in turn and not ("content" in turn and "content" in last)


class ResponseChat(ChatRequest):
    """The chat that a response is."""

    id_prefix: ClassVar[str] = "resp_"
    _asked: ResponsesRequest

    @classmethod
    def of(cls, body: dict[str, Any]) -> ResponseChat:
        """Validate the body of a response, and return its chat. Raises ApiError that names the field at fault."""
        asked = ResponsesRequest.checked(body)
        try:
            chat = cls.checked(asked.body_of_chat(body))
        except ApiError as error:
            raise cls.renamed(error) from None
        chat._asked = asked
        return chat

    @property
    def asked(self) -> ResponsesRequest:
        """The request for the response."""
        return self._asked

    @property
    def ignored(self) -> str:
        """The first names of fields that have no effect, for a header."""
        return ", ".join(filter(None, [self._asked.ignored, *map(self.named, self._ignored)]))

    @classmethod
    def named(cls, field: str) -> str:
        """Return the name that the client knows a field by."""
        for pattern, name in _NAMES:
            field = pattern.sub(name, field)
        return field

    @classmethod
    def renamed(cls, error: ApiError) -> ApiError:
        """Return an error about a chat as one about the response."""
        if error.param is not None and (name := cls.named(error.param)) != error.param:
            error.message, error.param = error.message.replace(f'"{error.param}"', f'"{name}"'), name
        return error


class OutputPart(Answer):
    """A part of an answer's text or of its reasoning."""

    type: Literal["output_text", "reasoning_text"]
    text: str
    logprobs: list[TokenLogprobs] = Field(default_factory=list)


class OutputItem(Answer):
    """Reasoning, the answer's message or a call; a call has `call_id`, `name` and `arguments`."""

    id: str
    type: Literal["reasoning", "message", "function_call"]
    status: Literal["completed", "incomplete"]
    content: list[OutputPart] = Field(default_factory=list)
    call_id: str = ""
    name: str = ""
    arguments: str = ""


class IncompleteDetails(Answer):
    """Why an answer is not whole."""

    reason: Literal["max_output_tokens"]


class ResponseUsage(Answer):
    """Tokens of the prompt and of the answer."""

    input_tokens: int
    input_tokens_details: PromptTokenDetails
    output_tokens: int
    output_tokens_details: CompletionTokenDetails
    total_tokens: int


class Response(Answer):
    """OpenAI's response. `system_fingerprint` names the weights, as a chat completion's does."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete"]
    incomplete_details: IncompleteDetails | None
    model: str
    output: list[OutputItem]
    usage: ResponseUsage
    store: Literal[False]
    service_tier: Literal["default", "flex"]
    system_fingerprint: str
