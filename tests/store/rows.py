"""Completions to store, in one line."""

from __future__ import annotations

from typing import Any

from edged.store.completions import Choice, Completion

MOMENT = "2025-01-31T12:00:00.000000+00:00"


def completion(
    name: str, *answers: str, asked: str | list[dict[str, Any]] = "How are you?", user: str | None = "ada", **more: Any
) -> Completion:
    """A chat completion `name` of `user`'s adapter with `answers`; `asked`: the user's message or the conversation."""
    messages = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
    return Completion(
        **{
            "id": name,
            "created_at": MOMENT,
            "object": "chat.completion",
            "model": "demo",
            "prompt_ids": (1, 2, 3),
            "choices": tuple(
                Choice(index, text, tuple(text.encode("utf-8", "replace")), "stop", len(text))
                for index, text in enumerate(answers)
            ),
            "user": user,
            "adapter": user,
            "messages": tuple(messages),
            **more,
        }
    )
