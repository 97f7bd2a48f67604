"""The rules that make preference pairs of users' signals on answers.

They err towards no pair: a missed correction costs one pair, an invented one teaches the wrong thing.
Everything here runs inside `Store.write`.

| signal | rating | pairs | its weight in `feedback.weights` |
| --- | --- | --- | --- |
| chosen | + | over every other candidate of the same completion | `chosen` |
| edit | | the edited text over the original | `edit` |
| up, rejected, down | + - - | scalar | `thumbs` |
| regenerate | - | scalar: the later answer that is accepted is chosen | `regenerate` |
| dwell | + or - by reading time | scalar | `dwell` |
| skip | - | scalar | `skip` |
| rephrase (seen in the next turn) | - | scalar; the next turn's answer is chosen when accepted | `rephrase` |
| accepted (in the next turn) | + | scalar: the chat went on after another answer or a complaint | `regenerate` |

A scalar signal makes a pair when the same prompt of the same adapter has an answer with the opposite rating; the lower
of the two weights counts. Of an answer's ratings the latest counts. A signal of weight 0 is stored but makes no pair.

A rating that makes no pair is a row of `pairs` with one answer alone, if an account that teaches the adapter
(`_teaches`) gave it, and by more than dwell or skip. It is learned at once, or waits while `align.unpaired` is
"off". It is dropped when a pair with that answer is stored, or the opposite rating of it.
"""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Literal

from sqlite_utils import Database

from edged.align.feedback.pair_bounds import Asked, cut_asked, cut_side, too_long
from edged.settings.load import FeedbackSettings, Settings
from edged.store import feedback, utc_text
from edged.store.completions import (
    Choice,
    Completion,
    Message,
    completions_of_prompt,
    content_text,
    get_completion,
    prompt_key,
)
from edged.store.feedback import PairRow, Side, Signal, calls_text
from edged.store.jobs.jobs import checkpoint_of

SIGNALS = ("chosen", "rejected", "up", "down", "edit", "regenerate", "dwell", "skip")
"""Signals that an application may report."""
UNPAIRED = "waits for an answer to the same prompt with the opposite rating"
"""Why a rating makes no pair yet."""
_DEFAULTS = Settings()
_MAX_SIGNALS = 64
"""Most signals of one account on one answer."""
_MAX_PARTNERS = 4
"""Most pairs that one rating makes with opposite ratings, the newest first."""
ErrorKind = Literal[
    "unknown_completion", "bad_choice", "bad_signal", "equal_sides", "empty_side", "too_long", "wrong_user"
]


class FeedbackError(ValueError):
    """Feedback that is refused; `kind` names the reason."""

    def __init__(self, message: str, kind: ErrorKind) -> None:
        super().__init__(message)
        self.kind: ErrorKind = kind


@dataclass(frozen=True, slots=True)
class Feedback:
    """An application's report about an answer. `user` None trusts the completion's own."""

    user: str | None
    completion_id: str
    signal: str
    choice: int | None = None
    text: str | None = None
    seconds: float | None = None
    account: str | None = None
    named: Collection[str] = ()
    """Users that [access] grants the account by name."""


@dataclass(frozen=True, slots=True)
class FeedbackResult:
    """The result of a report: its id and its pairs, or its single rating. `reason` says why there is no pair (yet).

    `dropped` are ids of single ratings whose place is taken.
    `duplicate`: nothing was stored; ids and pairs are those of the earlier report, which are in training already.
    """

    feedback_id: str
    pair_ids: tuple[int, ...] = ()
    reason: str = ""
    duplicate: bool = False
    dropped: tuple[int, ...] = ()


def record_signal(db: Database, report: Feedback, now: datetime, settings: Settings = _DEFAULTS) -> FeedbackResult:
    """Store a signal and the pairs that follow from it; a repeated report changes nothing. Raises FeedbackError."""
    completion = get_completion(db, report.completion_id)
    if completion is None:
        raise unknown_completion(report.completion_id)
    learner = _learner(completion, report.user)
    answer = answer_of(db, completion, _choice(completion, report), settings)
    signal = _new_signal(learner, answer, report.signal, report.text, report.seconds, now)
    signal = replace(signal, account=report.account)
    _validate(answer, signal)
    if sum(each.account == report.account for each in answer.signals) >= _MAX_SIGNALS:
        which = f'choice {answer.choice.choice} of completion "{completion.id}"'
        raise FeedbackError(f"{which} has {_MAX_SIGNALS} signals of this account: no more are taken", "bad_signal")
    return _record(db, answer, signal, learner in report.named)


