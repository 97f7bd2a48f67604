"""Rows of fine-tuning and preference files: which of their fields make a prompt and its answers, told by their values.

A field without a value (null) is not there. Shapes are OpenAI's, TRL's, LLaMA-Factory's, and those of sets on the hub.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Literal, cast

Pair = dict[str, Any]
Kind = Literal["preferences", "answers", "ratings"]
MAX_MESSAGES = 1024
"""Messages of a conversation."""

_COMPARED: dict[tuple[str, str], tuple[str, dict[Any, bool]]] = {
    ("human_ref_A", "human_ref_B"): ("labels", {1: True, 0: False}),
    ("response_0", "response_1"): ("better_response_id", {0: True, 1: False}),
    ("response_1", "response_2"): ("preference_strength", {number: number < 0 for number in (-3, -2, -1, 1, 2, 3)}),
    ("response1", "response2"): ("overall_preference", {number: number < 0 for number in (-3, -2, -1, 1, 2, 3)}),
    ("conversation_a", "conversation_b"): ("winner", {"model_a": True, "model_b": False}),
}
"""The fields of two answers, the field that decides between them, and for which of its values the first is better.

Those of SHP, PKU-SafeRLHF, HelpSteer 2 and 3, and Chatbot Arena.
"""
_REFUSED = {
    frozenset(("answers", "prompt")): "Nectar's ranked answers",
    frozenset(("answers", "question")): "stack-exchange-preferences' scored answers",
    frozenset(("answer_0", "answer_1")): "WebGPT's scored answers",
    frozenset(("summaries", "choice")): "summarize_from_feedback's comparisons",
    frozenset(("message_tree_id", "text")): "OpenAssistant's single messages",
    frozenset(("completions", "instruction")): "UltraFeedback's scored completions",
}
"""Fields of shapes that do not say, by themselves, what a prompt and its answers are."""
_SYSTEM = ("system", "system_prompt")
_CHATS = ("prompt", "messages", "conversations", "conversation", "trajectory", "context")
_TEXTS = ("question", "instruction", "history", "input", "context")
"""Fields of a prompt as a conversation, and as texts: one of these, or `instruction` with one of the last two."""
_ANSWERS = ("completion", "output", "response", "answer")
_ROLES = {"developer": "system", "human": "user", "gpt": "assistant", "Human": "user", "Assistant": "assistant"}
_TURN = re.compile(r"\n\n(Human|Assistant):")


class FormatError(ValueError):
    """A row that cannot be learned from; the message says what it lacks."""


@dataclass(frozen=True, slots=True)
class Example:
    """The pairs of a row: `shape` is the field that tells its shape, `taken` what was read otherwise than usual."""

    shape: str
    kind: Kind
    pairs: list[Pair]
    taken: str = ""


def parse_row(row: Pair) -> Example:
    """Return what a row teaches. Raises FormatError."""
    row = {name: value for name, value in row.items() if value is not None}
    for name in ("tools", "functions", "parallel_tool_calls"):
        if row.get(name):
            raise FormatError(f'"{name}" is not supported: this model reads and writes text only')
    if isinstance(row.get("input"), dict) or "preferred_output" in row:
        return Example("input", "preferences", [_parse_openai(row)])
    decided = ""
    for (one, other), (field, verdicts) in _COMPARED.items():
        if "chosen" not in row and {one, other, field} <= row.keys():
            first = [better for value, better in verdicts.items() if value == row[field]]
            if not first:
                raise FormatError(f'"{field}" is {row[field]!r:.40}, which prefers no answer: leave the line out')
            chosen, rejected = (one, other) if first[0] else (other, one)
            row = {**row, "chosen": row[chosen], "rejected": row[rejected]}
            decided = f'"{field}" decides between "{one}" and "{other}"'
    if "chosen" in row or "rejected" in row:
        pair, taken = _parse_preference(row)
        return Example("chosen", "preferences", [checked_pair(pair)], "; ".join(filter(None, (taken, decided))))
    for fields, about in _REFUSED.items():
        if fields <= row.keys():
            raise FormatError(f'it is one of {about}: write rows of "prompt", "chosen" and "rejected"')
    chat = next((name for name in _CHATS[1:4] if isinstance(row.get(name), list)), "messages")
    if "completion" not in row and chat in row:
        return Example(chat, "answers", *_parse_chat(row, chat))
    name = next((name for name in _ANSWERS if name in row), "")
    if not name:
        found = ", ".join(f'"{name}"' for name in list(row)[:8]) or "none"
        raise FormatError(f'it has none of the fields "messages", "completion", "chosen" or "rejected", it has {found}')
    pair, taken = _parse_answer(row, name)
    if name != "completion" or "label" not in row:
        return Example(name, "answers", [pair], taken)
    if not isinstance(row["label"], bool):
        raise FormatError(f'"label" is {row["label"]!r:.40}: it may be true or false')
    bad = {**pair, "chosen": "", "rejected": pair["chosen"]}
    return Example("label", "ratings", [pair if row["label"] else bad], taken)


# -- a row's parts -----------------------------------------------------------------------------------------------------


def messages_of(value: Any, name: str, least: int = 0) -> list[dict[str, Any]]:
    """Return the roles and texts of a conversation, whose texts may be in parts. Raises FormatError."""
    if not isinstance(value, list):
        raise FormatError(f'"{name}" is {type(value).__name__}, not a list of messages')
    if not least <= len(value) <= MAX_MESSAGES:
        raise FormatError(f'"{name}" has {len(value)} messages: it may have 1 to {MAX_MESSAGES}')
    return [_message(message, name) for message in value]


def _message(message: Any, name: str) -> dict[str, Any]:
    """Return a message of OpenAI's, or of ShareGPT's (`from` and `value`)."""
    said = {key: value for key, value in message.items() if value is not None} if isinstance(message, dict) else {}
    role, content = said.get("role", said.get("from")), said.get("content", said.get("value"))
    if isinstance(content, list):
        content = "\n".join(map(_part_text, content))
    if not isinstance(role, str) or not isinstance(content, str):
        raise FormatError(f'"{name}" has a message without "role" and "content" texts')
    role = _ROLES.get(role, role)
    if role not in ("system", "user", "assistant") or said.get("tool_calls"):
        raise FormatError(f'"{name}" has a message of role "{role[:40]}" or with a tool call')
    return {"role": role, "content": content}


def _part_text(part: Any) -> str:
    kind, text = (part.get("type"), part.get("text")) if isinstance(part, dict) else (type(part).__name__, None)
    if kind not in ("text", "input_text") or not isinstance(text, str):
        raise FormatError(f'content part of type "{str(kind)[:40]}" is not supported: this model reads text only')
    return text


def text_of(row: Pair, name: str) -> str:
    """Return a field that is a text. Raises FormatError."""
    value = row.get(name)
    if not isinstance(value, str):
        found = "is missing" if name not in row else f"is {type(value).__name__}, not a string"
        raise FormatError(f'"{name}" {found}')
    return value


def answer_of(messages: list[dict[str, Any]], name: str) -> str:
    """Return the text of the one assistant message that a field adds. Raises FormatError."""
    if len(messages) != 1 or messages[0]["role"] != "assistant":
        roles = ", ".join(message["role"] for message in messages) or "nothing"
        raise FormatError(f'"{name}" must add one assistant message to the prompt, it adds: {roles}')
    return str(messages[0]["content"])


def checked_pair(pair: Pair) -> Pair:
    """Return a pair whose answers are neither empty nor equal. Raises FormatError."""
    chosen, rejected = pair["chosen"].strip(), pair["rejected"].strip()
    if not (chosen and rejected):
        raise FormatError(f'the answer of "{"rejected" if chosen else "chosen"}" is empty')
    if chosen == rejected:
        raise FormatError("the chosen and the rejected answer are equal")
    return pair


def made_pair(name: str, before: Any, chosen: str, rejected: str) -> Pair:
    """Return a pair about a prompt or messages. Raises FormatError where that is empty."""
    if not before:
        raise FormatError(f"the {'prompt' if name == 'prompt' else 'conversation before the answers'} is empty")
    return {name: before, "chosen": chosen, "rejected": rejected}


def _asked(row: Pair) -> tuple[Pair, str]:
    """Return a row's prompt as `prompt` or `messages`, or nothing, and what it was made of if that is no such field."""
    system = next((name for name in _SYSTEM if isinstance(row.get(name), str) and row[name].strip()), "")
    texts = [name for name in ("prompt", *_TEXTS) if isinstance(row.get(name), str) and row[name].strip()]
    texts = ["prompt"] if "prompt" in texts else texts
    chat = next((name for name in _CHATS if isinstance(row.get(name), list) and texts != ["prompt"]), "")
    if chat:
        messages = messages_of(row[chat], chat)
        system = "" if messages and messages[0]["role"] == "system" else system
        texts = [] if chat in ("prompt", "messages") and not system else [chat]
    elif texts == ["prompt"] and not system:
        return {"prompt": row["prompt"]}, ""
    elif texts:
        if texts[1:] and texts not in (["instruction", "input"], ["instruction", "context"]):
            named = " and ".join(f'"{name}"' for name in texts)
            raise FormatError(f'{named} may each be the prompt: name that "prompt"')
        if isinstance(row.get("history"), list) and row["history"]:
            raise FormatError('it has turns in "history": write all as "messages"')
        messages = [{"role": "user", "content": "\n".join(row[name] for name in texts)}]
    elif "prompt_ids" in row:
        raise FormatError("its prompt is known in tokens alone: `edged feedback import` takes it")
    else:
        return {"prompt": text_of(row, "prompt")} if "prompt" in row else {}, ""
    if system:
        messages, texts = [{"role": "system", "content": row[system]}, *messages], [system, *texts]
    told = " and ".join(f'"{name}"' for name in texts)
    return {"messages": messages}, f"the prompt is {told}" if told else ""


