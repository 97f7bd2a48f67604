"""The tables `completions` and `choices`: requests and their answers."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sqlite_utils import Database

from edged.store.rows import field_values, first_value, insert_row, record_of

Message = Mapping[str, Any]
UNUSED = """NOT EXISTS (SELECT 1 FROM signals WHERE completion_id = completions.id)
    AND NOT EXISTS (SELECT 1 FROM pairs WHERE chosen_completion_id = completions.id)
    AND NOT EXISTS (SELECT 1 FROM pairs WHERE rejected_completion_id = completions.id)"""
"""SQL's condition on a row of `completions`: no feedback refers to it."""

LOOKED_AT = 2000
"""Latest completions that tell who was served lately: looking does not get slower as the table grows."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer: `token_ids` are the sampled ones, `text` is what the client got. Times in milliseconds."""

    choice: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    completion_tokens: int = 0
    cached_tokens: int = 0
    queue_ms: float = 0.0
    ttft_ms: float = 0.0
    total_ms: float = 0.0
    repetition: float | None = None
    """Share of the answer's token n-grams that occurred in it before."""
    beside: Message | None = None
    """What a chat's answer has beside its text: `reasoning_content`, `tool_calls`."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One request with its answers. `messages` is a chat's, `prompt` a text completion's; both None: bare token ids.

    `user` asked, `adapter` answered and learns from feedback on it; None is the base model, which is never taught.
    """

    id: str
    created_at: str
    object: Literal["chat.completion", "text_completion"]
    model: str
    prompt_ids: tuple[int, ...]
    choices: tuple[Choice, ...]
    user: str | None = None
    adapter: str | None = None
    version: int = 0
    messages: tuple[Message, ...] | None = None
    prompt: str | None = None
    template_arguments: Mapping[str, Any] | None = None
    """What the chat template was given beside the messages: `tools`, and what its author made up."""
    request_id: str | None = None
    """The id that the client gave its request; several may have the same."""

    @property
    def size(self) -> int:
        """Approximate bytes of the completion in the store."""
        texts = [str(self.messages or self.prompt or ""), *(choice.text for choice in self.choices)]
        texts += [str(part) for part in (self.template_arguments, *(choice.beside for choice in self.choices)) if part]
        ids = (self.prompt_ids, *(choice.token_ids for choice in self.choices))
        return sum(map(len, texts)) + sum(len(str(part)) for part in ids)

    @property
    def prompt_key(self) -> str:
        """Equal for equal prompts, see `prompt_key`."""
        return prompt_key(self.messages, self.prompt, self.prompt_ids, self.template_arguments)


