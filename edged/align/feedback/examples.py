"""Fine-tuning files: JSON lines of chats, completions or preferences, in the shapes of OpenAI and TRL.

An example is one pair or, for a chat, one for each assistant turn that is scored. A pair is a dict as in
`edged.align.feedback.pair_formats`; without `rejected` its answer alone is learned, and one without `chosen` is bad.
"""

import json
import struct
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from edged.align.feedback.pair_formats import (
    FormatError,
    Pair,
    answer_of,
    checked_pair,
    messages_of,
    parse_object,
    parse_trl,
    text_of,
)

_LONGEST = 1 << 20
"""Bytes of the longest line."""
_MOST_MESSAGES = 1024
"""Messages of a line."""
_MOST_TOLD, _MOST_CHARS = 20, 200
"""Bad lines that are told, and characters of each."""
_WORK_S = 0.01
"""Seconds after which a check lets others have the interpreter for as long."""
_ENTRY = struct.Struct("=qq")
"""An example's offset and line in the index."""


class BadFile(ValueError):
    """A file that cannot be learned from; the message has its first bad lines."""


class ExampleFile:
    """The examples of a checked file, read by number; the index of its lines is a file, too, of no name."""

    def __init__(self, path: Path, folder: Path, method: str, stopped: Callable[[], bool] = lambda: False) -> None:
        """Check every line; `method` says which kind of examples is wanted. The index is in `folder`.

        Raises BadFile, and OSError. The check ends early where it is `stopped`: `go_on` goes on with it.
        """
        self._path, self._method, self._count, self._bad = path, method, 0, 0
        self._lines, self._problems = _lines_of(path), list[str]()
        self.complete = False
        """Whether all lines are checked."""
        self._shape = (0, "")
        """The first example's line, and the field that names the shape of all."""
        self._index = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        try:
            self.go_on(stopped)
        except BaseException:
            self._index.close()
            raise

    def go_on(self, stopped: Callable[[], bool]) -> None:
        """Check the lines that are left, until it is `stopped`. Raises BadFile, and OSError."""
        problems, began_s = self._problems, time.monotonic()
        while not stopped():
            number, offset, line = next(self._lines, (0, 0, b""))
            if not line:
                self.complete = True
                break
            try:
                self._check_shape(number, line, self._method)
            except FormatError as error:
                self._bad += 1
                if self._bad <= _MOST_TOLD:
                    problems.append(f"line {number}: {str(error)[:_MOST_CHARS]}")
            else:
                self._count += 1
                self._index.write(_ENTRY.pack(offset, number))
            if (worked_s := time.monotonic() - began_s) > _WORK_S:
                time.sleep(worked_s)
                began_s = time.monotonic()
        if not self.complete:
            return
        if self._bad > _MOST_TOLD:
            problems.append(f"and {self._bad - _MOST_TOLD} more")
        if not (self._bad or self._count):
            problems = ["it has no examples"]
        if problems:
            raise BadFile("; ".join(problems))

    def _check_shape(self, number: int, line: bytes, method: str) -> None:
        shape, _ = parse_example(line)
        first, wanted = self._shape
        if (method, shape) == ("kto", "completion"):
            raise FormatError('it has no "label": true or false')
        if wanted and shape != wanted:
            raise FormatError(f'it is of another format ("{shape}") than line {first} ("{wanted}"): use one per file')
        kind, learned_by = _KINDS[shape]
        if (method if method in ("supervised", "kto") else "dpo") != learned_by:
            raise FormatError(f'"{shape}" is of a file of {kind}, which {learned_by} learns: use that method')
        if not wanted:
            self._shape = number, shape

    def __len__(self) -> int:
        return self._count

    @property
    def index_bytes(self) -> int:
        """Bytes that the index takes on the disk."""
        return self._count * _ENTRY.size

    def read(self, numbers: Iterable[int]) -> Iterator[tuple[int, list[Pair]]]:
        """Yield (line, pairs) of the examples of these numbers, from 0. Raises OSError."""
        with self._path.open("rb") as file:
            for number in numbers:
                self._index.seek(number * _ENTRY.size)
                offset, line = _ENTRY.unpack(self._index.read(_ENTRY.size))
                file.seek(offset)
                yield line, parse_example(file.readline(_LONGEST))[1]

    def close(self) -> None:
        """Give the index's room back."""
        self._index.close()


def _lines_of(path: Path) -> Iterator[tuple[int, int, bytes]]:
    """Yield (number from 1, offset, line) of the lines that are not blank; one that is too long is cut."""
    with path.open("rb") as file:
        number = 0
        while line := file.readline(_LONGEST):
            offset, number = file.tell() - len(line), number + 1
            rest = line
            while len(rest) == _LONGEST and not rest.endswith(b"\n"):
                rest = file.readline(_LONGEST)
            if line.strip():
                yield number, offset, line


