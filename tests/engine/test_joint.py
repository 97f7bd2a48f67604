"""Pairs of several users are learned in one step, as if each had been stepped alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from edged.align.dpo.step import DpoStep
from edged.align.feedback.pair import PairRetired, PairScored, StepSkipped, VersionPublished, VersionSaved
from edged.align.pair_queues import AdapterQueue
from edged.scheduler.task import Unit
from tests.engine.harness import BuiltEngine, Client, random_pairs, running_engine, wait_idle

USERS = ("ann", "bob", "cyd")
FIRST, SECOND = 100, 200
"""Ids of the pairs that a user starts with, and of the one that all bring at once; a user's differ by ten."""


class Watch:
    """The units that an engine ran; and, before each plan, a check of what the trainer counts."""

    def __init__(self, engine: BuiltEngine) -> None:
        self.units: list[Unit] = []
        trainer, runner, sequences = engine.built.trainer, engine.built.runner, engine.built.sequences
        run, open_due = runner.run, sequences.open_due

        def watched(*arguments: Any, **named: Any) -> Any:
            work = run(*arguments, **named)
            self.units += [unit for unit, _ in work.units]
            return work

        def checked(now: float) -> None:
            queues = trainer.pair_queues.queues.values()
            due = {x.name for x in queues if x.step is None and (x.queue or trainer.pair_queues.test_due(x))}
            assert set(trainer.pair_queues.ready()) == due
            assert trainer.pair_queues.pairs_queued == sum(x.pairs for x in queues)
            open_due(now)

        runner.run, sequences.open_due = watched, checked  # type: ignore[method-assign]

    def steps(self) -> list[int]:
        """How many adapters each optimizer unit was for."""
        return [unit.num_tokens for unit in self.units if unit.kind == "step"]


@contextmanager
def three_users(tmp_path: Path, data: str, **settings: Any) -> Iterator[tuple[BuiltEngine, Client, Watch]]:
    """All three have learned once and are in memory; fine-tuning is paused, and each has brought one pair more."""
    settings = {"guard__held_out_share": 0.0, "align__loss_threshold": 0.0, **settings}
    with running_engine(tmp_path, data=data, **settings) as (engine, client):
        for i, name in enumerate(USERS):
            engine.submit_pairs(random_pairs(2, name, seed=i, first_id=FIRST + 10 * i))
        client.wait(lambda: len(client.of(PairRetired)) == 6)
        wait_idle(engine)
        engine.pause_finetuning(True)
        watch = Watch(engine)
        engine.submit_pairs([random_pairs(1, n, seed=7 + i, first_id=SECOND + 10 * i)[0] for i, n in enumerate(USERS)])
        yield engine, client, watch
        wait_idle(engine)


def second_round(client: Client) -> list[PairRetired]:
    return [record for record in client.of(PairRetired) if record.pair_id >= SECOND]


def learn_together(tmp_path: Path, data: str, **settings: Any) -> tuple[Client, Watch]:
    with three_users(tmp_path, data, **settings) as (engine, client, watch):
        engine.pause_finetuning(False)
        client.wait(lambda: len(second_round(client)) == 3)
    return client, watch


def weights(client: Client, adapter: str) -> dict[str, torch.Tensor]:
    """As they were saved last."""
    path = next(record.path for record in reversed(client.of(VersionSaved)) if record.adapter == adapter)
    return load_file(Path(path) / "adapter_model.safetensors")


