"""Chats as the model's chat template gets them: messages, the tools that are offered, further arguments."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from edged.api.requests import ChatRequest
from edged.api.services import Services
from edged.http.errors import ApiError, bad_request
from edged.text.answer_parser import texts_of
from edged.text.call_form import PLAIN_NAME
from edged.text.grammar import Constraint
from edged.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ChatTurns:
    """A chat as the chat template gets it."""

    messages: tuple[dict[str, Any], ...]
    arguments: dict[str, Any] | None
    """The template's arguments beside the messages; None for none."""
    ignored: tuple[str, ...]
    """Names of fields that have no effect with this model."""
    constraint: Constraint | None = None
    """The constraint on the answers, if there is one."""

    @property
    def chars(self) -> int:
        """The characters in it, about."""
        plain = sum(len(message["content"]) for message in self.messages)
        return plain + sum(len(text) for text in texts_of([self.arguments or {}, *map(_rest, self.messages)]))


def chat_turns(services: Services, body: ChatRequest) -> ChatTurns:
    """Return a chat with what the model's chat template reads of it. Raises ApiError.

    Contents are encoded apart from special tokens. Names, descriptions and arguments are not: templates write them in
    forms of their own.
    """
    tokenizer = services.tokenizer
    messages = tuple(message.plain() for message in body.messages)
    called: dict[str, str] = {}
    for at, message in enumerate(messages):
        for number, call in enumerate(message.get("tool_calls", ())):
            _demand_no_mark(tokenizer, call, f"messages.{at}.tool_calls.{number}.function")
            called[call["id"]] = call["function"]["name"]
        if message.get("tool_call_id") in called:
            message["name"] = called[message["tool_call_id"]]
    arguments, ignored = _arguments(tokenizer, body)
    tools = body.offered
    for at, tool in enumerate(tools):
        _demand_no_mark(tokenizer, tool, f"tools.{at}.function")
    if (tools or called) and not tokenizer.writes_tools:
        if tools and (body.called or services.settings.api.tools_without_template == "refuse"):
            told = "the model's chat template cannot write tools: leave them out, or serve a model whose template can"
            if not body.called:
                told += ', or set api.tools_without_template = "ignore"'
            raise ApiError(400, told, param="tools", code="tools_not_in_template")
        ignored += [*["tools"] * bool(tools), *["messages.tool_calls"] * bool(called)]
    elif tools:
        arguments["tools"] = tools
    constraint = _constraint(tokenizer, body, "tools" in arguments)
    if "tools" in arguments and any(tool.function.strict for tool in body.tools or ()):
        ignored += [] if constraint is not None and constraint.calls is not None else ["tools.function.strict"]
    return ChatTurns(messages, arguments or None, tuple(ignored), constraint)


def _constraint(tokenizer: Tokenizer, body: ChatRequest, offered: bool) -> Constraint | None:
    """Return the constraint on the answers: where tools are `offered`, calls may come in place of what it says."""
    given = body.constraint
    if not offered or body.called:
        return given
    form = tokenizer.call_form
    free = not (body.ignore_eos or body.min_tokens or form.form.marks_content)
    strict = any(tool.function.strict for tool in body.tools or ())
    if not form.own or not (given or (strict and free)):
        return given
    plain = all(PLAIN_NAME.fullmatch(tool.function.name) for tool in body.tools or ())
    return replace(given or Constraint("text", "", "tools"), calls=body.calls(body.tools or ())) if plain else given


def _arguments(tokenizer: Tokenizer, body: ChatRequest) -> tuple[dict[str, Any], list[str]]:
    """Return the arguments that the chat template names, and what it does not."""
    given = {name: value for name, value in (body.chat_template_kwargs or {}).items() if value is not None}
    ignored = [f"chat_template_kwargs.{name}" for name in given if not tokenizer.takes(name)]
    arguments = {name: value for name, value in given.items() if tokenizer.takes(name)}
    if (effort := body.reasoning_effort) is not None:
        ways: dict[str, Any] = {"reasoning_effort": effort} | ({"enable_thinking": False} if effort == "none" else {})
        taken = {name: value for name, value in ways.items() if tokenizer.takes(name)}
        # What the request gives by the template's own name goes before.
        arguments = taken | arguments
        ignored += [] if taken else ["reasoning_effort"]
    for name, value in arguments.items():
        _demand_no_mark(tokenizer, value, f"chat_template_kwargs.{name}")
    return arguments, ignored


def _demand_no_mark(tokenizer: Tokenizer, value: Any, field: str) -> None:
    if mark := next(filter(None, map(tokenizer.special_in, texts_of(value))), ""):
        raise bad_request(f'"{field}" names the special token "{mark}" of this model: write it in other words', field)


def _rest(message: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in message.items() if name not in ("role", "content")}
