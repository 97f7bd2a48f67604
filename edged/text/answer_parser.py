"""Answers in a model's own form: reasoning, content and tool calls, read by transformers' response parser."""

from __future__ import annotations

import copy
import json
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from transformers.utils.chat_parsing import ResponseParser
from transformers.utils.chat_parsing.response_templates import load_response_template

CALLS = "tool_calls"
REASONING = frozenset({"reasoning_content", "reasoning", "thinking"})
"""Names that response templates have for a model's reasoning."""
_END = "\0"
"""Text that no answer ends with: a mark that may still grow is complete before it."""


class AnswerForm:
    """The form of a model's answers, as a response template of transformers describes it."""

    def __init__(self, template: Mapping[str, Any]) -> None:
        """Raises ValueError that says what is wrong with the template."""
        fields = template.get("fields")
        if not isinstance(fields, dict) or not all(isinstance(field, dict) for field in fields.values()):
            raise ValueError('it has no "fields" that are objects')
        # An answer ends with an end token, which has no text, and a field that is missing is no error.
        fields = {name: {**field, "optional": True} for name, field in fields.items()}
        for field in fields.values():
            if not {"open", "open_pattern"} & field.keys():
                field.pop("close", None)
                field.pop("close_pattern", None)
        self.template = {**template, "fields": fields}
        """The template, with which an answer's marks can be told by others, such as a grammar's maker."""
        plain = {name: field for name, field in fields.items() if name != CALLS}
        self._loaded = load_response_template(self.template)
        self._plain = load_response_template({**self.template, "fields": plain}) if plain else self._loaded
        self.has_calls = CALLS in fields
        self.has_reasoning = bool(REASONING & fields.keys())
        anchors = template.get("start_anchor", [])
        anchors = [re.escape(each) for each in ([anchors] if isinstance(anchors, str) else anchors)]
        self._anchor = re.compile(template.get("start_anchor_pattern") or "|".join(anchors), re.DOTALL)

    def names(self, mark: str) -> bool:
        """Whether the template names a mark, literally or in a pattern."""
        return any(mark in text or mark in text.replace("\\", "") for text in texts_of(self.template))

    @property
    def marks_content(self) -> bool:
        """Whether a mark opens the content, too."""
        return bool({"open", "open_pattern"} & self.template["fields"].get("content", {}).keys())

    @property
    def marks_of_reasoning(self) -> tuple[str, str] | None:
        """The texts before and behind reasoning; None where there is none, or they are no such texts.

        The first is "" where prompts have it. Where contents have a mark, too, reasoning is no part before them.
        """
        if self.marks_content:
            return None
        fields = self.template["fields"]
        for name in REASONING & fields.keys():
            if closed := _mark(fields[name], "close"):
                return _mark(fields[name], "open") or "", closed
        return None

    def begun(self, prompt: str) -> str | None:
        """Return what a prompt has of the answer already; None where no answer begins in it."""
        found = [*self._anchor.finditer(prompt)]
        return prompt[found[-1].end() :] if found else None

    def parser(self, prompt: str, tools: Sequence[Any] | None) -> ResponseParser:
        """Return a parser of the answer to a prompt, of which the end is enough; without `tools` calls are text."""
        start = "" if self.begun(prompt) is None else prompt
        return ResponseParser(self._plain if tools is None else self._loaded, prefix=start, tools=tools)


def _mark(field: Mapping[str, Any], side: str) -> str | None:
    """Return the text that opens or closes a field; "" for none, None where it is any text of a pattern."""
    if side in field:
        return field[side] if isinstance(field[side], str) else None
    plain = re.sub(r"^\\s\*|\\s\*$", "", field.get(f"{side}_pattern", ""))
    text = re.sub(r"\\(.)", r"\1", plain)
    return text if plain in (text, re.escape(text)) else None


def known_templates(tokenizer: Any, model_type: str | None) -> Iterator[Mapping[str, Any]]:
    """Yield response templates that may be those of a model, likeliest first: its own, transformers' and trl's."""
    if isinstance(own := getattr(tokenizer, "response_template", None), dict):
        yield own
    # Neither is part of its package's interface.
    with suppress(ImportError, AttributeError):
        from transformers.cli.serving.utils import _RESPONSE_TEMPLATE_FALLBACKS

        yield from (each for types, each in _RESPONSE_TEMPLATE_FALLBACKS.items() if model_type in types)
    with suppress(ImportError, AttributeError, ValueError):
        from trl.chat_template_utils import add_response_schema

        yield add_response_schema(copy.copy(tokenizer)).response_template


