"""Open WebUI's export of feedback: the pairs and single ratings of its thumbs.

Each item is a rating of one message, with the whole chat as it was then. As with thumbs that edged is told of at once,
a good and a bad answer to the same message are a pair, and other ratings are single ones.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from edged.align.feedback.row_shapes import MAX_MESSAGES, FormatError, Pair, checked_pair

_LATEST_S = 1e12
_GOOD = {"1": True, "-1": False}
_FOLDED, _UNFOLDED = re.compile('<details type="(?:reasoning|code_interpreter)"'), "</details>"
"""Begin and end of what is written into a message's content beside the answer."""


def read_ratings(items: list[Any]) -> Iterator[tuple[int, Pair | str]]:
    """Yield (item from 1, its pair or single rating, or the problem with it), the oldest rating first.

    `user` is the person's id in Open WebUI. Of several ratings of a message the latest counts. A pair comes with the
    later of its two ratings.
    """
    ratings: dict[tuple[str, str], _Rating] = {}
    problems: list[tuple[int, str]] = []
    for number, item in enumerate(items, 1):
        try:
            rating = _rating_of(number, item)
        except FormatError as error:
            problems.append((number, str(error)))
            continue
        same = (rating.user, rating.message_id)
        if same not in ratings or ratings[same].rated_at <= rating.rated_at:
            ratings[same] = rating
    yield from problems
    in_order = sorted(ratings.values(), key=lambda rating: rating.rated_at)
    opposites: dict[int, list[_Rating]] = {rating.number: [] for rating in in_order}
    for rating in in_order:
        for name in rating.siblings():
            other = ratings.get((rating.user, name))
            if other is not None and other.good != rating.good:
                # The chat of the earlier one may not have had the other message yet.
                later, former = (rating, other) if rating.rated_at >= other.rated_at else (other, rating)
                if former not in opposites[later.number] and former.message_id in later.messages:
                    opposites[later.number].append(former)
    paired = {former.number for each in opposites.values() for former in each}
    for rating in in_order:
        for former in opposites[rating.number]:
            yield rating.number, _or_problem(partial(rating.pair, former.message_id))
        if rating.number not in paired and not opposites[rating.number]:
            yield rating.number, _or_problem(rating.alone)


def _or_problem(make: Callable[[], Pair]) -> Pair | str:
    try:
        return make()
    except FormatError as error:
        return str(error)


@dataclass(frozen=True, slots=True)
class _Rating:
    """A thumb on a message; `messages` are those of its chat by id, and `system` is the chat's system prompt."""

    number: int
    rated_at: float
    user: str
    message_id: str
    good: bool
    messages: dict[str, dict[str, Any]]
    system: str

    def siblings(self) -> list[str]:
        """Return the ids of the other answers to the same message."""
        return [
            name
            for name in self.messages
            if name != self.message_id and self._parent(name) == self._parent(self.message_id)
        ]

    def alone(self) -> Pair:
        """Return the single rating that it is. Raises FormatError."""
        answer = self._text(self.message_id)
        if not answer.strip():
            raise FormatError("the rated answer is empty")
        return {"user": self.user, "messages": self._before(), "completion": answer, "label": self.good}

    def pair(self, sibling: str) -> Pair:
        """Return the pair with a sibling of the opposite rating. Raises FormatError."""
        chosen, rejected = (self.message_id, sibling) if self.good else (sibling, self.message_id)
        texts = {"chosen": self._text(chosen), "rejected": self._text(rejected)}
        return checked_pair({"user": self.user, "messages": self._before(), **texts})

    def _parent(self, name: str) -> str:
        parent = self.messages[name].get("parentId")
        return parent if isinstance(parent, str) and parent in self.messages else ""

    def _before(self) -> list[dict[str, str]]:
        turns = list[dict[str, str]]()
        name = self._parent(self.message_id)
        while name and len(turns) <= MAX_MESSAGES:
            turns.insert(0, {"role": str(self.messages[name].get("role")), "content": self._text(name)})
            name = self._parent(name)
        if not 1 <= len(turns) <= MAX_MESSAGES:
            raise FormatError(f"{len(turns)} messages come before the answer: it may be 1 to {MAX_MESSAGES}")
        return [{"role": "system", "content": self.system}, *turns] if self.system.strip() else turns

    def _text(self, name: str) -> str:
        """The text of a message, without what was thought before."""
        message = self.messages[name]
        content, output = message.get("content"), message.get("output")
        said = [item for item in output if isinstance(item, dict)] if isinstance(output, list) else []
        if message.get("files"):
            raise FormatError("a message of the chat has files, which are not in the export")
        if '<details type="tool_calls"' in str(content) or any(item.get("type") == "function_call" for item in said):
            raise FormatError("an answer of the chat calls tools, which are not in the export")
        parts = [item.get("content") for item in said if item.get("type") == "message"]
        if parts:
            texts = ["".join(map(_part, each)) for each in parts if isinstance(each, list)]
            return "\n".join(text for text in texts if text.strip())
        if not isinstance(content, str):
            raise FormatError(f'"content" of a message is {type(content).__name__}, not a string')
        return _unfolded(content)


def _unfolded(content: str) -> str:
    """Return a message's content without what is folded away in it."""
    kept, at = list[str](), 0
    while (begin := _FOLDED.search(content, at)) and (end := content.find(_UNFOLDED, begin.end())) >= 0:
        kept.append(content[at : begin.start()])
        at = end + len(_UNFOLDED)
        at += len(content[at:]) - len(content[at:].lstrip())
    return "".join([*kept, content[at:]])


def _part(part: Any) -> str:
    text = part.get("text") if isinstance(part, dict) else None
    return text if isinstance(text, str) else ""


def _rating_of(number: int, item: Any) -> _Rating:
    """Parse an item. Raises FormatError."""
    item = _object(item, "the item")
    data, meta, snapshot = (_object(item.get(name), f'"{name}"') for name in ("data", "meta", "snapshot"))
    if (good := _GOOD.get(str(data.get("rating")))) is None:
        raise FormatError(f'"data.rating" is {data.get("rating")!r:.40}: a thumb is 1 or -1')
    chat = _object(_object(snapshot.get("chat"), '"snapshot.chat"').get("chat"), '"snapshot.chat.chat"')
    found = _object(_object(chat.get("history"), '"history" of the chat').get("messages"), '"messages" of the chat')
    messages = {name: message for name, message in found.items() if isinstance(message, dict)}
    user, message_id, rated_at = item.get("user_id"), meta.get("message_id"), item.get("updated_at")
    if not isinstance(user, str) or not user:
        raise FormatError('"user_id" is missing')
    if not isinstance(message_id, str) or message_id not in messages:
        raise FormatError(f'the chat has no message "{str(message_id)[:80]}", which "meta.message_id" names')
    params = chat.get("params")
    system = params.get("system") if isinstance(params, dict) else None
    # NaN is less than nothing.
    when = float(rated_at) if isinstance(rated_at, int | float) and abs(rated_at) < _LATEST_S else 0.0
    return _Rating(number, when, user, message_id, good, messages, system if isinstance(system, str) else "")


def _object(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise FormatError(f"{name} is {type(value).__name__}, not an object")
    return value
