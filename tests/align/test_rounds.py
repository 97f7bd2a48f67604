"""Rounds in the engine: what one teaches a start, that it changes nothing else, and how it ends without a result."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from edged.align.feedback.pair import PairRetired
from edged.align.rounds import ROUNDS, RoundFailed
from tests.align.test_trials import EXACT, LESSON, learn, opposite
from tests.engine.harness import BuiltEngine, random_ids, request, running_engine, wait_idle


def fresh(engine: BuiltEngine, name: str = "tone") -> dict[str, torch.Tensor]:
    """An untrained start's weights."""
    return engine.trainer.adapter_cache.build(name).tensors()


def told(user: str, count: int = 8) -> list:
    return [replace(pair, adapter=user, pair_id=pair.pair_id + len(user) * 1000) for pair in LESSON[:count]]


def test_a_round_teaches_a_start_what_an_adapter_would_have_learned(tmp_path: Path) -> None:
    with running_engine(tmp_path, **EXACT) as (engine, client):
        learn(engine, client, told("ann"))
        start = fresh(engine)
        local = engine.begin_round("ann", start, 24, tests=False).result(60)
        assert [pair.pair_id for pair in local.learned] == [pair.pair_id for pair in told("ann")]
        found = local.state.tensors()
        engine.import_adapter("twin", start, "imported").result(60)
        learn(engine, client, told("twin"))
        _, twin = engine.weights("twin").result(60)
        moved = [name for name in start if not torch.equal(start[name], found[name])]
        assert moved
        for name in start:
            # AdamW divides by the gradient's size: rounding counts where that is next to none.
            torch.testing.assert_close(found[name], twin[name], rtol=1e-4, atol=2e-5)


def test_a_round_learns_the_latest_pairs_that_were_learned_and_no_others(tmp_path: Path) -> None:
    with running_engine(tmp_path, **{**EXACT, "guard__held_out_share": 0.25}) as (engine, client):
        engine.submit_pairs(told("ann", 16))
        wait_idle(engine)
        client.wait(lambda: len({record.pair_id for record in client.of(PairRetired)}) == 16)
        held = {record.pair_id for record in client.of(PairRetired) if record.state == "held_out"}
        engine.pause_finetuning(True)
        waiting = [replace(pair, pair_id=9000 + pair.pair_id) for pair in told("ann", 4)]
        engine.submit_pairs([replace(pair, trusted=True) for pair in waiting])
        assert engine.count_learned(["ann", "nobody"]).result(60) == {"ann": 16 - len(held)}
        begun = engine.begin_round("ann", fresh(engine), 5, tests=True)
        engine.pause_finetuning(False)
        local = begun.result(60)
        learned = [pair.pair_id for pair in told("ann", 16) if pair.pair_id not in held]
        assert [pair.pair_id for pair in local.learned] == learned[-5:]
        assert {pair.pair_id for pair in local.held_out} == held
        assert len(local.right) == 2
        assert local.right[0] == len(held) / 2, "a start that answers as the base is right on none, and wrong on none"
        assert 0 <= local.right[1] <= len(held)


def test_a_round_changes_nothing_but_what_it_makes(tmp_path: Path) -> None:
    with running_engine(tmp_path, **EXACT) as (engine, client):
        learn(engine, client, told("ann"))
        found = []
        for name in ("before", "after"):
            engine.submit(request(name, random_ids(20, 1), 12, "ann"))
            client.wait(lambda name=name: name in client.finished)
            found.append((client.ids(name), engine.weights("ann").result(60), engine.adapters()))
            if name == "before":
                records = len(client.records)
                engine.begin_round("ann", fresh(engine), 24, tests=True).result(60)
        (ids, (version, weights), adapters), (again, (version_after, weights_after), adapters_after) = found
        assert (ids, version, adapters) == (again, version_after, adapters_after)
        assert all(torch.equal(weights[name], weights_after[name]) for name in weights)
        kinds = {type(record).__name__ for record in client.records[records:]}
        assert kinds <= {"IterationSample", "VersionSaved"}
        assert ROUNDS not in adapters_after
        assert not list((tmp_path / "data").rglob(f"*{ROUNDS}*"))


def test_rounds_one_after_the_other_begin_anew(tmp_path: Path) -> None:
    with running_engine(tmp_path, **EXACT) as (engine, client):
        learn(engine, client, told("ann"))
        learn(engine, client, opposite(told("bernard")))
        first, other, again = (
            engine.begin_round(user, fresh(engine), 24, tests=False).result(60).state.tensors()
            for user in ("ann", "bernard", "ann")
        )
        assert all(torch.equal(first[name], again[name]) for name in first)
        ups = [name for name in first if name.endswith("lora_B.weight")]
        assert sum(float((first[name] * other[name]).sum()) for name in ups) < 0, "opposite tastes move it apart"


def test_people_s_own_pairs_go_first(tmp_path: Path) -> None:
    with running_engine(tmp_path, **EXACT) as (engine, client):
        learn(engine, client, told("ann", 16))
        engine.pause_finetuning(True)
        begun = engine.begin_round("ann", fresh(engine), 24, tests=False)
        engine.submit_pairs(told("ben", 8))
        engine.pause_finetuning(False)
        client.wait(lambda: sum(record.adapter == "ben" for record in client.of(PairRetired)) == 8)
        assert not begun.done()
        assert begun.result(60).state.version > 0


def test_a_round_that_loses_a_pair_its_user_or_its_place_ends_without_a_result(tmp_path: Path) -> None:
    with running_engine(tmp_path, **EXACT) as (engine, client):
        learn(engine, client, told("ann"))
        engine.pause_finetuning(True)
        begun = engine.begin_round("ann", fresh(engine), 24, tests=False)
        engine.withdraw([told("ann")[3].pair_id])
        with pytest.raises(RoundFailed, match="withdrawn"):
            begun.result(60)
        begun = engine.begin_round("ann", fresh(engine), 24, tests=False)
        second = engine.begin_round("ann", fresh(engine), 24, tests=False)
        with pytest.raises(RoundFailed, match="another round began"):
            begun.result(60)
        engine.forget("ann", [pair.pair_id for pair in told("ann")]).result(60)
        with pytest.raises(RoundFailed, match="withdrawn"):
            second.result(60)
        with pytest.raises(RoundFailed, match="no learned pairs"):
            engine.begin_round("ben", fresh(engine), 24, tests=False).result(60)
        learn_later = told("carol")
        engine.pause_finetuning(False)
        learn(engine, client, learn_later)
        begun = engine.begin_round("carol", fresh(engine), 24, tests=False)
        engine.end_round("it was dropped").result(60)
        with pytest.raises(RoundFailed, match="it was dropped"):
            begun.result(60)


def test_a_start_that_cannot_be_taught_fails_its_round_and_nothing_else(tmp_path: Path) -> None:
    with running_engine(tmp_path, **EXACT) as (engine, client):
        learn(engine, client, told("ann"))
        loud = {name: torch.full_like(each, 1e30) for name, each in fresh(engine).items()}
        for tests in (False, True):
            with pytest.raises(RoundFailed):
                engine.begin_round("ann", loud, 24, tests).result(60)
        assert not [record for record in client.of(PairRetired) if record.state == "skipped"]
        assert engine.begin_round("ann", fresh(engine), 24, tests=False).result(60).state.finite
