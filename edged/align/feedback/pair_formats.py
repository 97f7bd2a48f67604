"""Files of preference pairs: HH-RLHF, TRL's preference JSONL, and edged's own export.

A pair is a dict: `chosen` and `rejected` (the answers' texts) and either `messages` (the conversation before the
answer, as the chat API takes it), `prompt` (plain text) or `prompt_ids` (bare tokens); edged's own format may add
`user` and `weight`. With a user, the dict is a body of `POST /v1/feedback`.
"""

from __future__ import annotations

import contextlib
import gzip
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, cast

from edged.runtime import bounded_json

if TYPE_CHECKING:
    from edged.store.feedback import PairRow

Format = Literal["hh", "trl", "edged"]
Pair = dict[str, Any]

_TURN = re.compile(r"\n\n(Human|Assistant):")
_ROLES = {"Human": "user", "Assistant": "assistant"}
_GZIP_MAGIC = b"\x1f\x8b"
_DAMAGE = (OSError, EOFError, zlib.error)


class FormatError(ValueError):
    """A line that is not a preference pair; the message says what it lacks."""


def read_pairs(path: Path, format: Format) -> Iterator[tuple[int, Pair | str]]:
    """Yield (line number from 1, pair) for every line of `path`, or (line number, problem).

    Gzip is recognised by its content; empty lines are skipped. Raises OSError when the file cannot be opened; a file
    that breaks off yields a last problem.
    """
    number = 0
    with _open(path) as file:
        try:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, _parsed(line, _PARSERS[format])
        except _DAMAGE as error:
            yield number + 1, f"the file cannot be read from here on: {error}"


def count_lines(path: Path) -> int:
    """Count a (gzipped) file's lines to its end or first damage, for progress. Raises OSError like `read_pairs`."""
    count = 0
    with _open(path) as file, contextlib.suppress(*_DAMAGE):
        for _ in file:
            count += 1
    return count


def export_pair(row: PairRow) -> Pair:
    """A stored pair as one line of edged's export: the fields that `read_pairs(..., "edged")` reads, and its origin.

    A single rating has `completion` and `label`, as in TRL's unpaired preference type, which no import reads.
    """
    pair: Pair = {"user": row.adapter}
    if row.messages is not None:
        pair["messages"] = list(row.messages)
    elif row.prompt is not None:
        pair["prompt"] = row.prompt
    else:
        pair["prompt_ids"] = list(row.prompt_ids or ())
    answers: Pair = {"chosen": row.chosen.text, "rejected": row.rejected.text}
    if row.single:
        answers = {"completion": row.chosen.text or row.rejected.text, "label": bool(row.chosen.text)}
    return pair | {
        **answers,
        "source": row.source,
        "weight": row.weight,
        "state": row.state,
        "created_at": row.created_at,
    }


def to_trl(pair: Pair) -> Pair:
    """An exported pair as TRL's preference type with an explicit prompt: conversational for a chat, else standard.

    Raises FormatError for a pair whose prompt is known in tokens alone, and for a message without text.
    """
    _demand_pair(pair)
    if "messages" in pair:
        sides = {side: [{"role": "assistant", "content": pair[side]}] for side in ("chosen", "rejected")}
        return {"prompt": [_plain(message) for message in pair["messages"]], **sides}
    if "prompt" in pair:
        return {name: pair[name] for name in ("prompt", "chosen", "rejected")}
    raise FormatError("its prompt is known in tokens alone")


def to_hh(pair: Pair) -> Pair:
    """An exported chat as HH-RLHF's two dialogues. Raises FormatError for one that would be read back differently."""
    _demand_pair(pair)
    if "messages" not in pair:
        raise FormatError("it is not a chat")
    messages = [{**plain, "content": plain["content"].strip()} for plain in map(_plain, pair["messages"])]
    answers = {side: pair[side].strip() for side in ("chosen", "rejected")}
    names = {role: name for name, role in _ROLES.items()}
    if strange := [message["role"] for message in messages if message["role"] not in names]:
        raise FormatError(f'the format has no role "{strange[0]}"')
    before = "".join(f"\n\n{names[message['role']]}: {message['content']}" for message in messages)
    row = {side: f"{before}\n\nAssistant: {answer}" for side, answer in answers.items()}
    if _parse_hh(row) != {"messages": messages, **answers}:
        raise FormatError("its turns do not alternate, or a text holds what begins a turn")
    return row


def _plain(message: Pair) -> dict[str, str]:
    """A message's role and text, which is all that both formats hold."""
    content = message.get("content")
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, dict)]
        content = "".join(text for text in texts if isinstance(text, str))
    if not isinstance(content, str):
        raise FormatError("a message has no text")
    return {"role": str(message["role"]), "content": content}


def _open(path: Path) -> IO[bytes]:
    with path.open("rb") as file:
        zipped = file.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
    return cast(IO[bytes], gzip.open(path, "rb")) if zipped else path.open("rb")


