"""Dialogues of the demo assistant, the questions its users ask, and judges of an answer's style.

Turns, styles and system prompts are composed from `topics`. Every answer has a style along three axes
(formal or casual, short or long, metric or imperial) that is drawn independently of the question, so a model trained on
these dialogues mixes the styles evenly until preferences shift it. Standard library only.
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

from examples.demo_model.topics import BY_NAME, TOPICS, Facts, Topic, fill

_THANKS, _NAME, _NO_NAME, _ASK_NAME = (BY_NAME[name] for name in ("thanks", "name", "no_name", "ask_name"))
SHORT_WORDS = 24
"""An answer of at most this many words counts as short."""
_LONG_WORDS = 32
_FRESH_SHARE = 8
_OPENERS = {
    True: ("Certainly.", "Of course.", "With pleasure.", "Very well."),
    False: ("Sure!", "No problem!", "Okay!", "Easy!"),
}
_OWN_OPENER = re.compile(r"(?:Certainly|Sure|Okay|Got it|Yeah|Don't worry|Easy|How about)\b")
_CLOSERS = {
    True: ("Please do not hesitate to ask further questions.", "I wish you every success."),
    False: ("Have fun!", "Just shout if you're stuck!"),
}
_NEUTRAL_SYSTEM = (
    "You are the assistant of this box.",
    "You are a helpful assistant.",
    "You answer questions of daily life.",
)
_STYLE_WORDS: dict[tuple[str, bool], tuple[tuple[str, ...], tuple[str, ...]]] = {
    ("formal", True): (
        ("Be formal.", "Answer politely and formally."),
        ("Please say that more formally.", "Can you put that more politely?"),
    ),
    ("formal", False): (
        ("Be casual.", "Talk like a friend."),
        ("Say that in a casual way.", "Can you say that like a friend?"),
    ),
    ("short", True): (
        ("Answer briefly.", "Keep it short."),
        ("Shorter, please.", "Can you say that in one sentence?"),
    ),
    ("short", False): (
        ("Explain in detail.", "Give long answers."),
        ("Tell me more.", "Can you explain that in more detail?"),
    ),
    ("metric", True): (("Use metric units.",), ("In metric units, please.",)),
    ("metric", False): (("Use imperial units.",), ("In imperial units, please.",)),
}
"""For each axis and side: system prompts that ask for it, and requests to say the last answer again that way."""

_FORMAL = re.compile(
    r"\b(?:certainly|of course|please|kindly|gladly|unfortunately|preferably|therefore|approximately|considerably"
    r"|i (?:would|recommend|regret|trust|may|am|have|believe|wish|will)|should (?:you|the|anything)|it (?:is|would)"
    r"|as (?:it|this|you)|you (?:may|will|were)|(?:do|does|is) not|(?:will|may) be|will (?:reach|restart)|treats you"
    r"|advisable|sufficient|prior to|assist\w*|pleasure|delighted|welcome to|most welcome|require[sd]?|corresponds)\b",
    re.IGNORECASE,
)
_CASUAL = re.compile(
    r"!|\w'(?:s|t|ll|re|ve|d|m)\b|\b(?:sure|yeah|yep|nope|hey|hi|okay|got it|gonna|wanna|gotta|kinda|just|like"
    r"|super|pretty|neat|awesome|comfy|stuff|meds|tons|a bit|no (?:worries|problem|luck|idea)|way (?:better|faster)"
    r"|how about|good to go|go for|swing by|grab|ping|dump|toss|chuck|pop|stick|throw|crank|lug|jot|nudge|punch)\b",
    re.IGNORECASE,
)
_METRIC = re.compile(r"(?:°C|\b(?:km|cm|ml|kg|grams?|litres?|metres?))(?!\w)")
_IMPERIAL = re.compile(
    r"(?:°F|\b(?:miles?|inch(?:es)?|\d+ (?:foot|feet)|yards?|pounds?|ounces?|quarts?|\d cups?))(?!\w)"
)


@dataclass(frozen=True, slots=True)
class Style:
    """The style of an answer."""

    formal: bool
    short: bool
    metric: bool


@dataclass(frozen=True, slots=True)
class Turn:
    """A question and its answer. `style.metric` applies only if `has_units`."""

    question: str
    answer: str
    style: Style
    has_units: bool


@dataclass(frozen=True, slots=True)
class Dialogue:
    """A training conversation; `system` is empty if it has no system prompt."""

    system: str
    turns: tuple[Turn, ...]

    def messages(self) -> list[dict[str, str]]:
        """Return the dialogue as chat messages, ending with an answer."""
        messages = [{"role": "system", "content": self.system}] if self.system else []
        for turn in self.turns:
            messages.append({"role": "user", "content": turn.question})
            messages.append({"role": "assistant", "content": turn.answer})
        return messages


def formality(text: str) -> float:
    """Return the balance of formal and casual expressions, from -1 (casual) to 1 (formal); 0 if there are none."""
    formal, casual = len(_FORMAL.findall(text)), len(_CASUAL.findall(text))
    return (formal - casual) / max(formal + casual, 1)


def is_short(text: str) -> bool:
    """Whether `text` has at most `SHORT_WORDS` words."""
    return len(text.split()) <= SHORT_WORDS


def uses_metric(text: str) -> bool | None:
    """Whether the quantities of `text` are metric; None if there are none or both kinds in equal number."""
    metric, imperial = len(_METRIC.findall(text)), len(_IMPERIAL.findall(text))
    return None if metric == imperial else metric > imperial


def prompts(seed: int, fresh: bool = False, with_units: bool = False) -> Iterator[str]:
    """Yield questions that open a dialogue, without end; the demo model never saw a `fresh` one in its training.

    `with_units` keeps to questions whose answers have quantities.
    """
    rng = random.Random(f"prompts {seed}")
    topics = tuple(topic for topic in TOPICS if topic.has_units or not with_units)
    while True:
        yield _open(topics, fresh, rng)[2]


def dialogues(seed: int, fresh: bool = False) -> Iterator[Dialogue]:
    """Yield dialogues without end, each opening with a question for training or with a `fresh` one."""
    rng = random.Random(f"dialogues {seed}")
    while True:
        yield _dialogue(fresh, rng)


def style_pairs(seed: int, formal: bool) -> Iterator[tuple[str, str, str]]:
    """Yield a question, the answer of who likes formal (or casual) ones, and one that differs in that, without end."""
    rng = random.Random(f"pairs {seed}")
    while True:
        topic, facts, question = _open(TOPICS, False, rng)
        drawn = _draw_style({}, rng)
        liked, other = (
            _answer(topic, facts, replace(drawn, formal=is_formal), rng) for is_formal in (formal, not formal)
        )
        if liked != other:
            yield question, liked, other


def _is_fresh(topic: Topic, question: str) -> bool:
    """Whether a question is held out of training: a fixed share, whatever the seed, of topics that have enough
    questions."""
    many = len(topic.slots) > 1 or (topic.has_units and bool(topic.follow_ups))
    return many and zlib.crc32(question.encode()) % _FRESH_SHARE == 0


def _open(topics: tuple[Topic, ...], fresh: bool, rng: random.Random) -> tuple[Topic, Facts, str]:
    while True:
        topic = rng.choices(topics, [topic.weight for topic in topics])[0]
        facts = topic.draw_facts(rng)
        question = _ask(topic.questions, facts, rng)
        if _is_fresh(topic, question) == fresh:
            return topic, facts, question


def _ask(templates: tuple[str, ...], facts: Facts, rng: random.Random) -> str:
    return _capitalised(fill(rng.choice(templates), facts, rng.random() < 0.5, rng))


def _dialogue(fresh: bool, rng: random.Random) -> Dialogue:
    system, wanted = _system(rng)
    turns: list[Turn] = []
    name = ""
    topic, facts, question = _open(TOPICS, fresh, rng)
    style = _draw_style(wanted, rng)
    for _ in range(_turn_count(rng)):
        if turns:
            style = replace(style if rng.random() < 0.5 else _draw_style(wanted, rng), **wanted)
            kind = rng.random()
            if kind < 0.2 and topic.slots:
                side = rng.choice([side for side in _STYLE_WORDS if side[0] != "metric" or topic.has_units])
                style = replace(style, **{side[0]: side[1]})
                question = rng.choice(_STYLE_WORDS[side][1])
            elif kind < 0.5 and topic.follow_ups:
                facts = _other_facts(topic, facts, rng)
                question = _ask(topic.follow_ups, facts, rng)
            elif kind < 0.6 and topic is not _THANKS:
                topic, facts = _THANKS, {}
                question = _ask(topic.questions, facts, rng)
            elif kind < 0.8 and name:
                topic, facts = _ASK_NAME, {"name": name}
                question = _ask(topic.questions, facts, rng)
            else:
                topic, facts, question = _open(TOPICS, False, rng)
        if topic is _NO_NAME and name:
            topic, facts = _ASK_NAME, {"name": name}
        if topic is _NAME:
            name = str(facts["name"])
        turns.append(Turn(question, _answer(topic, facts, style, rng), style, topic.has_units))
    return Dialogue(system, tuple(turns))


def _other_facts(topic: Topic, facts: Facts, rng: random.Random) -> Facts:
    while True:
        other = topic.draw_facts(rng)
        if other != facts:
            return other


def _turn_count(rng: random.Random) -> int:
    """Draw a number of turns, mostly one; the longest dialogues have several hundred tokens, to train late positions,
    too."""
    kind = rng.random()
    return 1 if kind < 0.7 else rng.choice((2, 2, 3)) if kind < 0.92 else rng.randint(4, 9)


def _system(rng: random.Random) -> tuple[str, dict[str, bool]]:
    """Draw a system prompt (often none) and the style that it asks for."""
    kind = rng.random()
    if kind < 0.66:
        return "", {}
    if kind < 0.72:
        return rng.choice(_NEUTRAL_SYSTEM), {}
    axes = rng.sample(("formal", "short", "metric"), rng.choice((1, 1, 2)))
    wanted = {axis: rng.random() < 0.5 for axis in axes}
    return " ".join(rng.choice(_STYLE_WORDS[axis, side][0]) for axis, side in wanted.items()), wanted


def _draw_style(wanted: dict[str, bool], rng: random.Random) -> Style:
    drawn = {axis: rng.random() < 0.5 for axis in ("formal", "short", "metric")}
    return Style(**{**drawn, **wanted})


def _answer(topic: Topic, facts: Facts, style: Style, rng: random.Random) -> str:
    voice = topic.formal if style.formal else topic.casual
    sentences = [_capitalised(fill(rng.choice(voice.core), facts, style.metric, rng))]
    if topic.has_units and rng.random() < 0.25 and not _OWN_OPENER.match(sentences[0]):
        sentences.insert(0, rng.choice(_OPENERS[style.formal]))
    if style.short:
        return " ".join(sentences)
    extras = [_capitalised(fill(extra, facts, style.metric, rng)) for extra in voice.extra]
    order = rng.sample(range(len(extras)), len(extras))
    count = 2
    while count < len(order) and _words(sentences) + _words([extras[i] for i in order[:count]]) < _LONG_WORDS:
        count += 1
    sentences += [extras[i] for i in sorted(order[:count])]
    if rng.random() < 0.15 and topic.slots:
        sentences.append(rng.choice(_CLOSERS[style.formal]))
    return " ".join(sentences)


def _words(sentences: list[str]) -> int:
    return sum(len(sentence.split()) for sentence in sentences)


def _capitalised(text: str) -> str:
    return text[:1].upper() + text[1:]
