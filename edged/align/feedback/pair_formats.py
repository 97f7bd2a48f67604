"""Files of preferences: HH-RLHF, rows of TRL's and other shapes, Open WebUI's export, and edged's own.

A pair is a dict: `chosen` and `rejected` (the answers' texts) and either `messages` (the conversation before the
answer, as the chat API takes it), `prompt` (plain text) or `prompt_ids` (bare tokens); edged's own format may add
`user` and `weight`. A single rating has `completion` and `label` (true: good) in the place of the answers. With a user,
the dict is a body of `POST /v1/feedback`.
"""

from __future__ import annotations

import codecs
import contextlib
import errno
import gzip
import json
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, cast

from edged.align.feedback.open_webui import read_ratings
from edged.align.feedback.row_shapes import (
    FormatError,
    Pair,
    checked_pair,
    made_pair,
    messages_of,
    parse_hh,
    parse_row,
    text_of,
)
from edged.runtime import bounded_json

if TYPE_CHECKING:
    from edged.store.feedback import PairRow

Format = Literal["hh", "trl", "kto", "openai", "open-webui", "edged"]

_SIDES = ("chosen", "rejected")
_GZIP_MAGIC = b"\x1f\x8b"
_DAMAGE = (OSError, EOFError, zlib.error)
_OTHER_FILES = {
    **dict.fromkeys((b"\xff\xfe", b"\xfe\xff", b"{\0", b"\0{", b"[\0", b"\0["), "UTF-16: save it as UTF-8"),
    _GZIP_MAGIC: "gzip's: `gunzip FILE` unpacks it",
    b"PAR1": "Parquet's: datasets' `to_json` makes JSON lines",
}
"""What files of other kinds begin with."""


def read_pairs(path: Path, format: Format, taken: Counter[str] | None = None) -> Iterator[tuple[int, Pair | str]]:
    """Yield (line number from 1, pair or single rating) for every line of `path`, or (line number, problem).

    Gzip is recognised by its content; empty lines are skipped. `taken` counts what was read of lines in other fields
    than the format's. Raises OSError when the file cannot be opened, or holds no lines of JSON; a file that breaks off
    yields a last problem. Of format "open-webui" the file is one JSON array, and numbers are those of its items.
    """
    if format == "open-webui":
        yield from read_ratings(_array(path))
        return
    number = 0
    with _open(path) as file:
        try:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, _parsed(line, _PARSERS[format], taken)
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

    A single rating has `completion` and `label`, as in TRL's unpaired preference type.
    """
    pair: Pair = {"user": row.adapter}
    if row.messages is not None:
        pair["messages"] = list(row.messages)
        pair |= {"template_arguments": row.template_arguments} if row.template_arguments else {}
    elif row.prompt is not None:
        pair["prompt"] = row.prompt
    else:
        pair["prompt_ids"] = list(row.prompt_ids or ())
    answers: Pair = {"chosen": row.chosen.text, "rejected": row.rejected.text}
    for name, side in (("chosen", row.chosen), ("rejected", row.rejected)):
        # What a side has beside its content is one message with it.
        message = {"role": "assistant", "content": side.content, **(side.beside or {})}
        answers |= {f"{name}_message": message} if side.beside else {}
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

    Tools are in `tools`, other arguments of the chat template in `chat_template_kwargs`, calls in messages.

    Raises FormatError for a pair whose prompt is known in tokens alone, and for a message without text.
    """
    _demand_pair(pair)
    if "messages" in pair:
        plain = {side: {"role": "assistant", "content": pair[side]} for side in _SIDES}
        sides = {side: [pair.get(f"{side}_message", message)] for side, message in plain.items()}
        others = dict(pair.get("template_arguments", {}))
        more = {"tools": others.pop("tools")} if "tools" in others else {}
        more |= {"chat_template_kwargs": others} if others else {}
        prompt = [
            message if _is_tool_turn(message) else messages_of([message], "messages")[0] for message in pair["messages"]
        ]
        return {"prompt": prompt, **sides, **more}
    if "prompt" in pair:
        return {name: pair[name] for name in ("prompt", "chosen", "rejected")}
    raise FormatError("its prompt is known in tokens alone")


