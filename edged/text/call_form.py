"""Text around the calls and the reasoning of answers, so that a grammar can have a model call tools in its own form."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edged.text.answer_parser import CALLS, REASONING, AnswerForm

SAMPLES = ("marked_one", "first"), ("marked_two", "second")
"""Names and values of the calls that `find_call_form` looks for."""
PLAIN_NAME = re.compile(r"[\w.-]+", re.ASCII)
"""Names that every form writes as they are."""


@dataclass(frozen=True, slots=True)
class CallForm:
    """The text around the names and the JSON arguments of calls.

    An answer is `head`, a name, `middle`, arguments, then for each further call `between`, a name, `middle` and
    arguments, then `tail`. `form` reads it.
    """

    form: AnswerForm
    head: str
    middle: str
    between: str
    """"" where an answer has one call."""
    tail: str
    closing: str = ""
    """The name of the end token behind it, which some forms know a call's end by."""
    own: bool = True
    """Whether it is the form that the model's chat template writes."""


def plain_call_form(form: AnswerForm | None) -> CallForm:
    """Return the form of a model whose own has no JSON: an object of `name` and `arguments` between Hermes' marks.

    Reasoning is as in the model's `form`, if it has one.
    """
    calls: dict[str, Any] = {"open": "<tool_call>", "close": "</tool_call>", "repeats": True, "content": "json"}
    calls["transform"] = {"type": "function", "function": "{content}"}
    template: dict[str, Any] = dict(form.template) if form is not None else {"start_anchor_pattern": "$"}
    known = {name: field for name, field in template.get("fields", {}).items() if name in REASONING}
    template["fields"] = {**known, CALLS: calls, "content": {"content": "text"}}
    head = '<tool_call>\n{"name": "'
    tail = "}\n</tool_call>"
    return CallForm(AnswerForm(template), head, '", "arguments": ', f"{tail}\n{head}", tail, own=False)


def find_call_form(form: AnswerForm, written: str, ends: re.Pattern[str]) -> CallForm | None:
    """Return the form of the calls of `SAMPLES`, or of the first of them, in an answer that a chat template wrote.

    None where arguments are no JSON, or other text depends on the call. `ends` is a group: names of end tokens.
    """
    parts = re.split("(" + "|".join(rf'\b{name}\b|{{"key":\s*"{value}"}}' for name, value in SAMPLES) + ")", written)
    around, marks = parts[::2], parts[1::2]
    single = len(marks) == 2
    if len(marks) not in (2, 4) or [mark[:1] == "{" for mark in marks] != [False, True] * (len(marks) // 2):
        return None
    head, middle, *further = around
    if not single and further[1] != middle:
        return None
    if (reasoning := form.marks_of_reasoning) is not None:
        head = head.rpartition(reasoning[1])[2].lstrip()
    tail, closing, _ = (*ends.split(further[-1], maxsplit=1), "", "")[:3]
    closing = closing if closing and form.names(closing) else ""
    return CallForm(form, head, middle, "" if single else further[0], tail.rstrip(), closing)


def rules_of_calls(
    form: CallForm, tools: Sequence[tuple[str, Mapping[str, Any]]], most: int, must: bool, write: Callable[[str], str]
) -> str:
    """Return Lark rules of calls to tools, each a name with the JSON schema of its arguments.

    `calls` is an answer that has them, at most `most`; unless they `must` come, it is any text with calls in it.
    `write` returns a text as Lark has it.
    """
    most = most if form.between else 1
    further = f"({write(form.between)} call){{0,{most - 1}}}" if most > 1 else ""
    rules = [f"call: {' | '.join(f'tool_{number}' for number in range(len(tools)))}"]
    for number, (name, schema) in enumerate(tools):
        rules.append(f"tool_{number}: {write(name + form.middle)} %json {json.dumps(schema)}")
    head, line, rest = form.head.partition("\n")
    if must:
        rules.append(f"calls: {write(form.head)} call {further} {write(form.tail)}")
    else:
        # Behind a call like the first, text may begin as `between` does.
        further = "" if form.between.endswith(form.head) else further
        rules.append(f"calls: (opened {write(line + rest)} call {further} {write(form.tail)})* TEXT")
        rules.append(f"opened{_lazy(write(head))}: TEXT {write(head)}")
    return "\n".join(rules)


def rules_before(reasoning: tuple[str, str, bool] | None, write: Callable[[str], str]) -> str:
    """Return the Lark rule `before`: reasoning by its marks, which must come where it has begun, or nothing."""
    if reasoning is None:
        return 'before: ""'
    opened, closed = map(write, reasoning[:2])
    thought = r"thought /[ \n]{0,2}/"
    before = thought if reasoning[2] else f"({opened} {thought})?"
    return f"before: {before}\nthought{_lazy(closed)}: TEXT {closed}"


def _lazy(mark: str) -> str:
    """Return the option of a rule that ends at a mark; special tokens are no text, and no lazy match ends at one."""
    return "[lazy]" if mark.startswith('"') else ""
