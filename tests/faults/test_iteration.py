"""Something raises in the middle of an iteration: what was in it ends with the reason, and nothing else does."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from edged.align.feedback.pair import PairRetired, StepSkipped
from edged.engine.model.served_model import ServedModel
from edged.engine.model_runner import RunnerOutput
from tests.engine.harness import BuiltEngine, random_ids, random_pairs, request, running_engine
from tests.faults.test_memory import answers


def once_something_ended(engine: BuiltEngine) -> list[int]:
    """Accounting for the first iteration in which an answer ends raises; returns how often it did."""
    scheduler, raised = engine.built.scheduler, []
    complete = scheduler.complete

    def broken(*arguments: Any) -> None:
        if not raised and engine.stats.outcomes["length"]:
            raised.append(1)
            raise RuntimeError("the accounts are closed")
        complete(*arguments)

    scheduler.complete = broken  # type: ignore[method-assign]
    return raised


def test_a_failure_after_answers_ended_does_not_follow_the_engine(tmp_path: Path) -> None:
    prompts = [random_ids(30, seed) for seed in range(3)]
    with running_engine(tmp_path) as (engine, client):
        raised = once_something_ended(engine)
        # The long one first: the short one might end before it comes.
        engine.submit(request("long", random_ids(9, 8), 200))
        engine.submit(request("short", random_ids(9, 7), 2))
        client.wait(lambda: len(client.finished) == 2)
        assert raised
        assert client.finished["short"].reason == "length"
        assert client.finished["long"].error == "the iteration failed: the accounts are closed"
        answers(engine, client, "after", prompts)
        assert sum(engine.status()["queue"].values()) == 0


def lost(_: ServedModel) -> None:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_a_device_that_does_nothing_more_ends_the_engine_and_nobodys_pairs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted = threading.Event()

    def run(*_: Any, **__: Any) -> RunnerOutput:
        submitted.wait(60)
        raise RuntimeError("CUDA error: unspecified launch failure")

    with running_engine(tmp_path, fails=True, guard__held_out_share=0.0) as (engine, client):
        monkeypatch.setattr(ServedModel, "check_device", lost)
        monkeypatch.setattr(engine.built.runner, "run", run)
        engine.submit_pairs(random_pairs(4))
        engine.submit(request("r", random_ids(9, 1)))
        submitted.set()
        client.wait(lambda: "r" in client.finished)
        assert "illegal memory access" in client.finished["r"].error
    assert not client.of(PairRetired)
    assert not client.of(StepSkipped)


def test_a_device_that_is_lost_in_a_unit_skips_no_pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running_engine(tmp_path, fails=True, guard__held_out_share=0.0) as (engine, client):
        trainer = engine.built.trainer
        opened = trainer.open

        def open_broken(*arguments: Any) -> Any:
            step = opened(*arguments)
            monkeypatch.setattr(step, "run_unit", lambda _most=0: lost(engine.built.model))
            return step

        monkeypatch.setattr(ServedModel, "check_device", lost)
        monkeypatch.setattr(trainer, "open", open_broken)
        engine.submit_pairs(random_pairs(4))
        engine._thread.join(20)
        assert engine.error is not None
    assert not client.of(PairRetired)
    assert not client.of(StepSkipped)