def unknown_completion(completion_id: str) -> FeedbackError:
    """The error for a completion that does not exist, or is another user's."""
    why = "it was never answered here, it named no user (send `user` with the request), or it is too old"
    return FeedbackError(f'completion "{completion_id}" is not known: {why}', "unknown_completion")


def record_pair(
    db: Database,
    user: str | None,
    chosen: str,
    rejected: str,
    now: datetime,
    messages: Sequence[Message] | None = None,
    prompt: str | None = None,
    prompt_ids: Sequence[int] | None = None,
    weight: float = 1.0,
    settings: Settings = _DEFAULTS,
    account: str | None = None,
    named: Collection[str] = (),
    imported: bool = False,
    single: bool = False,
) -> FeedbackResult:
    """Store an explicit pair about `messages`, `prompt` or bare tokens. A pair that waits already is not queued twice.

    `single`: it is a rating of one answer, good as `chosen` or bad as `rejected`, and the other text is empty. Only an
    account that teaches the adapter (`_teaches`) has it learned. Raises FeedbackError.
    """
    if not user:
        raise FeedbackError("the pair names no user, so there is no adapter to teach: add `user`", "wrong_user")
    if not messages and not prompt and not prompt_ids:
        raise FeedbackError("the pair has no prompt: give `messages`, `prompt` or `prompt_ids`", "empty_side")
    if not single:
        _check_sides(chosen, rejected)
    elif not (chosen + rejected).strip():
        raise FeedbackError("the rated answer is empty: nothing can be learned from it", "empty_side")
    about = {"messages": messages, "prompt": prompt, "prompt_ids": prompt_ids}
    sides = {"completion": chosen or rejected} if single else {"chosen": chosen, "rejected": rejected}
    _check_lengths(settings, **sides, **about)
    source, kind = ("thumbs", "rating") if single else ("pair", "pair")
    key = prompt_key(messages, prompt, prompt_ids or ())
    waiting = feedback.waiting_pair(db, key, user, chosen, rejected, source)
    if waiting is not None:
        pair_id, signal_id = waiting
        return FeedbackResult(signal_id, (pair_id,), f"this very {kind} waits already", duplicate=True)
    name = ("up" if chosen else "down") if single else "pair"
    unweighed = weight_of(settings.feedback, name) == 0
    why = f"feedback.weights.{source} is 0: explicit {kind}s are not learned from" if unweighed else ""
    signal = Signal(_new_id(), utc_text(now), user, name, reason=why or _why_untaught(db, user), account=account)
    if single and not (signal.reason or account is None or _teaches(db, signal, user in named)):
        signal = replace(signal, reason=_only_teachers(user))
    feedback.insert_signal(db, signal)
    if signal.reason:
        return FeedbackResult(signal.id, reason=signal.reason)
    ids = None if prompt_ids is None else tuple(prompt_ids)
    asked = (None if messages is None else tuple(messages), prompt, ids, None)
    weight *= weight_of(settings.feedback, name)
    pair_id = _insert(db, signal, user in named, asked, (Side(chosen), Side(rejected)), source, weight, imported)
    feedback.set_signal_pairs(db, signal.id, [pair_id])
    return FeedbackResult(signal.id, (pair_id,))


