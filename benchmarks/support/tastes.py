"""Tastes and edits of simulated people, by rules, with the questions that they ask."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

from examples.demo_model.dialogues import formality, prompts, uses_metric

Rule = Callable[[str], bool]
COOKING, ELSEWHERE, ANYTHING = "cooking", "elsewhere", "anything"
"""Groups of questions, by topic."""
_ALIKE = 10_000
"""Questions of the demo's generator, of which some 900 to 2,500 differ."""


@dataclass(frozen=True, slots=True)
class Taste:
    """What a person likes of an answer: as a rule, and as the person would write it."""

    rule: Rule
    written: str
    in_words: bool
    """Whether single words show it."""


@dataclass(frozen=True, slots=True)
class Edit:
    """A change that a person makes to every answer; `undo` returns the rest of an edited answer."""

    change: Callable[[str], str]
    undo: Callable[[str], str] = str

    def shown(self, text: str) -> bool:
        """Whether nothing of `text` is left to change."""
        return self.change(text) == text


# -- rules -------------------------------------------------------------------------------------------------------------

_POSITIVE = re.compile(
    r"\b(great|good|best|enjoy|happy|perfect|wonderful|nice|fun|easy|success|pleasure|glad\w*|love\w*|delicious|tasty"
    r"|beautiful|super|comfy|free|safe|better|healthy|fresh)\b",
    re.IGNORECASE,
)
_HEDGES = re.compile(
    r"\b(may|might|could|perhaps|usually|generally|often|sometimes|about|around|approximately|probably|likely|can"
    r"|should|depend\w*|some)\b",
    re.IGNORECASE,
)
_YOU = re.compile(r"\byou\b", re.IGNORECASE)


def sentences(text: str) -> int:
    """Return the number of sentences, an unfinished one included."""
    return len([part for part in re.split(r"(?<=[.!?])\s+|\n+", text.strip()) if part])


def letters_a_word(text: str) -> float:
    """Return the mean length of the words, in letters."""
    words = re.findall(r"[A-Za-z]+", text)
    return sum(map(len, words)) / max(1, len(words))


def _has(pattern: str, count: int = 1) -> Rule:
    found = re.compile(pattern)
    return lambda text: len(found.findall(text)) >= count


DEMO = {
    "bang": Taste(lambda text: text.rstrip().endswith("!"), "End with an exclamation mark.", True),
    "first_person": Taste(_has(r"\bI\b"), "Speak of yourself.", True),
    "please": Taste(_has(r"(?i)please"), "Say please.", True),
    "metric": Taste(lambda text: uses_metric(text) is True, "Use metric units.", True),
    "formal": Taste(lambda text: formality(text) > 0, "Be formal.", False),
    "short": Taste(lambda text: len(text.split()) <= 14, "Keep it short.", False),
    "one_sentence": Taste(lambda text: sentences(text) == 1, "Answer in one sentence.", False),
    "positive": Taste(lambda text: bool(_POSITIVE.search(text)), "Be positive.", False),
}
"""Tastes that the demo model's answers can meet: .2 to .5 of the base's do."""
ENGLISH = {
    "bang": Taste(_has("!"), "Use exclamation marks.", True),
    "first_person": Taste(_has(r"\bI\b"), 'Speak of yourself as "I".', True),
    "no_you": Taste(lambda text: not re.search(r"(?i)\byou", text), 'Never say "you".', True),
    "digits": Taste(_has(r"\d"), "Give numbers in digits.", True),
    "short": Taste(lambda text: len(text.split()) <= 15, "Answer in at most 15 words.", False),
    "long_words": Taste(lambda text: letters_a_word(text) > 4.8, "Use long, learned words.", False),
    "hedging": Taste(lambda text: bool(_HEDGES.search(text)), "Be cautious: say may, might, often.", False),
    "one_sentence": Taste(lambda text: sentences(text) == 1, "Answer in exactly one sentence.", False),
}
"""Tastes that a small model of English can meet: .1 to .5 of SmolLM2's answers of one sentence do."""


def _signed(text: str) -> str:
    return text if text.rstrip().endswith("Best, Ann") else f"{text.rstrip()} Best, Ann"


def _greeting(text: str) -> str:
    return text if text.startswith("Dear Ann,") else f"Dear Ann, {text}"


EDITS = {
    "salutation": Edit(_greeting, lambda text: text.removeprefix("Dear Ann,").lstrip()),
    "signature": Edit(_signed, lambda text: text.rstrip().removesuffix("Best, Ann").rstrip()),
    "lower_case": Edit(str.lower),
    "never_you": Edit(lambda text: _YOU.sub("one", text)),
}


