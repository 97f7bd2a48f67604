"""Stored answers with what feedback said of them: an answer's rating, its rivals, the answer before it.

Owns the ratings' signs and weights. Must not know how pairs follow from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlite_utils import Database

from edged.align.next_turn import content_text
from edged.store import feedback
from edged.store.completions import Choice, Completion, completions_of_prompt, prompt_key
from edged.store.feedback import Side, Signal

_WEIGHTS = {
    "chosen": 1.0,
    "up": 1.0,
    "accepted": 1.0,
    "rejected": -1.0,
    "down": -1.0,
    "regenerate": -1.0,
    "skip": -0.5,
    "rephrase": -0.5,
}
"""Rating (the sign) and weight of the scalar signals; dwell's depends on the answer."""
_DWELL_WEIGHT = 0.5
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
            return _WEIGHTS.get(signal.signal, 0.0)
        reading_s = len(self.choice.text.split()) / _READING_WORDS_PER_S
        seconds = signal.seconds or 0.0
        if seconds >= _READ * reading_s:
            return _DWELL_WEIGHT
        return -_DWELL_WEIGHT if seconds < _GLANCED * reading_s else 0.0


def answer_of(db: Database, completion: Completion, choice: Choice) -> Answer:
    """An answer with its signals, oldest first."""
    return _with_signals(db, [(completion, choice)])[0]


def rated_others(db: Database, answer: Answer) -> list[Answer]:
    """The other answers to the same prompt by the same adapter that have a rating, newest first."""
    completion = answer.completion
    same = completions_of_prompt(db, completion.prompt_key, completion.learner or "", _LOOK_BACK, rated_only=True)
    answers = _with_signals(db, [(other, choice) for other in same for choice in other.choices])
    return [other for other in answers if other.rating is not None and other.side != answer.side]


def answer_before(db: Database, completion: Completion) -> Answer | None:
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
                return answer_of(db, earlier, choice)
    return None


def _with_signals(db: Database, choices: Sequence[tuple[Completion, Choice]]) -> list[Answer]:
    signals: dict[tuple[str | None, int | None], list[Signal]] = {}
    for signal in feedback.signals_of(db, sorted({completion.id for completion, _ in choices})):
        signals.setdefault((signal.completion_id, signal.choice), []).append(signal)
    return [
        Answer(completion, choice, tuple(signals.get((completion.id, choice.choice), ())))
        for completion, choice in choices
    ]