def note_next_turn(
    db: Database, completion_id: str, now: datetime, settings: Settings = _DEFAULTS
) -> FeedbackResult | None:
    """Store the signal of a newly stored chat completion on the answer before it; None where it gives none.

    When its last message corrects or rephrases the user's message before, the answer between is marked rejected
    ("rephrase"). When the chat simply goes on, and another answer to the same prompt had been regenerated, or the one
    before had been complained about, the answer is marked "accepted".
    """
    completion = get_completion(db, completion_id)
    before = answer_before(db, completion, settings) if completion else None
    if completion is None or before is None or completion.messages is None:
        return None
    said = [content_text(message) for message in completion.messages if message.get("role") == "user"]
    asked, asks = said[-2] if len(said) > 1 else "", said[-1]
    learner = before.completion.adapter or ""
    if is_correction(asks) or is_rephrase(asked, asks):
        words = cut_side(Side(asks), settings.align.max_pair_tokens).text
        return _record(db, before, _new_signal(learner, before, "rephrase", words, None, now))
    earlier = answer_before(db, before.completion, settings)
    complained = earlier is not None and earlier.rating is not None and earlier.rating.signal == "rephrase"
    others = rated_others(db, before)
    again = any(other.rating and other.rating.signal == "regenerate" for other in others)
    if before.rating is None and (complained or again):
        return _record(db, before, _new_signal(learner, before, "accepted", None, None, now))
    return None


def _record(db: Database, answer: RatedAnswer, signal: Signal, named: bool = False) -> FeedbackResult:
    """Store a valid signal with its pairs, unless it is stored already; `named` as for `_teaches`."""
    earlier, untaught = _duplicate(answer, signal), _why_untaught(db, signal.user)
    alone = not untaught and _counts_alone(db, answer, signal, named)
    if earlier is not None and (earlier.pair_ids or not alone):
        return FeedbackResult(earlier.id, earlier.pair_ids, earlier.reason, duplicate=True)
    # All signals on an answer are read for each further one: one without pairs is replaced by the next of its kind.
    kind = (signal.signal, signal.account)
    former = next((each for each in answer.signals if (each.signal, each.account) == kind and not each.pair_ids), None)
    if former is not None:
        signal = replace(signal, id=former.id)
        feedback.renew_signal(db, signal)
    else:
        feedback.insert_signal(db, signal)
    rated = replace(answer, signals=(*(each for each in answer.signals if each is not former), signal))
    about = (db, rated, signal, named)
    pair_ids = [] if untaught else _direct_pairs(*about) + _rating_pairs(*about)
    reason, dropped = "" if pair_ids else untaught or _why_no_pair(rated, signal), []
    # A pair of somebody else's may yet be held: what those who teach have said stays beside it.
    if pair_ids and (signal.account is None or _teaches(db, signal, named)):
        sides = [side for pair in feedback.get_pairs(db, pair_ids) for side in (pair.chosen, pair.rejected)]
        dropped = _drop_ratings(db, sides, signal, "a pair with this answer has its place")
    elif alone and not pair_ids:
        pair_ids, dropped = _single_rating(db, rated, signal, named)
        how = "kept" if answer.settings.align.unpaired == "off" else "learned"
        reason = f"{how} as a single rating; {reason}" if pair_ids else reason
    elif reason == UNPAIRED and signal.account and signal.signal not in _WEAK:
        reason += f"; {_only_teachers(signal.user)}"
    feedback.set_signal_pairs(db, signal.id, pair_ids, reason)
    return FeedbackResult(signal.id, tuple(pair_ids), reason, dropped=tuple(dropped))


def _duplicate(answer: RatedAnswer, signal: Signal) -> Signal | None:
    """The earlier signal that this one repeats, or None; a rating that was changed since may be given again."""
    same = [
        earlier
        for earlier in answer.signals
        if (earlier.signal, earlier.text, earlier.seconds) == (signal.signal, signal.text, signal.seconds)
    ]
    if not same or (answer.weight(signal) and answer.rating not in same):
        return None
    return same[-1]


def _direct_pairs(db: Database, answer: RatedAnswer, signal: Signal, named: bool) -> list[int]:
    """Insert the pairs that the signal alone makes (an edit, a choice between candidates); returns their ids."""
    weight = weight_of(answer.settings.feedback, signal.signal)
    asked = answer.asked
    if signal.signal == "edit" and weight:
        edited = Side(signal.text or "", beside=answer.choice.beside)
        return [_insert(db, signal, named, asked, (edited, answer.side), "edit", weight)]
    if signal.signal != "chosen" or not weight:
        return []
    candidates = [replace(answer, choice=choice).side for choice in answer.completion.choices]
    return [
        _insert(db, signal, named, asked, (answer.side, other), "chosen", weight)
        for other in candidates
        if _differ(answer.side, other) and not feedback.has_pair(db, answer.side, other)
    ]