def prompt_key(
    messages: Sequence[Message] | None,
    prompt: str | None,
    prompt_ids: Sequence[int] = (),
    arguments: Mapping[str, Any] | None = None,
) -> str:
    """32 hex digits that are equal for equal prompts: a chat's messages, else the text, else the token ids.

    `arguments` are those of a chat's template.
    """
    content: dict[str, Any] = {"prompt_ids": list(prompt_ids)}
    if messages is not None:
        content = {"messages": list(messages)} | ({"arguments": arguments} if arguments else {})
    elif prompt is not None:
        content = {"prompt": prompt}
    text = json.dumps(content, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def content_text(message: Message) -> str:
    """The text of a message; a list of content parts gives its text parts, joined by newlines."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "\n".join(str(part["text"]) for part in parts if isinstance(part, dict) and "text" in part)


def latest_prompts(db: Database, adapter: str, most: int) -> list[Completion]:
    """The latest completions of an adapter with different prompts, at most so many, newest first, without choices.

    Those of bare tokens, which another model's tokenizer may have made, are left out.
    """
    sql = """SELECT * FROM completions WHERE rowid IN (
                 SELECT max(rowid) FROM (
                     SELECT rowid, prompt_key FROM completions
                     WHERE adapter = ? AND coalesce(messages, prompt) IS NOT NULL
                     ORDER BY created_at DESC LIMIT 1000)
                 GROUP BY prompt_key)
             ORDER BY created_at DESC LIMIT ?"""
    return [record_of(Completion, row, choices=()) for row in db.query(sql, [adapter, most])]


def latest_answers(db: Database, adapter: str, most: int, several: bool = False) -> list[Completion]:
    """The latest completions for an adapter that asked for one answer, or for several, at most so many, newest first.

    The first answer is whole. Of several it is the adapter's, and not the untrained base's, as the last ones may be.
    """
    sql = """SELECT * FROM completions WHERE adapter = ? AND (choice_count > 1) = ?
                 AND (version > 0 OR choice_count = 1) AND EXISTS (SELECT 1 FROM choices
                     WHERE completion_id = completions.id AND choice = 0 AND finish_reason IN ('stop', 'length'))
             ORDER BY created_at DESC LIMIT ?"""
    return [_completion(db, row) for row in db.query(sql, [adapter, several, most])]


def insert_completion(db: Database, completion: Completion) -> None:
    """Add a completion with its choices."""
    row = field_values(completion) | {"prompt_key": completion.prompt_key}
    row |= {"prompt_tokens": len(completion.prompt_ids), "choice_count": len(completion.choices)}
    del row["choices"]
    insert_row(db, "completions", row)
    for choice in completion.choices:
        insert_row(db, "choices", {"completion_id": completion.id, **field_values(choice)})


def get_completion(db: Database, completion_id: str) -> Completion | None:
    """The completion of that id with its choices in order; None when there is none (any more)."""
    row = next(db.query("SELECT * FROM completions WHERE id = ?", [completion_id]), None)
    return _completion(db, row) if row else None


def last_answers(db: Database) -> dict[str, str]:
    """Return the time of each adapter's last answer, as far as the latest LOOKED_AT completions tell."""
    sql = """SELECT adapter, max(created_at)
             FROM (SELECT adapter, created_at FROM completions ORDER BY rowid DESC LIMIT ?)
             WHERE adapter IS NOT NULL GROUP BY adapter"""
    return dict(db.execute(sql, [LOOKED_AT]).fetchall())


def users_of_completion(db: Database, completion_id: str) -> set[str]:
    """Return the user who asked for a completion and the adapter that answered; empty where there is neither."""
    rows = db.execute("SELECT user, adapter FROM completions WHERE id = ?", [completion_id]).fetchall()
    return {name for row in rows for name in row if name is not None}


def prompt_id(first: str, number: int) -> str:
    """Return the id of the answer to the prompt of that number, from 1, of a request whose first answer is `first`."""
    return f"{first}#{number}"


def is_further_prompt(completion_id: str) -> bool:
    """Whether an answer is to another prompt of its request than the first."""
    return "#" in completion_id


def answer_of_choice(db: Database, first: str, choice: int | None) -> tuple[str, int | None] | None:
    """Return the id and choice of what a client knows as a choice of `first`, its request's first answer.

    Of several prompts it counts the choices of all. None: there are several, and no choice is given, or none of theirs.
    """

    def choices_of(completion_id: str) -> int | None:
        return first_value(db, "SELECT choice_count FROM completions WHERE id = ?", [completion_id])

    if not (each := choices_of(first)) or choices_of(prompt_id(first, 1)) is None:
        return first, choice
    number, rest = divmod(-1 if choice is None else choice, each)
    name = prompt_id(first, number) if number else first
    return (name, rest) if choices_of(name) is not None else None


def newest_of_request(db: Database, request_id: str, sees: Callable[[str], bool]) -> str | None:
    """Return the id of the newest answer to a request of this id, of those all of whose users `sees` holds for."""
    sql = "SELECT id, user, adapter FROM completions WHERE request_id = ? ORDER BY rowid DESC"
    rows = db.execute(sql, [request_id])
    return next((str(name) for name, *users in rows if all(sees(user) for user in users if user is not None)), None)


def completions_of_prompt(
    db: Database, key: str, learner: str, limit: int, rated_only: bool = False
) -> list[Completion]:
    """The newest `limit` completions of an equal prompt that teach `learner` (and have a signal), newest first."""
    sql = """SELECT * FROM completions WHERE prompt_key = :key AND adapter = :learner
                 AND (NOT :rated_only OR EXISTS (SELECT 1 FROM signals WHERE completion_id = completions.id))
             ORDER BY rowid DESC LIMIT :limit"""
    values = {"key": key, "learner": learner, "rated_only": rated_only, "limit": limit}
    return [_completion(db, row) for row in db.query(sql, values)]


def _completion(db: Database, row: dict[str, Any]) -> Completion:
    """A row of `completions` with its choices."""
    choices = db.query("SELECT * FROM choices WHERE completion_id = ? ORDER BY choice", [row["id"]])
    return record_of(Completion, row, choices=tuple(record_of(Choice, choice) for choice in choices))
