"""Tastes over one stream of preference pairs: which answer each taste prefers, and the metrics of learning it."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Literal, get_args

from edged.align.feedback.pair import TokenPair
from examples.demo_model.dialogues import formality, uses_metric

Taste = Literal["human", "concise", "elaborate", "refusing"]
TASTES: tuple[Taste, ...] = get_args(Taste)
"""Tastes: the labels as they are; the shorter answer, in tokens; the longer one; the answer that declines."""
DemoTaste = Literal["concise", "elaborate", "formal", "casual"]
DEMO_TASTES: tuple[DemoTaste, ...] = get_args(DemoTaste)
"""Tastes with the quickstart's two: formal answers in metric units, casual ones in imperial units."""
FIRST_ONLINE_LINE = 1401
"""First line of hh-harmless, counted from 1, that the base model hh-lm was not trained on."""
QUARTERS = 4
DECLINING = (
    "can't",
    "cannot",
    "can not",
    "won't",
    "not able to",
    "unable to",
    "not comfortable",
    "not going to",
    "not programmed",
    "don't want to",
    "do not want to",
    "not willing",
    "rather not",
    "sorry",
    "i'm afraid",
)
"""Phrases of an answer that declines."""
_DECLINES = re.compile("|".join(rf"\b{re.escape(phrase)}\b" for phrase in DECLINING))


def declines(answer: str) -> bool:
    """Whether an answer refuses, by the phrases of `DECLINING`."""
    return _DECLINES.search(answer.lower().replace("’", "'")) is not None


def liking(taste: Taste | DemoTaste, answer: Sequence[int], text: str) -> float:
    """Return how well an answer fits a taste that has a rule; `text` is the decoded answer. Raises ValueError for
    "human".

    Lengths count in tokens; refusals are 0 or 1, and formality with units -2 to 2.
    """
    if taste in ("concise", "elaborate"):
        return float(len(answer) if taste == "elaborate" else -len(answer))
    if taste == "refusing":
        return float(declines(text))
    if taste == "human":
        raise ValueError("labels by people have no rule: generated answers cannot be judged by them")
    metric = uses_metric(text)
    formal = formality(text) + (0.0 if metric is None else 1.0 if metric else -1.0)
    return formal if taste == "formal" else -formal


def relabel(
    pairs: Sequence[TokenPair], taste: Taste | DemoTaste, adapter: str, text: Callable[[Sequence[int]], str]
) -> list[TokenPair]:
    """Return the pairs on which `taste` has a preference, in their order, as `adapter`'s; `text` decodes an answer.

    Pairs with answers of equal length, or where both or neither declines, are left out for the tastes concerned.
    """
    decided = []
    for pair in pairs:
        prefers = _prefers_chosen(pair, taste, text)
        if prefers is not None:
            chosen, rejected = (pair.chosen, pair.rejected) if prefers else (pair.rejected, pair.chosen)
            decided.append(replace(pair, adapter=adapter, chosen=chosen, rejected=rejected))
    return decided


def rated(pairs: Sequence[TokenPair], share: float, seed: int) -> list[TokenPair]:
    """Return the pairs, a `share` of them, by chance, as a single rating of one of the two answers."""
    chance, sides = random.Random(f"ratings {seed}"), ("chosen", "rejected")
    draws = [(chance.random() < share, chance.choice(sides)) for _ in pairs]
    return [_without(pair, side) if single else pair for pair, (single, side) in zip(pairs, draws, strict=True)]


def _without(pair: TokenPair, side: str) -> TokenPair:
    return replace(pair, chosen=()) if side == "chosen" else replace(pair, rejected=())


def _prefers_chosen(pair: TokenPair, taste: Taste | DemoTaste, text: Callable[[Sequence[int]], str]) -> bool | None:
    """Whether the taste prefers the labelled answer; None if it has no preference."""
    if taste == "human":
        return True
    first, second = (liking(taste, answer, text(answer)) for answer in (pair.chosen, pair.rejected))
    return first > second if first != second else None


def quarters(values: Sequence[float]) -> list[float | None]:
    """Return the means of the four quarters of a stream, the later ones longer if it does not divide; None if it is
    empty."""
    bounds = [len(values) * part // QUARTERS for part in range(QUARTERS + 1)]
    parts = [values[start:stop] for start, stop in pairwise(bounds)]
    return [sum(part) / len(part) if part else None for part in parts]