def _rating_pairs(db: Database, answer: RatedAnswer, signal: Signal, named: bool) -> list[int]:
    """Insert the pairs with oppositely rated answers to the same prompt, and with the answer that this one corrects."""
    weight = answer.weight(signal)
    if not weight:
        return []
    partners = [other for other in rated_others(db, answer) if other.rating and other.weight(other.rating) * weight < 0]
    before = answer_before(db, answer.completion, answer.settings) if weight > 0 else None
    if before is not None and before.rating is not None and before.rating.signal == "rephrase":
        partners.append(before)
    pair_ids: list[int] = []
    for partner in partners:
        chosen, rejected = (answer, partner) if weight > 0 else (partner, answer)
        if len(pair_ids) == _MAX_PARTNERS or partner.rating is None:
            break
        if not _differ(chosen.side, rejected.side) or feedback.has_pair(db, chosen.side, rejected.side):
            continue
        source = _source(*((signal, partner.rating) if weight > 0 else (partner.rating, signal)))
        least = min(abs(weight), abs(partner.weight(partner.rating)))
        # The pair has the rejected answer's prompt: an answer to its rephrasing is a better answer to it.
        pair_id = _insert(db, signal, named, rejected.asked, (chosen.side, rejected.side), source, least)
        feedback.set_signal_pairs(db, partner.rating.id, (*partner.rating.pair_ids, pair_id))
        pair_ids.append(pair_id)
    return pair_ids


def _only_teachers(user: str) -> str:
    teachers = f"{user}, an account that [access] names it for, or who taught the adapter first"
    return f"by itself only a rating is learned that {teachers}, gave"


def _counts_alone(db: Database, answer: RatedAnswer, signal: Signal, named: bool) -> bool:
    """Whether a signal is learned from without an opposite one.

    No test holds false ratings, as it holds false pairs: so they must come from an account that teaches the adapter.
    """
    said = answer.weight(signal) and answer.side.text.strip() and signal.signal not in _WEAK
    return bool(said) and _teaches(db, signal, named)


def _teaches(db: Database, signal: Signal, named: bool) -> bool:
    """Whether a signal's account teaches the adapter; `named`: [access] grants it the user by name."""
    return named or feedback.teaches(db, signal.account, signal.user)


def _single_rating(db: Database, answer: RatedAnswer, signal: Signal, named: bool) -> tuple[list[int], list[int]]:
    """Insert a rating by itself, unless the same was said of its answer; returns ids of (the rating, ones dropped)."""
    weight, side = answer.weight(signal), answer.side
    good = weight > 0
    if feedback.is_side(db, side, good):
        return [], []
    dropped = _drop_ratings(db, [side], signal, "its answer was rated anew")
    source = "thumbs" if signal.signal == "chosen" else _WEIGHED_AS.get(signal.signal, signal.signal)
    sides = (side, Side("")) if good else (Side(""), side)
    return [_insert(db, signal, named, answer.asked, sides, source, abs(weight))], dropped


def _drop_ratings(db: Database, sides: Sequence[Side], signal: Signal, why: str) -> list[int]:
    return [each for side in sides for each in feedback.drop_ratings(db, side, signal.created_at, why)]


def _source(positive: Signal, negative: Signal) -> str:
    """The stored `source` of a pair made of two ratings."""
    if negative.signal in ("regenerate", "rephrase"):
        return negative.signal
    weak = next((signal.signal for signal in (negative, positive) if signal.signal in _WEAK), None)
    return weak or "thumbs"


