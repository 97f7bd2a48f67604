"""The bounds of a pair's texts: what `align.max_pair_tokens` can use of them.

Words that somebody sends are refused beyond the bound, so that nothing of what was acknowledged is lost. A pair has a
copy of the prompt and answers that edged served, which is cut; the completion keeps all of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, dropwhile, takewhile
from typing import Any

from edged.store.completions import Message, content_text
from edged.store.feedback import Side
from edged.store.rows import column_value

CHARS_PER_TOKEN = 32
"""Characters of a text that are kept for each token of a pair: several times as many as language has."""
Asked = tuple[tuple[Message, ...] | None, str | None, tuple[int, ...] | None, Mapping[str, Any] | None]
"""A prompt: a chat, a text or bare tokens, and the arguments of a chat's template."""


def too_long(field: str, value: Any, max_tokens: int) -> str:
    """Return why a text, or a list as JSON, is more than pairs of `max_tokens` can use; "" if it is not."""
    size, most = len(column_value(value)), CHARS_PER_TOKEN * max_tokens
    if size <= most:
        return ""
    unit = "characters" if isinstance(value, str) else "characters as JSON"
    bound = f"pairs of at most align.max_pair_tokens = {max_tokens} tokens can use {most}"
    return f'"{field}" has {size} {unit}, and {bound}: shorten it, or raise that setting'


def cut_asked(asked: Asked, max_tokens: int) -> Asked:
    """Cut a prompt to its end: what is too long loses its start when it is tokenized, too."""
    (messages, prompt, ids, arguments), most = asked, CHARS_PER_TOKEN * max_tokens
    kept = arguments if arguments and not too_long("", arguments, max_tokens) else None
    return messages and _last(messages, most), prompt and prompt[-most:], ids and ids[-max_tokens:], kept


def cut_side(side: Side, max_tokens: int) -> Side:
    """Cut an answer to its beginning."""
    text, ids = side.text[: CHARS_PER_TOKEN * max_tokens], side.token_ids
    return replace(side, text=text, token_ids=ids and ids[:max_tokens])


def _last(messages: Sequence[Message], most: int) -> tuple[Message, ...]:
    """The last messages that take at most `most` characters as JSON; of a last one that is longer, its end."""
    sizes = accumulate(len(column_value([message])) for message in reversed(messages))
    count = sum(1 for _ in takewhile(lambda size: size <= most, sizes))
    if count == len(messages):
        return tuple(messages)
    # Chat templates want a user's message first.
    kept = tuple(dropwhile(lambda message: message.get("role") != "user", messages[len(messages) - count :]))
    return kept or ({**messages[-1], "content": content_text(messages[-1])[-most:]},)