def assert_same_weights(one: Client, other: Client, adapter: str) -> None:
    for name, tensor in weights(one, adapter).items():
        torch.testing.assert_close(weights(other, adapter)[name], tensor, rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize("recompute", ["auto", "full"])
def test_pairs_that_three_users_bring_at_once_are_learnt_by_the_units_of_one_step(
    tmp_path: Path, recompute: str
) -> None:
    apart, alone = learn_together(tmp_path, "apart", align__joint_adapters=1, align__recompute=recompute)
    joint, shared = learn_together(tmp_path, "joint", align__recompute=recompute)
    assert (alone.steps(), shared.steps()) == ([1, 1, 1], [3])
    # Head units are as many as there are; those over layers, which read the weights, are shared.
    assert 2 * len(shared.units) < len(alone.units)
    for client in (apart, joint):
        assert sorted((r.adapter, r.version, r.state) for r in second_round(client)) == [
            (name, 2, "trained") for name in USERS
        ]
        assert [v.version for v in client.of(VersionPublished)].count(2) == 3
    scores = {s.pair_id: s for s in apart.of(PairScored)}
    assert len(joint.of(PairScored)) == len(scores) == 9
    for score in joint.of(PairScored):
        wanted = scores[score.pair_id]
        assert (score.adapter, score.version) == (wanted.adapter, wanted.version)
        assert score.chosen_logp == pytest.approx(wanted.chosen_logp, rel=1e-3)
        assert score.reward_margin == pytest.approx(wanted.reward_margin, abs=1e-3)
    for name in USERS:
        assert_same_weights(apart, joint, name)


@pytest.mark.slow
def test_only_as_many_share_a_step_as_fit_its_window_and_the_setting(tmp_path: Path) -> None:
    # A pair has 34 tokens.
    settings = {"align__replay_share": 0.0}
    assert learn_together(tmp_path, "narrow", align__window_tokens=60, **settings)[1].steps() == [1, 1, 1]
    assert sorted(learn_together(tmp_path, "wide", align__window_tokens=70, **settings)[1].steps()) == [1, 2]
    assert sorted(learn_together(tmp_path, "two", align__joint_adapters=2, **settings)[1].steps()) == [1, 2]


def test_pairs_that_are_learnt_already_end_together_without_a_version(tmp_path: Path) -> None:
    client, watch = learn_together(tmp_path, "learnt", align__loss_threshold=0.7)
    assert watch.units
    assert watch.steps() == []
    assert {(r.state, r.version) for r in second_round(client)} == {("learnt", 0)}


@pytest.mark.parametrize(("slots", "steps"), [(1, [1, 1, 1]), (2, [1, 1, 1]), (4, [1, 2]), (6, [3])])
def test_those_who_share_a_step_leave_half_of_the_slots_to_requests(
    tmp_path: Path, slots: int, steps: list[int]
) -> None:
    client, watch = learn_together(tmp_path, "slots", align__max_active_adapters=slots)
    assert sorted(watch.steps()) == steps
    assert {r.state for r in second_round(client)} == {"trained"}


@pytest.mark.slow
def test_a_user_whose_weights_are_not_finite_is_taken_back_and_the_others_learn(tmp_path: Path) -> None:
    whole, _ = learn_together(tmp_path, "whole")
    with three_users(tmp_path, "broken") as (engine, client, watch):

        def spoil() -> None:
            weights = engine.built.trainer.adapter_cache.get("bob").weights
            next(iter(weights.values()))[1].data[0] = float("nan")

        engine.built.commands.ask(spoil).result(10)
        engine.pause_finetuning(False)
        client.wait(lambda: len(second_round(client)) == 3)
    assert watch.steps() == [3]
    assert {r.adapter: r.state for r in second_round(client)} == {"ann": "trained", "bob": "skipped", "cyd": "trained"}
    assert [(s.adapter, s.reason) for s in client.of(StepSkipped)] == [("bob", "loss is nan")]
    assert [v.adapter for v in client.of(VersionPublished) if v.reason.startswith("guard: loss is nan")] == ["bob"]
    for name in ("ann", "cyd"):
        assert_same_weights(whole, client, name)


def in_the_middle(engine: BuiltEngine, command: Callable[[], Any]) -> list[tuple[str, ...]]:
    """Give the engine a command while a shared step is in its backward pass; returns whose it was, once it is done."""
    hit: list[tuple[str, ...]] = []
    open_due = engine.built.sequences.open_due

    def prepared(now: float) -> None:
        open_due(now)
        for open_step in list(engine.built.finetuning.by_task.values()):
            kinds = [kind for kind, _ in open_step.step.units_left()]
            if not hit and len(open_step.step.adapters) == 3 and kinds[0] in ("layer", "grad"):
                hit.append(open_step.step.adapters)
                command()
                engine.built.commands.run_pending()
                # As in the engine's loop, steps that are due are opened before the plan is made.
                engine.built.finetuning.open_due(time.monotonic())

    engine.built.sequences.open_due = prepared  # type: ignore[method-assign]
    return hit


MIDDLE = {"scheduler__options__idle_quantum_ms": 0.5}


@pytest.mark.parametrize("recompute", ["auto", "full"])
def test_a_user_who_is_forgotten_in_the_middle_of_a_shared_step_leaves_the_others_pairs_learnt(
    tmp_path: Path, recompute: str
) -> None:
    whole, _ = learn_together(tmp_path, "whole", align__recompute=recompute)
    with three_users(tmp_path, "forgotten", align__recompute=recompute, **MIDDLE) as (engine, client, watch):
        hit = in_the_middle(engine, lambda: engine.forget("bob", [FIRST + 10, FIRST + 11, SECOND + 10]))
        engine.pause_finetuning(False)
        client.wait(lambda: len(second_round(client)) == 2)
        assert set(engine.adapters()) == {"ann", "cyd"}
        status = engine.status()["pages"]
        assert status["free"] + status["cached"] == status["total"]
    assert len(hit) == 1
    assert watch.steps() == [2]
    assert sorted(r.adapter for r in second_round(client)) == ["ann", "cyd"]
    for name in ("ann", "cyd"):
        assert_same_weights(whole, client, name)


@pytest.mark.slow
def test_a_user_who_is_rolled_back_in_the_middle_of_a_shared_step_learns_with_the_others_again(tmp_path: Path) -> None:
    whole, _ = learn_together(tmp_path, "whole")
    with three_users(tmp_path, "back", **MIDDLE) as (engine, client, watch):

        def roll_back() -> None:
            engine.rollback("bob", 0)
            engine.built.commands.run_pending()
            # What was read is posted before the loader's thread does anything else.
            engine.built.finetuning._loader._thread.submit(lambda: None).result()

        hit = in_the_middle(engine, roll_back)
        engine.pause_finetuning(False)
        client.wait(lambda: len(second_round(client)) == 3)
    assert len(hit) == 1
    assert watch.steps() == [3]
    assert engine.adapters() == {"ann": 2, "bob": 3, "cyd": 2}
    assert {r.state for r in second_round(client)} == {"trained"}
    for name in ("ann", "cyd"):
        assert_same_weights(whole, client, name)


def test_what_fails_together_is_tried_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_unit = DpoStep.run_unit

    def fails_for_several(step: DpoStep, most: int = 0) -> tuple[str, int]:
        if len(step.adapter_steps) > 1 or "bob" in step.adapter_steps:
            raise RuntimeError("no room")
        return run_unit(step, most)

    with three_users(tmp_path, "failing") as (engine, client, watch):
        monkeypatch.setattr(DpoStep, "run_unit", fails_for_several)
        engine.pause_finetuning(False)
        client.wait(lambda: len(second_round(client)) == 3)
    assert watch.steps() == [1, 1]
    assert {r.adapter: r.state for r in second_round(client)} == {"ann": "trained", "bob": "skipped", "cyd": "trained"}
    assert "no room" in client.of(StepSkipped)[0].reason


@pytest.mark.slow
def test_an_outcome_that_cannot_be_taken_in_leaves_the_others_theirs(tmp_path: Path) -> None:
    whole, _ = learn_together(tmp_path, "whole")
    with three_users(tmp_path, "stranded") as (engine, client, watch):
        trainer = engine.built.trainer
        close_step = trainer._close_step

        def fails_for_the_first(queue: AdapterQueue, *rest: Any) -> None:
            if queue.name == "ann":
                raise OSError("no disk")
            close_step(queue, *rest)

        trainer._close_step = fails_for_the_first  # type: ignore[method-assign]
        engine.pause_finetuning(False)
        client.wait(lambda: len(second_round(client)) == 3)
        wait_idle(engine)
    assert watch.steps() == [3]
    assert {r.adapter: r.state for r in second_round(client)} == {"ann": "skipped", "bob": "trained", "cyd": "trained"}
    assert [(s.adapter, s.reason) for s in client.of(StepSkipped)] == [("ann", "OSError: no disk")]
    for name in ("bob", "cyd"):
        assert_same_weights(whole, client, name)