def _as_chat(before: Pair) -> list[dict[str, Any]]:
    return [{"role": "user", "content": before["prompt"]}] if before.get("prompt") else before.get("messages", [])


# -- shapes ------------------------------------------------------------------------------------------------------------


def _parse_openai(row: Pair) -> Pair:
    """Parse OpenAI's preference: `input.messages`, `preferred_output` and `non_preferred_output`."""
    asked = row.get("input")
    if not isinstance(asked, dict) or asked.get("tools"):
        raise FormatError('"input" must be an object with "messages" and without tools')
    messages = messages_of(asked.get("messages"), "input.messages", 1)
    sides = {"chosen": "preferred_output", "rejected": "non_preferred_output"}
    answers = {side: answer_of(messages_of(row.get(name), name, 1), name) for side, name in sides.items()}
    return checked_pair({"messages": messages, **answers})


def _parse_chat(row: Pair, name: str) -> tuple[list[Pair], str]:
    """Parse a chat: every assistant turn is scored, unless its `weight` is 0."""
    messages_of(row[name], name, 1)
    asked, taken = _asked({each: row[each] for each in (name, *_SYSTEM) if each in row})
    messages, pairs, turns = asked["messages"], [], 0
    system = len(messages) - len(row[name])
    for index, turn in enumerate(row[name]):
        before, message = messages[: index + system], messages[index + system]
        weight = 1 if turn.get("weight") is None else turn["weight"]
        if weight not in (0, 1) or isinstance(weight, bool):
            raise FormatError(f'"weight" of message {index + 1} is {weight!r}: it may be 0 or 1')
        if message["role"] == "assistant":
            turns += 1
            if weight and not message["content"].strip():
                raise FormatError(f"the assistant's turn in message {index + 1} is empty")
            if weight and not index:
                raise FormatError("the conversation before the first answer is empty")
            if weight:
                pairs.append({"messages": before, "chosen": message["content"]})
    if not pairs:
        raise FormatError("no assistant turn is scored: all have weight 0" if turns else "there is no assistant turn")
    return pairs, taken


