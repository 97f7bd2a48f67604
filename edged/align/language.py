"""The language of an adapter's answers: their repetition, and neutral text that no preference is about."""

import contextlib
from collections.abc import Sequence
from os.path import commonprefix

from edged.align.feedback.pair import TokenPair
from edged.align.feedback.pair_tokens import PairTokenizer

_RUN = 4
_NEUTRAL = (
    (
        "The river rises in the hills north of the town",
        " and flows through three valleys before it reaches the sea.",
        ", where the snow of the winter melts late and the water is high until the first days of May.",
    ),
    (
        "To repair the door, take it off its hinges and lay it on two chairs. Then",
        " plane the lower edge a little at a time, until it no longer touches the floor.",
        " clean the hinges with a dry cloth and put a drop of oil on each of them.",
    ),
    (
        "My grandmother kept bees behind the house for forty years. She said that",
        " they knew when rain was coming, long before anybody could see a cloud.",
        " a person who is in a hurry should never open a hive.",
    ),
    (
        "A company that sells more than it did last year may still earn less, because",
        " wages, rent and freight have become dearer.",
        " it had to lower its prices to find so many buyers.",
    ),
)
"""Beginnings of everyday English sentences, with two continuations each that no preference decides between."""


def repetition(token_ids: Sequence[int]) -> float:
    """Share of an answer's runs of four tokens that occur earlier in it, 0 to 1: seq-rep-4 of Welleck et al. 2020.

    An answer of less than four tokens repeats nothing.
    """
    runs = [tuple(token_ids[start : start + _RUN]) for start in range(len(token_ids) - _RUN + 1)]
    return 1.0 - len(set(runs)) / len(runs) if runs else 0.0


def neutral_pairs(tokenizer: PairTokenizer) -> list[TokenPair]:
    """The neutral text as pairs of no user, to be scored beside held-out pairs; their ids are negative.

    Without what the model cannot read.
    """
    pairs = []
    for number, (start, one, other) in enumerate(_NEUTRAL, 1):
        with contextlib.suppress(ValueError):  # the tokenizer's
            prompt = tokenizer.encode_prompt(start)
            wholes = [tokenizer.encode_exchange(start, text) for text in (one, other)]
            cut = len(commonprefix([prompt, *wholes]))
            answers = [tuple(whole[cut:]) for whole in wholes]
            pairs.append(TokenPair(-number, "", tuple(prompt[:cut]), answers[0], answers[1]))
    return pairs
