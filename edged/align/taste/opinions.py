"""A user's opinions, read from the store: the pairs and single ratings that the taste model is fitted to."""

from collections.abc import Mapping, Sequence
from datetime import datetime

from sqlite_utils import Database

from edged.align.taste.model import Opinion
from edged.store.completions import content_text
from edged.store.feedback import PairRow, latest_pairs

_QUESTION_CHARS = 4000
"""Characters of what was asked that are looked at, the last ones."""
MOST_OPINIONS = 1000
"""Number of the latest signals that count."""


def opinions_of(db: Database, adapter: str) -> list[Opinion]:
    """A user's latest opinions, oldest first; those that are held, were dropped, or are the daemon's own are not.

    A call of a tool is right or wrong, and no matter of taste.
    """
    rows = latest_pairs(db, adapter, MOST_OPINIONS)
    return [opinion_of(row) for row in rows if not (row.chosen.calls or row.rejected.calls)]


def opinion_of(row: PairRow) -> Opinion:
    """The opinion that a pair is."""
    at_s = datetime.fromisoformat(row.created_at).timestamp()
    texts = question_of(row.messages, row.prompt), row.chosen.text, row.rejected.text
    return Opinion(*texts, row.weight, at_s, row.source == "edit")


def question_of(messages: Sequence[Mapping[str, object]] | None, prompt: str | None) -> str:
    """The text under which answers are compared: a chat's last message that no tool wrote, or the prompt."""
    said = [message for message in messages or () if message.get("role") not in ("tool", "assistant")]
    return (content_text((said or messages)[-1]) if messages else prompt or "")[-_QUESTION_CHARS:]