def _parse_answer(row: Pair, name: str) -> tuple[Pair, str]:
    """Parse a prompt with one answer, as texts or as messages."""
    before, taken = _asked(row)
    if isinstance(row[name], list):
        before, answer = {"messages": _as_chat(before)}, answer_of(messages_of(row[name], name, 1), name)
    else:
        answer = text_of(row, name)
    if not any(before.values()):
        raise FormatError("the prompt is empty")
    if not answer.strip():
        raise FormatError(f"the {name} is empty")
    return {**before, "chosen": answer}, taken


def _parse_preference(row: Pair) -> tuple[Pair, str]:
    """Parse two answers to a prompt, which may be the common start of both, as in trl.maybe_extract_prompt."""
    names, start = ("chosen", "rejected"), 'the prompt is the common start of "chosen" and "rejected"'
    sides = [[row[name]] if isinstance(row.get(name), dict) else row.get(name) for name in names]
    if all(isinstance(side, str) for side in sides):
        good, bad = cast(list[str], sides)
        before, taken = _asked(row)
        if before:
            return made_pair(*next(iter(before.items())), good, bad), taken
        if good.startswith("\n\nHuman:") and bad.startswith("\n\nHuman:"):
            return parse_hh(row), "it is a dialogue of HH-RLHF"
        # A space between prompt and answers belongs to the answers, as in trl.extract_prompt.
        same = len(good[: _common(good, bad)].removesuffix(" "))
        if not same:
            found = ", ".join(f'"{name}"' for name in row if name not in names)[:80] or "no other field"
            raise FormatError(
                f'the prompt is empty: both sides begin differently; if it is in {found}, name that "prompt"'
            )
        return made_pair("prompt", good[:same], good[same:], bad[same:]), start
    if not all(isinstance(side, list) for side in sides):
        raise FormatError('it needs "chosen" and "rejected", both as texts or both as lists of messages')
    chats = [messages_of(side, name) for side, name in zip(sides, names, strict=True)]
    same = 0 if isinstance(row.get("prompt"), list) else _common(*chats)
    system = {name: row[name] for name in _SYSTEM if name in row}
    asked, taken = _asked({"prompt": chats[0][:same], **system} if same else row)
    messages, taken = _as_chat(asked), "; ".join(filter(None, (start if same else "", taken)))
    if not same:
        same = len(messages) if all(chat[: len(messages)] == messages for chat in chats) else 0
    answers = (answer_of(chat[same:], name) for chat, name in zip(chats, names, strict=True))
    return made_pair("messages", messages, *answers), taken


