"""Streams of preferences that change, and how an engine and plain sequential DPO follow them.

Every stream begins as one taste for BEFORE pairs. Accuracies are prequential: each pair is scored before it is learned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from benchmarks.language import Bench
from edged.align.feedback.pair import TokenPair

BEFORE = 150
RETURN_AFTER, ATTACKS = 60, 40
"""Pairs after which a change is taken back, and of an attack."""
WINDOW = 20
Stream = Callable[[Sequence[TokenPair]], list[TokenPair]]


def flipped(pairs: Sequence[TokenPair]) -> list[TokenPair]:
    """The same pairs with the opposite preference."""
    return [replace(pair, chosen=pair.rejected, rejected=pair.chosen) for pair in pairs]


def flip(pairs: Sequence[TokenPair]) -> list[TokenPair]:
    """The opposite taste from one pair to the next."""
    return [*pairs[:BEFORE], *flipped(pairs[BEFORE:])]


def there_and_back(pairs: Sequence[TokenPair]) -> list[TokenPair]:
    """The opposite taste, and after RETURN_AFTER pairs the first one again."""
    middle = BEFORE + RETURN_AFTER
    return [*pairs[:BEFORE], *flipped(pairs[BEFORE:middle]), *pairs[middle:]]


def gradual(pairs: Sequence[TokenPair]) -> list[TokenPair]:
    """The opposite taste ever more often: from no pair to every one within RETURN_AFTER pairs."""
    found = list(pairs[:BEFORE])
    for index, pair in enumerate(pairs[BEFORE:]):
        # The share of flipped pairs so far follows the ramp.
        wanted = min(1.0, index / RETURN_AFTER)
        found += flipped([pair]) if (index * 0.618034) % 1.0 < wanted else [pair]
    return found


def by_topic(pairs: Sequence[TokenPair]) -> list[TokenPair]:
    """Two tastes of one user from the change on: the opposite one for prompts of an even number of tokens."""
    after = [flipped([pair])[0] if len(pair.prompt) % 2 == 0 else pair for pair in pairs[BEFORE:]]
    return [*pairs[:BEFORE], *after]


def attack(pairs: Sequence[TokenPair]) -> list[TokenPair]:
    """ATTACKS pairs of the opposite taste from elsewhere, then the user's own again."""
    middle = BEFORE + ATTACKS
    return [*pairs[:BEFORE], *foreign(flipped(pairs[BEFORE:middle])), *pairs[middle:]]


def imported(pairs: Sequence[TokenPair]) -> list[TokenPair]:
    """One taste throughout, none of it by the user's own signals."""
    return foreign(pairs)


def foreign(pairs: Sequence[TokenPair]) -> list[TokenPair]:
    """The same pairs as if another account had said them."""
    return [replace(pair, direct=False) for pair in pairs]


STREAMS: dict[str, Stream] = {
    "flip": flip,
    "there and back": there_and_back,
    "gradual": gradual,
    "by topic": by_topic,
    "attack": attack,
    "imported": imported,
}


def follow(bench: Bench, pairs: Sequence[TokenPair]) -> dict[str, Any]:
    """Give an adapter that knows nothing one pair after the other; its accuracies, and the outcomes of the pairs."""
    first = len(bench.records.versions)
    margins = {score.pair_id: score.reward_margin for score in bench.learn(pairs, one_by_one=True)}
    held = {
        direct: [bench.records.states[pair.pair_id].state == "quarantined" for pair in pairs if pair.direct == direct]
        for direct in (True, False)
    }
    bench.engine.forget(pairs[0].adapter).result()
    return {
        "accuracy": by_window([margins.get(pair.pair_id) for pair in pairs]),
        "held_own": [sum(held[True]), len(held[True])],
        "held_foreign": [sum(held[False]), len(held[False])],
        "versions": [version.reason for version in bench.records.versions[first:] if version.reason != "trained"],
    }


def by_window(margins: Sequence[float | None]) -> list[float | None]:
    """Reward accuracy of the BEFORE pairs' last window and of each WINDOW after them; unscored pairs are left out."""
    bounds = [BEFORE - WINDOW, *range(BEFORE, len(margins) + 1, WINDOW)]
    found: list[float | None] = []
    for start, stop in pairwise(bounds):
        known = [margin for margin in margins[start:stop] if margin is not None]
        found.append(sum((m > 0) + 0.5 * (m == 0) for m in known) / len(known) if known else None)
    return found
