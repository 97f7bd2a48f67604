"""Stored answers with what feedback said of them: an answer's rating, its rivals, the answer before it.

Owns the ratings' signs, and which setting weighs them. Must not know how pairs follow from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlite_utils import Database

from edged.align.next_turn import content_text
from edged.config import FeedbackSettings
from edged.store import feedback
from edged.store.completions import Choice, Completion, completions_of_prompt, prompt_key
from edged.store.feedback import Side, Signal

_SIGNS = {
    "chosen": 1,
    "up": 1,
    "accepted": 1,
    "rejected": -1,
    "down": -1,
    "regenerate": -1,
    "skip": -1,
    "rephrase": -1,
}
"""Ratings by signal; dwell's depends on the answer."""
_READING_WORDS_PER_S = 4.0
_READ, _GLANCED = 0.5, 0.1
"""Shares of an answer's reading time from which dwelling is approval, and below which it is rejection."""
_LOOK_BACK = 32
"""Completions of the same prompt that are looked at, the newest first."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One stored answer, and what feedback said of it."""

    completion: Completion
    choice: Choice
    signals: tuple[Signal, ...]
    settings: FeedbackSettings

    @property
    def side(self) -> Side:
        """The answer as a pair holds it."""
        return Side(self.choice.text, self.choice.token_ids, self.completion.id, self.choice.choice)

    @property
    def rating(self) -> Signal | None:
        """The latest signal that says good or bad."""
        return next((signal for signal in reversed(self.signals) if self.weight(signal)), None)

    def weight(self, signal: Signal) -> float:
        """The signal's weight with the rating's sign; 0 says nothing either way."""
        if signal.signal != "dwell":
            return _SIGNS.get(signal.signal, 0) * weight_of(self.settings, signal.signal)
        reading_s = len(self.choice.text.split()) / _READING_WORDS_PER_S
        seconds = signal.seconds or 0.0
        if seconds >= _READ * reading_s:
            return self.settings.weight_dwell
        return -self.settings.weight_dwell if seconds < _GLANCED * reading_s else 0.0


def weight_of(settings: FeedbackSettings, signal: str) -> float:
    """What a kind of signal counts, in [0, 1]."""
    weights = {
        "pair": settings.weight_pair,
        "chosen": settings.weight_chosen,
        "edit": settings.weight_edit,
        "regenerate": settings.weight_regenerate,
        "accepted": settings.weight_regenerate,
        "rephrase": settings.weight_rephrase,
        "dwell": settings.weight_dwell,
        "skip": settings.weight_skip,
    }
    return weights.get(signal, settings.weight_thumbs)


def answer_of(db: Database, completion: Completion, choice: Choice, settings: FeedbackSettings) -> Answer:
    """An answer with its signals, oldest first."""
    return _with_signals(db, [(completion, choice)], settings)[0]


def rated_others(db: Database, answer: Answer) -> list[Answer]:
    """The other answers to the same prompt by the same adapter that have a rating, newest first."""
    completion = answer.completion
    same = completions_of_prompt(db, completion.prompt_key, completion.learner or "", _LOOK_BACK, rated_only=True)
    choices = [(other, choice) for other in same for choice in other.choices]
    answers = _with_signals(db, choices, answer.settings)
    return [other for other in answers if other.rating is not None and other.side != answer.side]


def answer_before(db: Database, completion: Completion, settings: FeedbackSettings) -> Answer | None:
    """The stored answer that a chat's last user message replies to, as the same user got it; None for none."""
    messages = completion.messages
    if completion.learner is None or messages is None or len(messages) < 3:
        return None
    if [message.get("role") for message in messages[-3:]] != ["user", "assistant", "user"]:
        return None
    shown = content_text(messages[-2]).strip()
    for earlier in completions_of_prompt(db, prompt_key(messages[:-2], None), completion.learner, _LOOK_BACK):
        for choice in earlier.choices:
            if shown and choice.text.strip() == shown:
                return answer_of(db, earlier, choice, settings)
    return None


def _with_signals(
    db: Database, choices: Sequence[tuple[Completion, Choice]], settings: FeedbackSettings
) -> list[Answer]:
    signals: dict[tuple[str | None, int | None], list[Signal]] = {}
    for signal in feedback.signals_of(db, sorted({completion.id for completion, _ in choices})):
        signals.setdefault((signal.completion_id, signal.choice), []).append(signal)
    return [
        Answer(completion, choice, tuple(signals.get((completion.id, choice.choice), ())), settings)
        for completion, choice in choices
    ]
