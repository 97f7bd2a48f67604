"""Topics of the demo assistant, read from topics.json: questions, facts, and answers in two voices, all with slots.

`[a|b]` in a template is one of several wordings (possibly empty), `{name}` a slot filled from the facts; a fact that is
a pair of texts is a quantity in metric and in imperial units.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Quantity = tuple[str, str]
"""One amount as (metric text, imperial text)."""
Facts = Mapping[str, str | Quantity]

_CHOICE = re.compile(r"\[([^\[\]]*)\]")


@dataclass(frozen=True, slots=True)
class Voice:
    """A voice: `core` sentences that answer the question, `extra` ones that a long answer adds."""

    core: tuple[str, ...]
    extra: tuple[str, ...]

    @classmethod
    def of(cls, entry: dict[str, Any]) -> Voice:
        """Make a voice from its entry in topics.json."""
        return cls(tuple(entry["core"]), tuple(entry["extra"]))


@dataclass(frozen=True, slots=True)
class Topic:
    """A kind of question. Facts for a question are one mapping from each of `slots`, merged."""

    name: str
    weight: float
    has_units: bool
    questions: tuple[str, ...]
    follow_ups: tuple[str, ...]
    slots: tuple[tuple[Facts, ...], ...]
    formal: Voice
    casual: Voice

    @classmethod
    def of(cls, entry: dict[str, Any]) -> Topic:
        """Make a topic from its entry in topics.json."""
        return cls(
            entry["name"],
            entry["weight"],
            entry["has_units"],
            tuple(entry["questions"]),
            tuple(entry.get("follow_ups", ())),
            tuple(tuple(map(_facts, slot)) for slot in entry.get("slots", ())),
            Voice.of(entry["formal"]),
            Voice.of(entry["casual"]),
        )

    def draw_facts(self, rng: random.Random) -> dict[str, str | Quantity]:
        """Draw one mapping of facts from each slot."""
        facts: dict[str, str | Quantity] = {}
        for slot in self.slots:
            for name, fact in rng.choice(slot).items():
                facts[name] = _choose(fact, rng) if isinstance(fact, str) else fact
        return facts


def fill(template: str, facts: Facts, metric: bool, rng: random.Random) -> str:
    """Return `template` with one wording of each choice and every slot filled."""
    text = _choose(template, rng)
    values = {name: fact if isinstance(fact, str) else fact[0 if metric else 1] for name, fact in facts.items()}
    return " ".join(text.format_map(values).split())


def _choose(template: str, rng: random.Random) -> str:
    return _CHOICE.sub(lambda match: rng.choice(match.group(1).split("|")), template)


def _facts(entry: dict[str, Any]) -> Facts:
    return {name: fact if isinstance(fact, str) else (fact[0], fact[1]) for name, fact in entry.items()}


_FILE = Path(__file__).with_suffix(".json")
BY_NAME = {entry["name"]: Topic.of(entry) for entry in json.loads(_FILE.read_text("utf-8"))}
"""Topics by name, in the file's order: the same seed gives the same dialogues while neither changes."""
TOPICS = tuple(topic for name, topic in BY_NAME.items() if name != "ask_name")
"""Every topic that may open a dialogue; "ask_name" needs an earlier turn."""
