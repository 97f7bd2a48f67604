"""Tastes over one stream of preference pairs: which answer each prefers, and how well that was learnt over time."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Literal, get_args

from edged.align.feedback.pair import TokenPair
from examples.demo_model.dialogues import formality, uses_metric

Taste = Literal["human", "concise", "elaborate", "refusing"]
TASTES: tuple[Taste, ...] = get_args(Taste)
"""The labels as they are; the shorter answer, in tokens; the longer one; the one of two that declines."""
DemoTaste = Literal["concise", "elaborate", "formal", "casual"]
DEMO_TASTES: tuple[DemoTaste, ...] = get_args(DemoTaste)
"""The last two are the quickstart's: formal answers in metric units, casual ones in imperial units."""
FIRST_ONLINE_LINE = 1401
"""Of hh-harmless, counted from 1: the base model hh-lm was trained on the lines before."""
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
"""An answer declines when it says one of these."""
_DECLINES = re.compile("|".join(rf"\b{re.escape(phrase)}\b" for phrase in DECLINING))


def declines(answer: str) -> bool:
    """Whether an answer refuses, by the phrases of `DECLINING`."""
    return _DECLINES.search(answer.lower().replace("’", "'")) is not None


def liking(taste: Taste | DemoTaste, answer: Sequence[int], text: str) -> float:
    """How much an answer is to a taste that has a rule; `text` is what the tokens say. Raises ValueError for "human".

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
    """The pairs that `taste` decides, in their order, as `adapter`'s; `text` gives an answer's words.

    Answers of equal length, and pairs where both or neither of them declines, say nothing of those tastes.
    """
    decided = []
    for pair in pairs:
        prefers = _prefers_chosen(pair, taste, text)
        if prefers is not None:
            chosen, rejected = (pair.chosen, pair.rejected) if prefers else (pair.rejected, pair.chosen)
            decided.append(replace(pair, adapter=adapter, chosen=chosen, rejected=rejected))
    return decided


def _prefers_chosen(pair: TokenPair, taste: Taste | DemoTaste, text: Callable[[Sequence[int]], str]) -> bool | None:
    """Whether the taste is that of the labels; None where it has no opinion."""
    if taste == "human":
        return True
    first, second = (liking(taste, answer, text(answer)) for answer in (pair.chosen, pair.rejected))
    return first > second if first != second else None


def quarters(values: Sequence[float]) -> list[float | None]:
    """Means of the four quarters of a stream, the later ones longer where it does not divide; None of an empty one."""
    bounds = [len(values) * part // QUARTERS for part in range(QUARTERS + 1)]
    parts = [values[start:stop] for start, stop in pairwise(bounds)]
    return [sum(part) / len(part) if part else None for part in parts]