def _common(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Length of the common prefix of both."""
    return sum(1 for _ in takewhile(lambda both: both[0] == both[1], zip(one, other, strict=False)))


def parse_hh(row: Pair) -> Pair:
    """Parse HH-RLHF: two whole dialogues that differ in the assistant's last turn."""
    chosen_turns, chosen = _split_dialogue(text_of(row, "chosen"), "chosen")
    rejected_turns, rejected = _split_dialogue(text_of(row, "rejected"), "rejected")
    if chosen_turns != rejected_turns:
        raise FormatError("the dialogues differ before the last answer")
    return {"messages": chosen_turns, "chosen": chosen, "rejected": rejected}


def _split_dialogue(dialogue: str, name: str) -> tuple[list[dict[str, str]], str]:
    """The turns before the last answer, as messages, and that answer."""
    before, mark, answer = dialogue.rpartition("\n\nAssistant:")
    if not mark:
        raise FormatError(f'"{name}" has no "\\n\\nAssistant:" turn: is this another format?')
    if _TURN.search(answer):
        raise FormatError(f'"{name}" ends with the human: there is no last answer')
    head, *turns = _TURN.split(before)
    if head.strip() or not turns:
        raise FormatError(f'"{name}" does not start with "\\n\\nHuman:"')
    messages: list[dict[str, str]] = []
    for speaker, text in zip(turns[::2], turns[1::2], strict=True):
        role = _ROLES[speaker]
        if messages and messages[-1]["role"] == role:
            # Two turns of one role in a row are merged: chat templates want the roles to alternate.
            messages[-1]["content"] += "\n\n" + text.strip()
        else:
            messages.append({"role": role, "content": text.strip()})
    if messages[-1]["role"] != "user":
        raise FormatError(f'the last answer of "{name}" follows no human turn')
    return messages, answer.strip()