def _insert(
    db: Database,
    signal: Signal,
    named: bool,
    asked: Asked,
    pair: tuple[Side, Side],
    source: str,
    weight: float,
    imported: bool = False,
) -> int:
    """Insert a pair about the prompt `asked`, for the adapter that the signal teaches; returns its id.

    `pair` has the chosen and the rejected answer.
    """
    about = (signal.created_at, signal.user, signal.id, source, weight, *asked[:3])
    kept = PairRow(0, *about, *pair, state="queued", account=signal.account, direct=named)
    row = replace(kept, template_arguments=asked[3])
    key = prompt_key(row.messages, row.prompt, row.prompt_ids or (), row.template_arguments)
    return feedback.insert_pair(db, row, key, imported)


def _why_untaught(db: Database, adapter: str) -> str:
    """Return why no feedback teaches an adapter; "" where it may."""
    told = f"{adapter} is a checkpoint of a fine-tuning job, which stays as it is: no feedback teaches it"
    return told if checkpoint_of(db, adapter) else ""


def _why_no_pair(answer: RatedAnswer, signal: Signal) -> str:
    if not weight_of(answer.settings.feedback, signal.signal):
        return f'"{signal.signal}" weighs 0 here (section [feedback] of the settings): it is not learned from'
    if signal.signal == "dwell" and not answer.weight(signal):
        return f"{signal.seconds:g} s over {len(answer.choice.text.split())} words say nothing either way"
    if signal.signal == "chosen" and len(answer.completion.choices) > 1:
        return "the other candidates are equal or empty"
    return UNPAIRED


def _learner(completion: Completion, user: str | None) -> str:
    """The adapter that feedback on a completion teaches. Raises FeedbackError."""
    if completion.adapter is None:
        so = "so there is no adapter to teach: send `user` with the request"
        raise FeedbackError(f'completion "{completion.id}" was asked for without a user, {so}', "wrong_user")
    if user is not None and user not in (completion.user, completion.adapter):
        raise FeedbackError(f'completion "{completion.id}" is not one of user "{user}"', "wrong_user")
    return completion.adapter


def _choice(completion: Completion, report: Feedback) -> Choice:
    """The answer that a report is about. Raises FeedbackError."""
    by_index = {choice.choice: choice for choice in completion.choices}
    index = report.choice
    if index is None and len(by_index) == 1:
        index = next(iter(by_index))
    if index not in by_index:
        numbers = ", ".join(map(str, by_index))
        known = f"choices {numbers}" if len(by_index) > 1 else f"only {numbers}"
        wrong = "choice is missing" if index is None else f"choice {index} does not exist"
        raise FeedbackError(f'{wrong}: completion "{completion.id}" has {known}', "bad_choice")
    return by_index[index]


def _validate(answer: RatedAnswer, signal: Signal) -> None:
    """Raise FeedbackError when a report lacks a field that its signal needs, or has a bad one."""
    if signal.signal not in SIGNALS:
        raise FeedbackError(f'signal "{signal.signal}" is not known: use one of {", ".join(SIGNALS)}', "bad_signal")
    if signal.seconds is not None and not (math.isfinite(signal.seconds) and signal.seconds >= 0):
        raise FeedbackError(f"seconds = {signal.seconds} is not a time: give 0 or more", "bad_signal")
    if signal.signal == "dwell" and signal.seconds is None:
        raise FeedbackError('signal "dwell" needs `seconds`', "bad_signal")
    if signal.signal == "edit" and signal.text is None:
        raise FeedbackError('signal "edit" needs the edited answer as `text`', "bad_signal")
    _check_lengths(answer.settings, text=signal.text)
    if signal.signal == "edit":
        _check_sides(signal.text or "", answer.side.text)
    if signal.signal == "chosen" and not answer.side.text.strip():
        raise FeedbackError("the chosen answer is empty: nothing can be learned from it", "empty_side")


def _check_sides(chosen: str, rejected: str) -> None:
    for name, text in (("chosen", chosen), ("rejected", rejected)):
        if not text.strip():
            raise FeedbackError(f"the {name} answer is empty: nothing can be learned from it", "empty_side")
    if chosen.strip() == rejected.strip():
        message = "the chosen and the rejected answer are equal: nothing can be learned from them"
        raise FeedbackError(message, "equal_sides")