def to_hh(pair: Pair) -> Pair:
    """An exported chat as HH-RLHF's two dialogues. Raises FormatError for one that would be read back differently."""
    _demand_pair(pair)
    _demand_plain_chat(pair)
    messages = [{**plain, "content": plain["content"].strip()} for plain in messages_of(pair["messages"], "messages")]
    answers = {side: pair[side].strip() for side in ("chosen", "rejected")}
    names = {"user": "Human", "assistant": "Assistant"}
    if strange := [message["role"] for message in messages if message["role"] not in names]:
        raise FormatError(f'the format has no role "{strange[0]}"')
    before = "".join(f"\n\n{names[message['role']]}: {message['content']}" for message in messages)
    row = {side: f"{before}\n\nAssistant: {answer}" for side, answer in answers.items()}
    if parse_hh(row) != {"messages": messages, **answers}:
        raise FormatError("its turns do not alternate, or a text holds what begins a turn")
    return row


def to_openai(pair: Pair) -> Pair:
    """An exported chat as OpenAI's preference example. Raises FormatError for what jobs do not read of that format."""
    _demand_pair(pair)
    _demand_plain_chat(pair)
    sides = {"preferred_output": pair["chosen"], "non_preferred_output": pair["rejected"]}
    outputs = {name: [{"role": "assistant", "content": text}] for name, text in sides.items()}
    return {"input": {"messages": messages_of(pair["messages"], "messages")}, **outputs}


def _demand_plain_chat(pair: Pair) -> None:
    if "messages" not in pair:
        raise FormatError("it is not a chat")
    if any(map(_is_tool_turn, [*pair["messages"], *(pair.get(f"{side}_message", {}) for side in _SIDES)])):
        raise FormatError("the format has no tool calls")


def _is_tool_turn(message: Pair) -> bool:
    return message.get("role") == "tool" or bool(message.get("tool_calls"))


def _open(path: Path) -> IO[bytes]:
    # Damage is told with the line that it comes to.
    with contextlib.suppress(EOFError, zlib.error), _unpacked(path) as file:
        if problem := file_problem(file):
            raise OSError(errno.EINVAL, problem)
    return _unpacked(path)


def _unpacked(path: Path) -> IO[bytes]:
    with path.open("rb") as file:
        zipped = file.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
    unpack: Any = gzip.open if zipped else open
    return cast(IO[bytes], unpack(path, "rb"))


_MOST_ARRAY_BYTES = 256 << 20
"""A file that is one array is in memory as a whole."""


def _array(path: Path) -> list[Any]:
    """Parse a file that is one JSON array. Raises OSError."""
    with _unpacked(path) as file:
        try:
            data = file.read(_MOST_ARRAY_BYTES + 1)
            items = json.loads(data.decode("utf-8-sig")) if len(data) <= _MOST_ARRAY_BYTES else None
        except (*_DAMAGE, ValueError, RecursionError) as error:
            raise OSError(errno.EINVAL, f"it is no JSON: {error}") from None
    if len(data) > _MOST_ARRAY_BYTES:
        way_out = 'cut it, as `jq ".[:1000]" FILE` does'
        raise OSError(errno.EFBIG, f"it has more than {_MOST_ARRAY_BYTES >> 20} MiB: {way_out}")
    if not isinstance(items, list):
        raise OSError(errno.EINVAL, f"it is a JSON {type(items).__name__}, not the array that Open WebUI exports")
    return items


