"""Practice is trained on while people's own pairs leave time, unjudged, and is in no record of pairs."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from edged.align.feedback.pair import PairRetired, PairScored, StepSkipped, TokenPair, VersionPublished
from tests.engine.harness import BuiltEngine, random_ids, random_pairs, request, running_engine

NO_TESTS = {"guard__held_out_share": 0.0, "align__loss_threshold": 0.0, "align__replay_share": 0.0}


def practice(count: int, adapter: str = "ann", seed: int = 3) -> list[TokenPair]:
    """Random practice pairs, with ids that no store gives."""
    pairs = random_pairs(count, adapter=adapter, seed=seed)
    return [replace(pair, pair_id=-pair.pair_id, practice=True) for pair in pairs]


def imitations(count: int, adapter: str = "ann") -> list[TokenPair]:
    return [replace(pair, rejected=(), imitate=True) for pair in practice(count, adapter)]


def rest(engine: BuiltEngine) -> None:
    """Wait until nothing has been computed for a while."""
    steps = -1
    while steps != (steps := engine.status()["finetune"]["steps"]) or engine.status()["finetune"]["active_adapters"]:
        time.sleep(0.5)


def test_practice_makes_versions_and_leaves_no_record_of_pairs(tmp_path: Path) -> None:
    with running_engine(tmp_path, **NO_TESTS) as (engine, client):
        engine.practise("ann", practice(6))
        client.wait(lambda: len(client.of(VersionPublished)) == 2)
        rest(engine)
        assert engine.status()["finetune"]["pairs_trained"] == 0
    assert [(version.reason, version.pairs) for version in client.of(VersionPublished)] == [
        ("practised", 4),
        ("practised", 2),
    ]
    assert not client.of(PairRetired)
    assert not client.of(PairScored)


def test_a_step_of_practice_tells_the_kl_of_the_answers_in_it(tmp_path: Path) -> None:
    with running_engine(tmp_path, **NO_TESTS) as (engine, client):
        for _ in range(2):
            seen = len(client.of(VersionPublished))
            engine.practise("ann", practice(4))
            client.wait(lambda seen=seen: len(client.of(VersionPublished)) == seen + 1)
    first, second = (version.own_kl_nats for version in client.of(VersionPublished))
    assert first == 0.0, "an untrained adapter answers as the base"
    assert second is not None
    assert second != 0.0


def test_new_practice_takes_the_place_of_the_old(tmp_path: Path) -> None:
    with running_engine(tmp_path, **NO_TESTS) as (engine, client):
        engine.pause_finetuning(True)
        engine.practise("ann", practice(8))
        engine.practise("ann", practice(4))
        engine.pause_finetuning(False)
        client.wait(lambda: client.of(VersionPublished))
        rest(engine)
    assert len(client.of(VersionPublished)) == 1


def test_practice_and_people_s_own_pairs_take_turns(tmp_path: Path) -> None:
    with running_engine(tmp_path, **NO_TESTS) as (engine, client):
        engine.practise("ben", practice(4, "ben"))
        client.wait(lambda: client.of(VersionPublished))
        engine.pause_finetuning(True)
        engine.practise("ann", practice(4))
        engine.practise("ben", practice(4, "ben"))
        engine.submit_pairs(random_pairs(24))
        engine.pause_finetuning(False)
        client.wait(lambda: len(client.of(VersionPublished)) == 9)
    made = [(version.adapter, version.reason) for version in client.of(VersionPublished)][1:]
    assert made[0] == ("ann", "trained"), "own pairs go first"
    assert ("ben", "practised") in made[1:4], "practice has its turn"
    assert made[-1] == ("ann", "practised"), "an adapter's own pairs go before its practice"


def test_practice_goes_on_beside_requests(tmp_path: Path) -> None:
    with running_engine(tmp_path, **NO_TESTS) as (engine, client):
        engine.pause_finetuning(True)
        engine.practise("ann", practice(2))
        for number in range(6):
            engine.submit(request(f"long {number}", random_ids(20, number), 400 if number else 480))
        client.wait(lambda: engine.status()["queue"]["decode"] == 6)
        engine.pause_finetuning(False)
        client.wait(lambda: client.of(VersionPublished))
        assert "long 0" not in client.finished


def test_adapters_practise_in_turns(tmp_path: Path) -> None:
    with running_engine(tmp_path, **NO_TESTS, align__joint_adapters=1) as (engine, client):
        engine.pause_finetuning(True)
        engine.practise("ann", practice(12))
        engine.practise("ben", practice(12, "ben"))
        engine.pause_finetuning(False)
        client.wait(lambda: len(client.of(VersionPublished)) == 6)
    made = [version.adapter for version in client.of(VersionPublished)]
    assert made in (["ann", "ben"] * 3, ["ben", "ann"] * 3)


def test_an_imitated_answer_becomes_likelier_by_its_nll(tmp_path: Path) -> None:
    with running_engine(tmp_path, **NO_TESTS, align__learning_rate=2e-3) as (engine, client):
        for _ in range(4):
            seen = len(client.of(VersionPublished))
            engine.practise("ann", imitations(4))
            client.wait(lambda seen=seen: len(client.of(VersionPublished)) == seen + 1)
    losses = [version.loss for version in client.of(VersionPublished)]
    assert losses == sorted(losses, reverse=True)
    gains = [version.gain_nats for version in client.of(VersionPublished)]
    assert gains == pytest.approx([losses[0] - loss for loss in losses], abs=1e-5)
    assert all(version.own_kl_nats is None for version in client.of(VersionPublished)), (
        "its text is not the adapter's own"
    )


def test_practice_that_cannot_be_computed_is_dropped_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edged.align.adapters.adapter.MAX_GRAD_NORM", 1e30)
    with running_engine(tmp_path, **NO_TESTS) as (engine, client):
        broken = replace(practice(1)[0], weight=float("inf"))
        engine.practise("ann", [broken])
        client.wait(lambda: client.of(StepSkipped))
        rest(engine)
        assert engine.status()["finetune"]["pairs_queued"] == 0
    assert client.of(StepSkipped)[0].pair_ids == ()
    assert not client.of(PairRetired)


def test_settings_that_end_practice_end_it_for_all(tmp_path: Path) -> None:
    with running_engine(tmp_path, **NO_TESTS) as (engine, client):
        align = engine.settings.align.model_copy(update={"practice": False})
        engine.configure(engine.settings.model_copy(update={"align": align})).result(20)
        engine.practise("ann", practice(4))
        rest(engine)
        assert not engine.status()["finetune"]["practice_due"]
    assert not client.of(VersionPublished)


def test_practice_that_waits_ends_where_the_settings_end_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with running_engine(tmp_path, **NO_TESTS) as (engine, client):
        engine.practise("ann", practice(4))
        client.wait(lambda: client.of(VersionPublished))
        rest(engine)
        engine.pause_finetuning(True)
        engine.practise("ann", practice(4))
        client.wait(lambda: engine.status()["finetune"]["practice_due"])
        align = engine.settings.align.model_copy(update={"practice": False})
        engine.configure(engine.settings.model_copy(update={"align": align})).result(20)
        engine.pause_finetuning(False)
        rest(engine)
        assert not engine.status()["finetune"]["practice_due"]
        assert not engine.error
    assert len(client.of(VersionPublished)) == 1
    assert not client.of(StepSkipped)
    assert "could not be opened" not in caplog.text


def test_a_forgotten_adapter_practises_no_more(tmp_path: Path) -> None:
    with running_engine(tmp_path, **NO_TESTS) as (engine, client):
        engine.pause_finetuning(True)
        engine.practise("ann", practice(4))
        engine.forget("ann").result(20)
        engine.pause_finetuning(False)
        rest(engine)
    assert not client.of(VersionPublished)