def _check_lengths(settings: Settings, **fields: Any) -> None:
    """Raise FeedbackError for the first field that is longer than a pair can use; None is a field that is not given."""
    for name, value in fields.items():
        if value is not None and (problem := too_long(name, value, settings.align.max_pair_tokens)):
            raise FeedbackError(problem, "too_long")


def _differ(one: Side, other: Side) -> bool:
    return bool(one.text.strip()) and bool(other.text.strip()) and one.text.strip() != other.text.strip()


def _new_signal(
    user: str, answer: RatedAnswer, name: str, text: str | None, seconds: float | None, now: datetime
) -> Signal:
    return Signal(_new_id(), utc_text(now), user, name, answer.completion.id, answer.choice.choice, text, seconds)


def _new_id() -> str:
    return f"fb-{secrets.token_hex(12)}"


_GOOD, _BAD = ("chosen", "up", "accepted"), ("rejected", "down", "regenerate", "skip", "rephrase")
"""Signals that rate an answer good or bad; the rating of "dwell" depends on the answer's length."""
_WEIGHED_AS = {"accepted": "regenerate", "up": "thumbs", "down": "thumbs", "rejected": "thumbs"}
"""Signals without a weight setting of their own, by the one that they use."""
_WEAK = ("dwell", "skip")
"""Signals that follow from what a person does, and are not said."""
_READING_WORDS_PER_S = 4.0
_READ, _GLANCED = 0.5, 0.1
"""Shares of an answer's reading time from which dwelling is approval, and below which it is rejection."""
_LOOK_BACK = 32
"""Most completions of the same prompt that are searched, the newest first."""


@dataclass(frozen=True, slots=True)
class RatedAnswer:
    """A stored answer and the signals on it, oldest first."""

    completion: Completion
    choice: Choice
    signals: tuple[Signal, ...]
    settings: Settings

    @property
    def side(self) -> Side:
        """The answer as one side of a pair."""
        text, beside = self.choice.text, self.choice.beside
        text = text if text.strip() else calls_text(beside) or text
        side = Side(text, self.choice.token_ids, self.completion.id, self.choice.choice, beside)
        return cut_side(side, self.settings.align.max_pair_tokens)

    @property
    def asked(self) -> Asked:
        """The prompt that it answers."""
        known = self.completion
        asked = (known.messages, known.prompt, known.prompt_ids, known.template_arguments)
        return cut_asked(asked, self.settings.align.max_pair_tokens)

    @property
    def rating(self) -> Signal | None:
        """The latest signal that rates the answer good or bad."""
        return next((signal for signal in reversed(self.signals) if self.weight(signal)), None)

    def weight(self, signal: Signal) -> float:
        """The signal's weight with the rating's sign; 0 for no rating."""
        good, bad = signal.signal in _GOOD, signal.signal in _BAD
        if signal.signal == "dwell":
            reading_s, seconds = len(self.choice.text.split()) / _READING_WORDS_PER_S, signal.seconds or 0.0
            good, bad = seconds >= _READ * reading_s, seconds < _GLANCED * reading_s
        if not (good or bad):
            return 0.0
        return weight_of(self.settings.feedback, signal.signal) * (-1 if bad else 1)


def weight_of(settings: FeedbackSettings, signal: str) -> float:
    """The weight of a kind of signal, in [0, 1]."""
    return float(getattr(settings.weights, _WEIGHED_AS.get(signal, signal)))


def answer_of(db: Database, completion: Completion, choice: Choice, settings: Settings) -> RatedAnswer:
    """An answer with its signals, oldest first."""
    return _with_signals(db, [(completion, choice)], settings)[0]


def rated_others(db: Database, answer: RatedAnswer) -> list[RatedAnswer]:
    """The other answers to the same prompt by the same adapter that have a rating, newest first."""
    completion = answer.completion
    same = completions_of_prompt(db, completion.prompt_key, completion.adapter or "", _LOOK_BACK, rated_only=True)
    choices = [(other, choice) for other in same for choice in other.choices]
    answers = _with_signals(db, choices, answer.settings)
    return [other for other in answers if other.rating is not None and other.side != answer.side]