def file_problem(file: IO[bytes]) -> str:
    """Return why a file, from its start on, holds no lines of JSON, and what makes them; "" where it may."""
    start = file.read(1 << 16)
    for magic, told in _OTHER_FILES.items():
        if start.startswith(magic):
            return f"it is {told}"
    text = start.removeprefix(codecs.BOM_UTF8).lstrip()
    line, broken, _ = text.partition(b"\n")
    if text.startswith(b"["):
        return 'it is a JSON array (it begins with "["), not JSON lines: `jq -c ".[]" FILE` makes them'
    if broken and line.startswith(b"{") and line.rstrip()[-1:] in (b"{", b","):
        return "it is JSON with an object on several lines, not JSON lines: `jq -c . FILE` makes them"
    return ""


def _parsed(line: bytes, parse: Callable[[Pair], tuple[Pair, str]], taken: Counter[str] | None) -> Pair | str:
    """Parse a line into its pair, or the problem with it."""
    try:
        pair, told = parse(parse_object(line))
        if "label" not in pair:
            checked_pair(pair)
    except FormatError as error:
        return str(error)
    if told and taken is not None:
        taken[told] += 1
    return pair


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


def _demand_pair(pair: Pair) -> None:
    if "label" in pair:
        raise FormatError("it is a single rating, not a pair")


def _parse_edged(row: Pair) -> Pair:
    hint = "HH-RLHF's dialogues need --format hh, TRL's and other rows --format trl"
    if isinstance(row.get("chosen"), list | dict):
        raise FormatError(f'"chosen" is no string: {hint}')
    messages = [row.get(f"{side}_message") for side in _SIDES]
    if any(_is_tool_turn(each) for each in messages if isinstance(each, dict)):
        raise FormatError("an answer calls tools, which no import takes")
    single = "label" in row
    chosen, rejected = (
        (text_of(row, "completion"), "") if single else (text_of(row, "chosen"), text_of(row, "rejected"))
    )
    more = {name: row[name] for name in ("user", "weight") if row.get(name) is not None}
    pair = _asked_edged(row, chosen, rejected, hint) | more
    return _rating(pair, row["label"]) if single else pair


def _asked_edged(row: Pair, chosen: str, rejected: str, hint: str) -> Pair:
    if row.get("messages") is not None:
        return made_pair("messages", messages_of(row["messages"], "messages"), chosen, rejected)
    if row.get("prompt_ids") is not None:
        return {"prompt_ids": row["prompt_ids"], "chosen": chosen, "rejected": rejected}
    if "prompt" not in row:
        raise FormatError(f'has neither "messages" nor "prompt" nor "prompt_ids": {hint}')
    return made_pair("prompt", text_of(row, "prompt"), chosen, rejected)


def _parse_preference(row: Pair) -> tuple[Pair, str]:
    example = parse_row(row)
    if example.kind != "preferences":
        raise FormatError(f'"{example.shape}" is of a file of {example.kind}: `edged finetune create` learns these')
    return example.pairs[0], example.taken


def _parse_rating(row: Pair) -> tuple[Pair, str]:
    example = parse_row(row)
    if example.shape == "completion":
        raise FormatError('it has no "label": true or false')
    if example.kind != "ratings":
        hint = "--format trl reads pairs" if example.kind == "preferences" else "`edged finetune create` learns these"
        raise FormatError(f'"{example.shape}" is of a file of {example.kind}: {hint}')
    (pair,) = example.pairs
    return _rating(pair, bool(pair["chosen"])), example.taken


def _rating(pair: Pair, label: Any) -> Pair:
    """Return the rating of the one answer that a pair has."""
    asked = {name: value for name, value in pair.items() if name not in _SIDES}
    return {**asked, "completion": pair["chosen"] or pair["rejected"], "label": label}


_PARSERS: dict[str, Callable[[Pair], tuple[Pair, str]]] = {
    "hh": lambda row: (parse_hh(row), ""),
    "trl": _parse_preference,
    "kto": _parse_rating,
    "openai": _parse_preference,
    "edged": lambda row: (_parse_edged(row), ""),
}
