"""Four tastes over one stream of preference pairs: who prefers which answer, and how well that was learnt over time.

Owns the relabelling and the arithmetic of a stream that is tested before it is trained on. Must not know who learns.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Literal, get_args

from edged.align.pair import TokenPair

Taste = Literal["human", "concise", "elaborate", "refusing"]
TASTES: tuple[Taste, ...] = get_args(Taste)
"""The labels as they are; the shorter answer, in tokens; the longer one; the one of two that declines."""
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


def relabel(
    pairs: Sequence[TokenPair], taste: Taste, adapter: str, text: Callable[[Sequence[int]], str]
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


def _prefers_chosen(pair: TokenPair, taste: Taste, text: Callable[[Sequence[int]], str]) -> bool | None:
    """Whether the taste is that of the labels; None where it has no opinion."""
    if taste == "human":
        return True
    if taste == "refusing":
        first, second = declines(text(pair.chosen)), declines(text(pair.rejected))
        return first if first != second else None
    difference = len(pair.rejected) - len(pair.chosen)
    if not difference:
        return None
    return difference > 0 if taste == "concise" else difference < 0


def quarters(values: Sequence[float]) -> list[float | None]:
    """Means of the four quarters of a stream, the later ones longer where it does not divide; None of an empty one."""
    bounds = [len(values) * part // QUARTERS for part in range(QUARTERS + 1)]
    parts = [values[start:stop] for start, stop in pairwise(bounds)]
    return [sum(part) / len(part) if part else None for part in parts]
