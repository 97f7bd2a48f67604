"""What a topic of the demo assistant is: questions, facts, and answers in two voices, all with slots.

Owns the template notation: `[a|b]` is one of several wordings (possibly empty), `{name}` a slot filled from the facts;
a fact that is a pair of texts is a quantity in metric and in imperial units. Must not know how dialogues are composed.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass

Quantity = tuple[str, str]
"""One amount as (metric text, imperial text)."""
Facts = Mapping[str, str | Quantity]

_CHOICE = re.compile(r"\[([^\[\]]*)\]")


@dataclass(frozen=True, slots=True)
class Voice:
    """One way to talk: `core` sentences that answer the question, `extra` ones that a long answer adds."""

    core: tuple[str, ...]
    extra: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Topic:
    """One kind of question. Facts for a question are one mapping from each of `slots`, merged."""

    name: str
    questions: tuple[str, ...]
    formal: Voice
    casual: Voice
    slots: tuple[tuple[Facts, ...], ...] = ()
    follow_ups: tuple[str, ...] = ()
    weight: float = 1.0
    has_units: bool = False

    def draw_facts(self, rng: random.Random) -> dict[str, str | Quantity]:
        """One choice of facts."""
        facts: dict[str, str | Quantity] = {}
        for slot in self.slots:
            for name, fact in rng.choice(slot).items():
                facts[name] = _choose(fact, rng) if isinstance(fact, str) else fact
        return facts


def fill(template: str, facts: Facts, metric: bool, rng: random.Random) -> str:
    """`template` with one wording of each choice and every slot filled."""
    text = _choose(template, rng)
    values = {name: fact if isinstance(fact, str) else fact[0 if metric else 1] for name, fact in facts.items()}
    return " ".join(text.format_map(values).split())


def _choose(template: str, rng: random.Random) -> str:
    return _CHOICE.sub(lambda match: rng.choice(match.group(1).split("|")), template)


def single(
    name: str,
    questions: tuple[str, ...],
    formal: Voice,
    casual: Voice,
    weight: float = 0.25,
    facts: Facts | None = None,
) -> Topic:
    """A topic without a choice of facts; any `facts` are quantities."""
    return Topic(name, questions, formal, casual, ((facts,),) if facts else (), weight=weight, has_units=bool(facts))