def parse_example(line: bytes) -> tuple[str, list[Pair]]:
    """Parse a line: (the field that names its shape, its pairs). Raises FormatError."""
    if len(line) == _LONGEST and not line.endswith(b"\n"):
        raise FormatError(f"it is longer than {_LONGEST} bytes: split it")
    row = parse_object(line)
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise FormatError("it contains half a surrogate pair (\\ud800 to \\udfff), which is no character") from None
    shape = next((name for name in _PARSERS if name in row), "")
    if not shape:
        fields = ", ".join(f'"{name}"' for name in _PARSERS)
        raise FormatError(f"it has none of the fields {fields}")
    for name in ("tools", "functions", "parallel_tool_calls"):
        if row.get(name):
            raise FormatError(f'"{name}" is not supported: this model reads and writes text only')
    return shape, _PARSERS[shape](row)


def _parse_openai(row: Pair) -> list[Pair]:
    """Parse OpenAI's preference: `input.messages`, `preferred_output` and `non_preferred_output`."""
    asked = row["input"]
    if not isinstance(asked, dict) or asked.get("tools"):
        raise FormatError('"input" must be an object with "messages" and without tools')
    messages = _turns(asked.get("messages"), "input.messages")
    sides = {"chosen": "preferred_output", "rejected": "non_preferred_output"}
    answers = {side: answer_of(_turns(row.get(name), name), name) for side, name in sides.items()}
    return [checked_pair({"messages": messages, **answers})]


def _parse_chat(row: Pair) -> list[Pair]:
    """Parse OpenAI's chat: every assistant turn is scored, unless its `weight` is 0."""
    messages = _turns(row["messages"], "messages")
    pairs, turns = [], 0
    for index, message in enumerate(row["messages"]):
        weight = message.get("weight", 1)
        if weight not in (0, 1) or isinstance(weight, bool):
            raise FormatError(f'"weight" of message {index + 1} is {weight!r}: it may be 0 or 1')
        if message["role"] == "assistant":
            turns += 1
            if weight and not message["content"].strip():
                raise FormatError(f"the assistant's turn in message {index + 1} is empty")
            if weight and not index:
                raise FormatError("the conversation before the first answer is empty")
            if weight:
                pairs.append({"messages": messages[:index], "chosen": message["content"]})
    if not pairs:
        raise FormatError("no assistant turn is scored: all have weight 0" if turns else "there is no assistant turn")
    return pairs


def _turns(value: Any, name: str) -> list[dict[str, str]]:
    """Return the roles and texts of a conversation. Raises FormatError."""
    messages = messages_of(value, name)
    if not 0 < len(messages) <= _MOST_MESSAGES:
        raise FormatError(f'"{name}" has {len(messages)} messages: it may have 1 to {_MOST_MESSAGES}')
    for message in messages:
        if message["role"] not in ("system", "developer", "user", "assistant") or message.get("tool_calls"):
            raise FormatError(f'"{name}" has a message of role "{message["role"][:40]}" or with a tool call')
    roles = ("system" if message["role"] == "developer" else message["role"] for message in messages)
    return [{"role": role, "content": each["content"]} for role, each in zip(roles, messages, strict=True)]


def _parse_completion(row: Pair) -> list[Pair]:
    """Parse TRL's prompt and completion, as texts or as messages."""
    if isinstance(row["completion"], list):
        answer = answer_of(_turns(row["completion"], "completion"), "completion")
        return [_answered({"messages": _turns(row.get("prompt"), "prompt"), "chosen": answer})]
    prompt = text_of(row, "prompt")
    if not prompt:
        raise FormatError("the prompt is empty")
    return [_answered({"prompt": prompt, "chosen": text_of(row, "completion")})]


def _parse_rating(row: Pair) -> list[Pair]:
    """Parse TRL's prompt, completion and label: a good answer where that is true, a bad one where it is false."""
    if not isinstance(row["label"], bool):
        raise FormatError(f'"label" is {repr(row["label"])[:40]}: it may be true or false')
    if "completion" not in row:
        raise FormatError('it has a "label" and no "completion"')
    (pair,) = _parse_completion(row)
    return [pair if row["label"] else {**pair, "chosen": "", "rejected": pair["chosen"]}]


def _answered(pair: Pair) -> Pair:
    if not pair["chosen"].strip():
        raise FormatError("the completion is empty")
    return pair


def _parse_preference(row: Pair) -> list[Pair]:
    """Parse TRL's preference, as texts or as messages."""
    sides = ("prompt", "chosen", "rejected")
    messages = {name: _turns(row[name], name) for name in sides if isinstance(row.get(name), list)}
    return [checked_pair(parse_trl(row | messages))]


_PARSERS: dict[str, Callable[[Pair], list[Pair]]] = {
    "input": _parse_openai,
    "chosen": _parse_preference,
    "messages": _parse_chat,
    "label": _parse_rating,
    "completion": _parse_completion,
}
"""Parsers by the field that names a line's shape."""
_KINDS = {
    **dict.fromkeys(("input", "chosen"), ("preferences", "dpo")),
    **dict.fromkeys(("messages", "completion"), ("answers", "supervised")),
    "label": ("ratings", "kto"),
}
"""What files of a shape hold, and the method that learns it; of preferences others do, too."""
