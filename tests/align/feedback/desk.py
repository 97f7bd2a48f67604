"""A store with completions and feedback, in short calls."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from edged.align.feedback.signals import Feedback, note_next_turn, record_pair, record_signal
from edged.settings.load import AlignSettings, FeedbackSettings, FeedbackWeights, Settings
from edged.store import Store
from edged.store.completions import insert_completion
from edged.store.feedback import get_pairs, pair_ids_of, signals_of
from tests.store.rows import completion

NOW = datetime(2025, 1, 31, 12, tzinfo=UTC)


def chat(*turns):
    """A conversation that the user begins."""
    return [{"role": role, "content": text} for role, text in zip(("user", "assistant") * 5, turns, strict=False)]


def weighing(**weights: float) -> FeedbackSettings:
    """Settings under which these kinds of feedback count as much."""
    return FeedbackSettings(weights=FeedbackWeights(**weights))


class Desk:
    """Completions and feedback of one store, in short calls."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.settings = FeedbackSettings()
        self.max_tokens = 1024
        self.unpaired: Any = "off"
        self.account: str | None = None
        self.moment = NOW

    @property
    def all(self):
        return Settings(
            feedback=self.settings, align=AlignSettings(max_pair_tokens=self.max_tokens, unpaired=self.unpaired)
        )

    def answer(self, name, *texts, **more):
        row = completion(name, *texts, **more)
        self.store.write(lambda db: insert_completion(db, row)).result()
        return self.store.write(lambda db: note_next_turn(db, name, self.tick(), self.all)).result()

    def tick(self):
        self.moment += timedelta(seconds=1)
        return self.moment

    def report(self, name, signal, choice=None, text=None, seconds=None, user="ada", account=None):
        feedback = Feedback(user, name, signal, choice, text, seconds, account or self.account)
        return self.store.write(lambda db: record_signal(db, feedback, self.tick(), self.all)).result()

    def pair(self, *args, **more):
        return self.store.write(lambda db: record_pair(db, *args, now=self.tick(), settings=self.all, **more)).result()

    def pairs(self, result=None):
        """(chosen, rejected, source, weight) of the result's pairs, or of all."""
        if result is None:
            rows = self.store.read(lambda db: get_pairs(db, pair_ids_of(db)))
        else:
            rows = self.store.read(lambda db: get_pairs(db, result.pair_ids))
        return [(row.chosen.text, row.rejected.text, row.source, row.weight) for row in rows]

    def signals(self, name):
        return self.store.read(lambda db: signals_of(db, [name]))
