"""In idle time the latest learned pairs are trained on again, for as long as held-out pairs gain by it."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from edged.align.feedback.pair import PairRetired, PairScored, StepSkipped, TokenPair, VersionPublished
from tests.engine.harness import BuiltEngine, Client, random_ids, random_pairs, request, running_engine, wait_idle

NO_TESTS = {"guard__held_out_share": 0.0, "align__loss_threshold": 0.0, "align__replay_share": 0.0}


def repeats(client: Client) -> list[PairRetired]:
    """Outcomes of passes in idle time."""
    return [record for record in client.of(PairRetired) if record.state == "trained" and not record.version]


def rest(engine: BuiltEngine) -> None:
    """Wait until nothing has been computed for a while."""
    steps = -1
    while steps != (steps := engine.status()["finetune"]["steps"]) or engine.status()["finetune"]["active_adapters"]:
        time.sleep(0.5)


def test_learned_pairs_are_trained_on_again_so_often_and_no_version_takes_the_credit(tmp_path: Path) -> None:
    with running_engine(tmp_path, **NO_TESTS, align__idle_replay=2) as (engine, client):
        engine.submit_pairs(random_pairs(6))
        client.wait(lambda: len(repeats(client)) == 12)
        rest(engine)
        assert engine.status()["finetune"]["pairs_trained"] == 6
    assert len(client.of(PairRetired)) == 18
    assert sorted(record.epochs_done for record in repeats(client)) == [2] * 6 + [3] * 6
    versions = client.of(VersionPublished)
    assert [version.reason for version in versions] == ["trained"] * 2 + ["repeated"] * 3
    assert versions[-1].loss < versions[0].loss
    assert len(client.of(PairScored)) == 6, "a pair is scored before it is first trained on"


def test_what_was_repeated_before_a_restart_is_not_repeated_again(tmp_path: Path) -> None:
    learned = [replace(pair, state="trained", epochs_done=pair.pair_id) for pair in random_pairs(3)]
    with running_engine(tmp_path, **NO_TESTS, align__idle_replay=2) as (engine, client):
        engine.submit_pairs(learned)
        client.wait(lambda: len(repeats(client)) == 3)
        rest(engine)
    assert sorted((record.pair_id, record.epochs_done) for record in repeats(client)) == [(1, 2), (1, 3), (2, 3)]


def test_passes_wait_for_those_who_ask_and_for_new_pairs(tmp_path: Path) -> None:
    with running_engine(tmp_path, **NO_TESTS, align__idle_replay=1) as (engine, client):
        engine.submit(request("long", random_ids(20, 1), 300))
        client.wait(lambda: engine.status()["queue"]["decode"] == 1)
        engine.submit_pairs(random_pairs(4))
        wait_idle(engine)
        engine.submit_pairs(random_pairs(4, first_id=5))
        client.wait(lambda: len(repeats(client)) == 8)
        assert "long" in client.finished
    reasons = [version.reason for version in client.of(VersionPublished)]
    assert reasons == sorted(reasons, reverse=True), "trained before repeated"


def test_passes_end_where_held_out_pairs_do_not_gain_and_go_on_with_a_new_pair(tmp_path: Path) -> None:
    """Chosen and rejected answers of the held-out pairs are like each other: nothing can be gained on them."""
    same = [replace(pair, rejected=pair.chosen, state="held_out") for pair in random_pairs(4, seed=9, first_id=900)]
    settings = {**NO_TESTS, "guard__held_out_share": 0.001, "guard__min_pairs": 4, "guard__evaluate_every": 2}
    with running_engine(tmp_path, **settings, align__idle_replay=50) as (engine, client):
        engine.submit_pairs(same)
        engine.submit_pairs(random_pairs(4))
        client.wait(lambda: len(repeats(client)) >= 4)
        rest(engine)
        ended = len(repeats(client))
        assert ended <= 16
        engine.submit_pairs(random_pairs(1, first_id=5))
        client.wait(lambda: len(repeats(client)) > ended)


def test_a_pair_that_a_version_was_taken_back_from_is_learned_again_once_and_repeated_as_others(tmp_path: Path) -> None:
    """Its note still says so after a restart, when it was learned again long ago."""
    learned = [replace(pair, state="trained", epochs_done=1, again=True) for pair in random_pairs(2)]
    with running_engine(tmp_path, **NO_TESTS, align__idle_replay=1) as (engine, client):
        engine.submit_pairs(learned)
        client.wait(lambda: len(repeats(client)) == 2)
        engine.submit_pairs(random_pairs(1, first_id=9))
        client.wait(lambda: len(repeats(client)) == 3)
        rest(engine)
    assert [(record.pair_id, record.version > 0) for record in client.of(PairRetired)][2:] == [(9, True), (9, False)]


def test_settings_that_end_the_passes_end_them_for_all(tmp_path: Path) -> None:
    with running_engine(tmp_path, **NO_TESTS, align__idle_replay=1000) as (engine, client):
        engine.submit_pairs([*random_pairs(2), *random_pairs(2, adapter="ben", first_id=11)])
        client.wait(lambda: len(repeats(client)) > 2)
        align = engine.settings.align.model_copy(update={"idle_replay": 0})
        engine.configure(engine.settings.model_copy(update={"align": align})).result(20)
        rest(engine)
        assert not engine.status()["finetune"]["idle_replay_due"]
    assert not client.of(StepSkipped)


def test_after_a_rollback_nothing_is_repeated(tmp_path: Path) -> None:
    with running_engine(tmp_path, **NO_TESTS, align__idle_replay=2) as (engine, client):
        engine.pause_finetuning(True)
        engine.submit_pairs(random_pairs(4))
        engine.pause_finetuning(False)
        client.wait(lambda: client.of(VersionPublished))
        engine.rollback("ann", 0).result(20)
        seen = len(repeats(client))
        rest(engine)
        assert len(repeats(client)) == seen
        engine.submit_pairs(random_pairs(1, first_id=9))
        client.wait(lambda: len(repeats(client)) == seen + 2)
        rest(engine)
        assert {record.pair_id for record in repeats(client)[seen:]} == {9}, "not what came before the rollback"
        restored = [version for version in client.of(VersionPublished) if version.restored is not None]
        assert restored[-1].reason == "rollback to 0"


def test_a_withdrawn_pair_is_repeated_no_more(tmp_path: Path) -> None:
    with running_engine(tmp_path, **NO_TESTS, align__idle_replay=1000) as (engine, client):
        engine.submit_pairs(random_pairs(2))
        client.wait(lambda: len(repeats(client)) >= 4)
        engine.withdraw([1])
        seen = len(repeats(client))
        client.wait(lambda: len(repeats(client)) >= seen + 4)
        engine.withdraw([2])
        rest(engine)
    assert {record.pair_id for record in repeats(client)[seen + 2 :]} == {2}


def test_a_pass_that_fails_leaves_its_pairs_learned(tmp_path: Path) -> None:
    with running_engine(tmp_path, **NO_TESTS, align__idle_replay=2, align__max_grad_norm=1e30) as (engine, client):
        learned = [replace(pair, state="trained", epochs_done=1) for pair in random_pairs(2)]
        broken = TokenPair(7, "ann", (3, 4), (5, 2), (6, 2), float("inf"), state="trained", epochs_done=1)
        engine.submit_pairs([*learned, broken])
        rest(engine)
        assert engine.status()["finetune"]["pairs_queued"] == 0
    assert all(record.state == "trained" for record in client.of(PairRetired))