def answer_before(db: Database, completion: Completion, settings: Settings) -> RatedAnswer | None:
    """The stored answer that a chat's last user message replies to, as the same user got it, or None."""
    messages = completion.messages
    if completion.adapter is None or messages is None or len(messages) < 3:
        return None
    # The results of calls are answered as a user's message is; they are no next turn themselves.
    roles = [message.get("role") for message in messages[-3:]]
    if roles[0] not in ("user", "tool") or roles[1:] != ["assistant", "user"]:
        return None
    shown = content_text(messages[-2]).strip()
    key = prompt_key(messages[:-2], None, (), completion.template_arguments)
    for earlier in completions_of_prompt(db, key, completion.adapter, _LOOK_BACK):
        for choice in earlier.choices:
            if shown and choice.text.strip() == shown:
                return answer_of(db, earlier, choice, settings)
    return None


def _with_signals(db: Database, choices: Sequence[tuple[Completion, Choice]], settings: Settings) -> list[RatedAnswer]:
    signals: dict[tuple[str | None, int | None], list[Signal]] = {}
    for signal in feedback.signals_of(db, sorted({completion.id for completion, _ in choices})):
        signals.setdefault((signal.completion_id, signal.choice), []).append(signal)
    return [
        RatedAnswer(completion, choice, tuple(signals.get((completion.id, choice.choice), ())), settings)
        for completion, choice in choices
    ]


_CORRECTION = re.compile(
    r"""\s*(?:(?:no|nope|sorry|hm+|actually|but)\b[\s,.:!-]*)?(?:
        (?:that|this|it)(?:'s|’s|\sis|\swas|\sisn't|\sisn’t)\s(?:not|wrong|incorrect|a\swrong)\b
      | (?:wrong|incorrect)\b
      | not\s(?:what|quite|right|correct|like\sthat)\b
      | i\s(?:meant|mean|said|asked|wanted|did\snot|didn't|didn’t)\b
      | you\s(?:misunderstood|missed|did\snot|didn't|didn’t|forgot)\b
      | (?:please\s)?(?:try|answer|explain|say|write|do)\s(?:it\s|that\s|this\s)?again\b
      | (?:please\s)?(?:rephrase|rewrite|redo|shorten)\b
      | (?:please\s|(?:can|could|would)\syou\s)?(?:say|put)\s(?:it|that|this)\s
        (?:in\s(?:a|one)\s\w+(?:\sway)?|more\s\w+|less\s\w+|like\sa\s\w+|\w+ly)\b
      | (?:make\s(?:it|that)\s|please\s)?(?:be\s)?(?:much\s|a\sbit\s)?(?:shorter|longer|simpler|briefer|less|more)\b
        (?=\s*(?:please|formal|casual|polite|detailed|brief|[,.!]|$))
    )""",
    re.IGNORECASE | re.VERBOSE,
)
_FLAT_NO = re.compile(r"\s*(?:no|nope|wrong)\s*[,.!]*\s*$", re.IGNORECASE)
_COMMON = (
    "a an and any are as at be can could did do does for from give had has have how i in is it its me my of on or our "
    "please should so some tell that the their them then there these they this to us was we were what when where which "
    "who whose why will with would you your s"
)
_STOP_WORDS = frozenset(_COMMON.split())
_SAME_SHARE = 0.6
"""Share of content words (intersection over union) from which two questions count as the same."""
_MIN_WORDS = 2


def is_correction(text: str) -> bool:
    """Whether a message opens with words that reject the answer: "No, I meant ...", "try again", "shorter, please"."""
    return bool(_CORRECTION.match(text) or _FLAT_NO.match(text))


def is_rephrase(asked: str, asks: str) -> bool:
    """Whether two messages ask the same question: they share most of their content words.

    "What is the capital of France?" and "Which city is France's capital?" do; one about Germany's does not.
    """
    before, after = _content_words(asked), _content_words(asks)
    if min(len(before), len(after)) < _MIN_WORDS:
        return asked.strip().lower() == asks.strip().lower() != ""
    return len(before & after) / len(before | after) >= _SAME_SHARE


def _content_words(text: str) -> set[str]:
    return {word for word in re.findall(r"\w+", text.lower()) if word not in _STOP_WORDS}