def _parsed(line: bytes, parse: Callable[[Pair], Pair]) -> Pair | str:
    """Parse a line into its pair, or the problem with it."""
    try:
        return checked_pair(parse(parse_object(line)))
    except FormatError as error:
        return str(error)


def parse_object(line: bytes) -> Pair:
    """Parse a line that is a JSON object. Raises FormatError."""
    try:
        row = bounded_json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise FormatError(f"not UTF-8: {error.reason} at byte {error.start}") from None
    except ValueError as error:
        raise FormatError(str(error)) from None
    if not isinstance(row, dict):
        raise FormatError(f"not a JSON object: {type(row).__name__}")
    return row


def checked_pair(pair: Pair) -> Pair:
    """Return a pair whose answers are neither empty nor equal. Raises FormatError."""
    chosen, rejected = pair["chosen"].strip(), pair["rejected"].strip()
    if not (chosen and rejected):
        raise FormatError(f'the answer of "{"rejected" if chosen else "chosen"}" is empty')
    if chosen == rejected:
        raise FormatError("the chosen and the rejected answer are equal")
    return pair


def _parse_hh(row: Pair) -> Pair:
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


def parse_trl(row: Pair) -> Pair:
    """Parse TRL's preference types: standard or conversational, with an explicit prompt or the common start as it."""
    sides = (row.get("chosen"), row.get("rejected"))
    prompt = row.get("prompt")
    if all(isinstance(side, str) for side in sides) and isinstance(prompt, str | None):
        chosen, rejected = cast(tuple[str, str], sides)
        if prompt is None:
            # A space between prompt and answers belongs to the answers, as in trl.extract_prompt.
            prompt = chosen[: _common(chosen, rejected)].removesuffix(" ")
            chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
        return _pair("prompt", prompt, chosen, rejected)
    if all(isinstance(side, list) for side in sides) and isinstance(prompt, list | None):
        good, bad = messages_of(sides[0], "chosen"), messages_of(sides[1], "rejected")
        before = [] if prompt is None else messages_of(prompt, "prompt")
        if prompt is None:
            same = _common(good, bad)
            before, good, bad = good[:same], good[same:], bad[same:]
        return _pair("messages", before, answer_of(good, "chosen"), answer_of(bad, "rejected"))
    raise FormatError('needs "chosen" and "rejected", and "prompt" if any, all as strings or all as lists of messages')


def _common(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Length of the common prefix of both."""
    return sum(1 for _ in takewhile(lambda both: both[0] == both[1], zip(one, other, strict=False)))


def answer_of(messages: list[dict[str, Any]], name: str) -> str:
    """Return the text of the one assistant message that a field adds. Raises FormatError."""
    if len(messages) != 1 or messages[0]["role"] != "assistant":
        roles = ", ".join(message["role"] for message in messages) or "nothing"
        raise FormatError(f'"{name}" must add one assistant message to the prompt, it adds: {roles}')
    return str(messages[0]["content"])


def _demand_pair(pair: Pair) -> None:
    if "label" in pair:
        raise FormatError("it is a single rating, not a pair")


def _parse_edged(row: Pair) -> Pair:
    _demand_pair(row)
    chosen, rejected = text_of(row, "chosen"), text_of(row, "rejected")
    more = {name: row[name] for name in ("user", "weight") if row.get(name) is not None}
    if row.get("messages") is not None:
        return _pair("messages", messages_of(row["messages"], "messages"), chosen, rejected) | more
    if row.get("prompt_ids") is not None:
        return {"prompt_ids": row["prompt_ids"], "chosen": chosen, "rejected": rejected} | more
    if "prompt" not in row:
        hint = "HH-RLHF's dialogues need --format hh, TRL's rows --format trl"
        raise FormatError(f'has neither "messages" nor "prompt" nor "prompt_ids": {hint}')
    return _pair("prompt", text_of(row, "prompt"), chosen, rejected) | more


def _pair(name: Literal["prompt", "messages"], before: Any, chosen: str, rejected: str) -> Pair:
    if not before:
        raise FormatError(f"the {'prompt' if name == 'prompt' else 'conversation before the answers'} is empty")
    return {name: before, "chosen": chosen, "rejected": rejected}


def text_of(row: Pair, name: str) -> str:
    """Return a field that is a text. Raises FormatError."""
    value = row.get(name)
    if not isinstance(value, str):
        found = "is missing" if name not in row else f"is {type(value).__name__}, not a string"
        raise FormatError(f'"{name}" {found}')
    return value


def messages_of(value: Any, name: str) -> list[dict[str, Any]]:
    """Return a field that is a list of messages. Raises FormatError."""
    if not isinstance(value, list):
        raise FormatError(f'"{name}" is {type(value).__name__}, not a list of messages')
    for message in value:
        fine = isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))
        if not fine:
            raise FormatError(f'"{name}" has a message without "role" and "content" texts')
    return value


_PARSERS: dict[str, Callable[[Pair], Pair]] = {"hh": _parse_hh, "trl": parse_trl, "edged": _parse_edged}