def texts_of(value: Any) -> Iterator[str]:
    """Yield all texts in a JSON value, names of fields too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, each in value.items():
            yield name
            yield from texts_of(each)
    elif isinstance(value, Sequence):
        for each in value:
            yield from texts_of(each)


class ParsedAnswer:
    """An answer that is parsed as it grows: `push` and `finish` return what is new of its content.

    What looks like a call and is none, or is cut, is content as it was generated. The result does not depend on where
    the pieces end.
    """

    def __init__(
        self, form: AnswerForm, prompt: str, tools: Sequence[Any] | None, hidden: re.Pattern[str], closing: str = ""
    ) -> None:
        """`prompt` is the prompt's end with special tokens by name; `hidden` are names that content does not show.

        `closing` is a mark that the answer's end stands for, whatever token that is.
        """
        self.closing = closing
        self.reasoning = ""
        self.calls: list[dict[str, Any]] = []
        """Whole calls, as OpenAI's API has them."""
        self.begun = False
        """Whether content or a call has begun."""
        self.thinking = False
        """Whether the text so far ends within the reasoning."""
        self._form, self._tools, self._hidden = form, tools, hidden
        self._parser = form.parser(prompt, tools)
        self._call: str | None = None
        """The text of a call so far, with its mark."""
        self._space = ""
        """White space behind the reasoning so far."""
        self._gap = ""
        """White space of the content behind a call."""
        self._trims = False
        """Whether white space goes, because the content begins behind reasoning."""
        for event in self._parser.initial_events:
            # What the prompt has of the answer is not told again.
            self._trims |= event["field"] in REASONING
            self.thinking = event["field"] in REASONING and event["type"] != "region_close"

    def push(self, text: str) -> str:
        """Return what is new of the content once the answer has grown by `text`."""
        before = _twin(self._parser)
        with suppress(Exception):  # content parsers raise what they like
            events = self._parser.feed(text)
            if not any(_opens(event) for event in events) and _are_calls(events):
                self._call = (
                    None if any(_closes(event) for event in events) or self._call is None else self._call + text
                )
                return self._hidden.sub("", self._take(events))
        self._parser = before
        return self._hidden.sub("", "".join([self._push_char(char) for char in text]))

    def finish(self) -> str:
        """Return the rest of the content of an answer that has ended."""
        content = self._push_char(_END)
        if self._call is not None:
            # A cut call is none.
            content += self._trimmed(self._call.removesuffix(_END))
        else:
            content += self._take(self._parser.finalize()[1])
        return self._hidden.sub("", content)

    def _push_char(self, char: str) -> str:
        held = self._parser._buffer[self._parser._pos :]
        try:
            events = self._parser.feed(char)
            if not _are_calls(events):
                raise ValueError
        except Exception:
            raw = held if self._call is None else self._call
            self._parser, self._call, self.thinking = self._form.parser("", self._tools), None, False
            return self._trimmed(raw) + self.push(char)
        opening = next((at for at, event in enumerate(events) if _opens(event)), None)
        if opening is not None:
            self._call = (held + char)[sum(len(event.get("text", "")) for event in events[:opening]) :]
        elif self._call is not None:
            self._call = None if any(map(_closes, events)) else self._call + char
        return self._take(events)

    def _take(self, events: Sequence[Mapping[str, Any]]) -> str:
        """Add what the parser found; return the content."""
        content = ""
        for event in events:
            field, kind, chunk = event["field"], event["type"], event.get("text", "").removesuffix(_END)
            if field in REASONING:
                self._trims, self.thinking = True, kind != "region_close"
                if kind == "region_open" and self.reasoning:
                    self._space = "\n"
                elif kind == "region_chunk":
                    text = self._space + chunk if self.reasoning else chunk.lstrip()
                    self.reasoning += text.rstrip()
                    self._space = text[len(text.rstrip()) :]
            elif field == CALLS and kind == "region_close":
                self._gap = ""
                self.calls += [_told(call) for call in _calls_of(event["value"])]
                self.begun = True
            elif field == "content" and kind == "region_chunk":
                content += self._trimmed(chunk)
        return content

    def _trimmed(self, text: str) -> str:
        """Return text of the content without white space behind the reasoning."""
        if self._trims and not self.begun:
            text = text.lstrip()
        if self.calls:
            # White space around calls is the form's, where no text follows.
            text, self._gap = self._gap + text, ""
            if text.isspace():
                text, self._gap = "", text
        self.begun |= bool(text)
        return text


def _twin(parser: ResponseParser) -> ResponseParser:
    """Return a parser in the same state."""
    twin = object.__new__(type(parser))
    twin.__dict__.update(parser.__dict__)
    return twin


def _opens(event: Mapping[str, Any]) -> bool:
    return bool(event["field"] == CALLS and event["type"] == "region_open")


def _closes(event: Mapping[str, Any]) -> bool:
    return bool(event["field"] == CALLS and event["type"] == "region_close")


def _calls_of(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _are_calls(events: Sequence[Mapping[str, Any]]) -> bool:
    """Whether all that was closed as a call has the shape of one."""
    for event in filter(_closes, events):
        for call in _calls_of(event["value"]):
            function = call.get("function") if isinstance(call, dict) else None
            if not isinstance(function, dict) or not isinstance(function.get("arguments"), dict):
                return False
            if not isinstance(function.get("name"), str) or not function["name"]:
                return False
    return True


def _told(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call as the API tells it."""
    name, arguments = call["function"]["name"], json.dumps(call["function"]["arguments"], ensure_ascii=False)
    function = {"name": name, "arguments": arguments}
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}
