"""Starts are measured, scored on users' own pairs, and taken where they fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from edged.align.feedback.pair import PairRetired, TokenPair, VersionPublished
from edged.align.starts import MIN_PAIRS
from edged.align.trials import TRIALS
from tests.engine.harness import BuiltEngine, Client, random_ids, random_pairs, request, running_engine

EXACT = {"guard__held_out_share": 0.0, "align__loss_threshold": 0.0, "align__replay_share": 0.0}
TEXT = [
    TokenPair(-n, "", tuple(random_ids(6, n)), tuple(random_ids(9, n + 50)), tuple(random_ids(9, n + 90)))
    for n in (1, 2)
]


LESSON = random_pairs(16, adapter="coach", seed=7, first_id=500)


def told_by(user: str, count: int, first: int = 0) -> list[TokenPair]:
    """A user's own pairs, of the lesson's taste."""
    return [replace(pair, adapter=user, pair_id=pair.pair_id - 400) for pair in LESSON[first : first + count]]


def opposite(pairs: Sequence[TokenPair]) -> list[TokenPair]:
    return [replace(pair, chosen=pair.rejected, rejected=pair.chosen) for pair in pairs]


def learn(engine: BuiltEngine, client: Client, pairs: Sequence[TokenPair]) -> None:
    """Learn pairs to the end."""
    engine.submit_pairs(list(pairs))
    ids = {pair.pair_id for pair in pairs}
    client.wait(lambda: ids <= {record.pair_id for record in client.of(PairRetired) if record.state == "trained"})


def taught(engine: BuiltEngine, client: Client, pairs: Sequence[TokenPair]) -> dict[str, torch.Tensor]:
    """Weights that learned these pairs."""
    client.records.clear()
    learn(engine, client, pairs)
    _, weights = engine.weights(pairs[0].adapter).result()
    engine.forget(pairs[0].adapter, [pair.pair_id for pair in pairs]).result()
    return weights


def with_starts(engine: BuiltEngine, client: Client) -> None:
    """Two starts of opposite tastes, which are measured."""
    engine.test_with(TEXT)
    for name, lesson in (("low", LESSON), ("high", opposite(LESSON))):
        weights = taught(engine, client, lesson)
        engine.add_start(engine.start_files.add(name, weights)).result()
    client.wait(lambda: all(start.scale is not None for start in engine.starts().values()))


def reasons(client: Client, adapter: str) -> list[str]:
    return [record.reason for record in client.of(VersionPublished) if record.adapter == adapter]


def test_the_start_that_fits_a_user_is_taken_by_four_pairs(tmp_path: Path) -> None:
    with running_engine(tmp_path, **EXACT, align__learning_rate=2e-3) as (engine, client):
        with_starts(engine, client)
        assert all(start.scale for start in engine.starts().values())
        learn(engine, client, told_by("ann", MIN_PAIRS - 1))
        assert not engine.choice("ann").result().scores
        engine.submit_pairs(told_by("ann", 1, MIN_PAIRS - 1))
        client.wait(lambda: "start low" in reasons(client, "ann"))
        found = {score.start: score for score in engine.choice("ann").result().verdict}
        assert found["low"].taken
        assert found["low"].right == 4
        assert found["high"].note == "low fits better"
        assert TRIALS not in engine.adapters()
        engine.submit_pairs(opposite(told_by("ben", 4)))
        client.wait(lambda: "start high" in reasons(client, "ben"))


def test_a_start_that_breaks_the_language_is_never_used(tmp_path: Path) -> None:
    with running_engine(tmp_path, **EXACT, guard__max_kl_nats=0.01) as (engine, client):
        engine.test_with(TEXT)
        weights = {name: 3 * torch.ones_like(own) for name, own in taught(engine, client, LESSON[:4]).items()}
        engine.add_start(engine.start_files.add("loud", weights)).result()
        client.wait(lambda: engine.starts()["loud"].scale == 0.0)
        learn(engine, client, told_by("ann", 8))
        assert not engine.choice("ann").result().scores
    with running_engine(tmp_path, **EXACT) as (engine, _):
        assert engine.starts()["loud"].scale == 0.0, "it is measured once"


def test_with_starts_that_nobody_takes_answers_and_versions_are_the_same_bits(tmp_path: Path) -> None:
    found = []
    for data in ("without", "with"):
        with running_engine(tmp_path, data=data, **EXACT, starts__choose="off") as (engine, client):
            if data == "with":
                weights = engine.trainer.adapter_cache.build("coach").tensors()
                start = replace(engine.start_files.add("kind", weights), scale=1.0)
                engine.add_start(engine.start_files.remember(start)).result()
            learn(engine, client, told_by("ann", 8))
            engine.submit(request("one", random_ids(20, 1), 12, "ann"))
            client.wait(lambda client=client: "one" in client.finished)
            found.append((client.ids("one"), engine.weights("ann").result()[1]))
    (ids, before), (again, after) = found
    assert ids == again
    assert all(torch.equal(before[name], after[name]) for name in before)