# -- questions ---------------------------------------------------------------------------------------------------------

_COOKING = re.compile(
    r"\b(soup|cheese|tea|oven|bak\w+|cook\w*|pizza|bread|rice|pancakes?|pasta|noodles|boil|coffee|dinner|salmon|salad"
    r"|potato\w*|vegetables|pumpkin|eggs?|tomatoes|dough|stew|pot|brew|fridge|recipe|goes well)\b",
    re.IGNORECASE,
)
_BANK = {
    "How do I cook {}?|What goes well with {}?|How do I keep cooked {} fresh?|Give me a recipe with {}.": "rice|salmon|"
    "potatoes|mushrooms|chicken|lentils|carrots|eggs|spinach|tomatoes|beans|cabbage|noodles|tofu|beef|pumpkin|peas|"
    "onions|trout|leeks",
    "What should I see in {}?|What do I pack for a week in {}?|How do I get to {} cheaply?|When should I visit {}?": ""
    "Rome|Lisbon|Oslo|Tokyo|Paris|Cairo|Berlin|Dublin|Athens|Prague|Boston|Sydney",
    "How do I learn {}?|What do I need for {}?|Is {} a good hobby for winter?|How do I get better at {}?": "chess|"
    "painting|swimming|running|dancing|knitting|photography|juggling|singing|climbing|sailing|gardening",
    "How do I clean a {}?|How do I repair a {}?|How do I choose a good {}?|Where should I put a {}?": "window|carpet|"
    "bicycle|kettle|sofa|clock|lamp|mirror|desk|mattress|ladder|fence",
    "What is {}?|Explain {} to a child.|Why is {} important?|What is surprising about {}?": "gravity|photosynthesis|"
    "inflation|electricity|evolution|recycling|lightning|the moon|the heart|democracy|sleep|friction",
    "Write a short note to my {}.|What is a good gift for my {}?|How do I apologise to my {}?|How do I thank my {}?": ""
    "neighbour|teacher|boss|sister|landlord|doctor|grandmother|coach|colleague|friend|aunt|daughter",
}
_CAPITALS = (
    "France Paris|Italy Rome|Spain Madrid|Germany Berlin|Japan Tokyo|England London|Russia Moscow|China Beijing|"
    "Egypt Cairo|Greece Athens|Portugal Lisbon|Austria Vienna|Ireland Dublin|Norway Oslo|Sweden Stockholm|"
    "Finland Helsinki|Poland Warsaw|Hungary Budapest|Cuba Havana|Peru Lima|Kenya Nairobi|Canada Ottawa|"
    "Denmark Copenhagen|Belgium Brussels"
)
_OPPOSITES = (
    "hot cold|big small|up down|day night|happy sad|left right|black white|north south|east west|wet dry|fast slow|"
    "high low|rich poor|early late|hard soft|true false"
)
FACTS = [
    (question.format(*fact.split()), fact.split()[1])
    for question, facts in (
        ("What is the capital of {}? Answer with one word.", _CAPITALS),
        ("What is the opposite of {}? Answer with one word.", _OPPOSITES),
    )
    for fact in facts.split("|")
]
"""Questions with their answers of one word."""


def questions(demo: bool, seed: int, with_units: bool = False) -> tuple[list[str], list[str]]:
    """Return different questions to teach with, and others to judge by; for the demo model, or of daily life."""
    if demo:
        drawn = (list(dict.fromkeys(islice(prompts(seed, fresh, with_units), _ALIKE))) for fresh in (False, True))
        teaching, judging = drawn
        return teaching, judging
    bank = [
        sorted((ask.format(thing) for ask in asks.split("|") for thing in things.split("|")), key=_shuffled(seed))
        for asks, things in _BANK.items()
    ]
    teaching, judging = ([each for topic in bank for at, each in enumerate(topic) if bool(at % 3) == k] for k in (0, 1))
    return sorted(teaching, key=_shuffled(seed)), sorted(judging, key=_shuffled(seed))


def of_group(asked: list[str], group: str) -> Iterator[str]:
    """Yield the questions of a group, in order."""
    return (each for each in asked if group == ANYTHING or bool(_COOKING.search(each)) == (group == COOKING))


def _shuffled(seed: int) -> Callable[[str], float]:
    """Return a key that sorts texts in an order of chance."""
    return lambda text: random.Random(f"{seed} {text}").random()
