"""A user who changes his mind is followed; the same from elsewhere is held."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.drift import flipped
from edged.align.feedback.pair import PairRetired, TokenPair, VersionPublished
from edged.align.guard import PreferenceChange
from tests.engine.harness import running_engine

SETTINGS = {"align__learning_rate": 3e-3, "guard__max_kl_nats": 100.0, "guard__max_nll_change": 100.0}


def taste(count: int, first_id: int = 1) -> list[TokenPair]:
    """Ten tokens are liked and ten others are not, whatever was asked: random weights learn that from a few pairs."""
    rng = np.random.default_rng(first_id)
    return [
        TokenPair(
            number,
            "ann",
            *(tuple(rng.integers(low, high, 10).tolist()) for low, high in ((3, 250), (3, 13), (130, 140))),
        )
        for number in range(first_id, first_id + count)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("direct", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_flip_of_the_users_own_signals_is_followed_and_one_from_elsewhere_is_held(
    direct: bool, tmp_path: Path
) -> None:
    with running_engine(tmp_path, **SETTINGS) as (engine, client):
        before = [replace(pair, first_party=True) for pair in taste(80)]
        after = [replace(pair, first_party=direct) for pair in flipped(taste(60, first_id=1001))]
        for pair in [*before, *after]:
            engine.submit_pairs([pair])
            client.wait(lambda pair=pair: any(r.pair_id == pair.pair_id for r in client.of(PairRetired)))
            client.wait(lambda: not engine.queue()["finetune"])
    states = {record.pair_id: record.state for record in client.of(PairRetired)}
    held = Counter(states[pair.pair_id] == "quarantined" for pair in after)
    assert not any(states[pair.pair_id] == "quarantined" for pair in before)
    changes = [
        v.reason for v in client.of(VersionPublished) if v.reason.startswith("trained: preferences have changed")
    ]
    if direct:
        assert held[True] == 0
        assert len(changes) == 1
    else:
        assert held[True] >= 40
        assert not changes


def test_a_change_is_recognised_when_what_was_learned_from_some_pairs_tells_others() -> None:
    turn = PreferenceChange(since=3)
    for number, loss in enumerate([3.0] * 8 + [2.5, 2.5, 2.5, 2.5, 1.0, 1.0]):
        assert turn.verdict == ""
        turn.take(number, loss, loss > 2, 7)
    turn.take(14, 1.0, False, 7)
    assert turn.verdict == "change"
    assert turn.summary == "preferences have changed since version 3: 15 pairs, for answers 7 tokens longer"


def test_pairs_that_teach_nothing_are_confusion_in_the_end() -> None:
    turn = PreferenceChange(since=3)
    for number in range(64):
        assert turn.verdict == ""
        turn.take(number, 2.0 + number % 2, number % 2 == 0, 0)
    assert turn.verdict == "confusion"


@pytest.mark.slow
def test_direct_signals_that_contradict_each_other_are_taken_back_to_before_them_and_held(tmp_path: Path) -> None:
    with running_engine(tmp_path, **SETTINGS) as (engine, client):
        engine.test_with([TokenPair(-1, "", (3, 4), (5, 6), (7, 8))])
        before, odd = taste(80), taste(80, first_id=1001)
        confused = [pair if number % 2 else flipped([pair])[0] for number, pair in enumerate(odd)]
        for pair in [*before, *confused]:
            engine.submit_pairs([replace(pair, first_party=True)])
            client.wait(lambda pair=pair: any(r.pair_id == pair.pair_id for r in client.of(PairRetired)))
            client.wait(lambda: not engine.queue()["finetune"])
    (back,) = [v for v in client.of(VersionPublished) if "contradict what was learned before" in v.reason]
    held = {r.pair_id: r.state for r in client.of(PairRetired)}
    first = min(pair_id for pair_id, state in held.items() if state == "quarantined")
    learned = next(r.version for r in client.of(PairRetired) if r.pair_id == first)
    assert back.restored is not None
    assert 0 < back.restored <= learned, "nothing of what is held is in the weights"
    assert sum(state == "quarantined" for state in held.values()) == 64
