"""A user's written preference in the system turn of a conversation."""

from __future__ import annotations

from contextlib import suppress

from edged.text.tokenizer import Arguments, Messages, Tokenizer, TokenizerError

MAX_TOKENS = 256
"""Most tokens of a written preference, which every prompt of its user has more until it is learned."""
NO_SYSTEM_TURN = "the model's chat template has no system turn, so it is kept and not in prompts"


def with_preference(messages: Messages, text: str) -> Messages:
    """Return a conversation with a preference at the end of its first system message, or in one of its own."""
    first, *others = messages
    if first["role"] != "system":
        return [{"role": "system", "content": text}, *messages]
    return [{**first, "content": "\n\n".join(filter(None, (first["content"], text)))}, *others]


def prompts(
    tokenizer: Tokenizer, messages: Messages, text: str, max_tokens: int, arguments: Arguments | None = None
) -> tuple[list[int], list[int]]:
    """Return the tokens of a conversation's prompt without a preference and with it.

    Both are the same where the preference is "", the chat template takes no system message there, or the prompt would
    have `max_tokens` or more. Raises like `render_chat`.
    """
    plain = tokenizer.render_chat(messages, arguments)
    with suppress(TokenizerError):
        longer = tokenizer.render_chat(with_preference(messages, text), arguments) if text else plain
        return plain, longer if len(longer) < max_tokens else plain
    return plain, plain


def why_unusable(tokenizer: Tokenizer, text: str) -> str:
    """Return why a text cannot be a preference, as it would be more than the content of a message; "" where it can.

    Special tokens that it names are text, as in all contents. A template may mark its turns by text alone.
    """
    if mark := next((mark for mark in tokenizer.turn_marks if mark in text), ""):
        return f'it has "{mark}", which begins or ends a turn in the model\'s chat template: leave that out'
    try:
        if (num_tokens := len(tokenizer.encode_answer(text))) > MAX_TOKENS:
            return f"its {num_tokens} tokens are too many: at most {MAX_TOKENS}"
        kept, plain = (
            tokenizer.special_among(tokenizer.render_chat([{"role": "system", "content": content}, _ASKED]))
            for content in (text, "a")
        )
    except TokenizerError as error:
        return str(error) if tokenizer.has_system_turn else ""
    return "" if kept == plain else "the model's tokenizer makes special tokens of it: write it in other characters"


_ASKED = {"role": "user", "content": "a"}
