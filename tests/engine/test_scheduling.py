"""Scheduling policies on a real engine: everybody is served, every pair is learned, and nobody starves."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from edged.align.feedback.pair import PairRetired, PairScored
from edged.scheduler.cost.model import CostModel
from edged.scheduler.policies.registry import ROWS
from edged.scheduler.scheduler import Scheduler
from edged.scheduler.task import FinetuneTask, IterationResult
from tests.engine.harness import random_ids, random_pairs, request, running_engine


@pytest.mark.parametrize("policy", [name for name, policy in ROWS.items() if policy.trains])
def test_requests_are_answered_and_pairs_learnt_and_idle_the_engine_wakes_for_what_becomes_due(
    tmp_path: Path, policy: str
) -> None:
    settings = {"scheduler__policy": policy, "scheduler__options__retrain_every_s": 0.3, "guard__held_out_share": 0.0}
    with running_engine(tmp_path, **settings) as (engine, client):
        for index in range(6):
            engine.submit(request(f"r{index}", random_ids(20 + index, index), adapter=["ann", None][index % 2]))
        engine.submit_pairs(random_pairs(8))
        client.wait(lambda: len(client.finished) == 6 and len(client.of(PairRetired)) == 8)
        engine.submit_pairs(random_pairs(4, "bob", first_id=50))
        client.wait(lambda: len(client.of(PairRetired)) == 12)
    assert {finish.reason for finish in client.finished.values()} == {"length"}
    assert {record.state for record in client.of(PairRetired)} == {"trained"}


def test_a_step_asks_with_the_loss_of_its_own_pairs_once_it_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []
    update = Scheduler.update

    def updated(scheduler: Scheduler, task: FinetuneTask) -> None:
        asked.append(task.loss)
        update(scheduler, task)

    monkeypatch.setattr(Scheduler, "update", updated)
    settings = {"guard__held_out_share": 0.0, "align__micro_batch_pairs": 2, "align__window_tokens": 16}
    with running_engine(tmp_path, **settings) as (engine, client):
        engine.submit_pairs(random_pairs(2))
        client.wait(lambda: len(client.of(PairRetired)) == 2)
        losses = [record.loss for record in client.of(PairScored)]
    assert any(loss == pytest.approx(losses[0]) for loss in asked)


@pytest.fixture
def finetune_s(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A growing list of what each iteration spent on fine-tuning, as the cost model tells it."""
    spent: list[float] = []
    observe = CostModel.observe

    def observed(cost: CostModel, result: IterationResult) -> float:
        spent.append(observe(cost, result))
        return spent[-1]

    monkeypatch.setattr(CostModel, "observe", observed)
    return spent


@pytest.mark.slow
def test_under_overload_fine_tuning_keeps_its_share_of_the_engines_time(
    tmp_path: Path, finetune_s: list[float]
) -> None:
    settings = {
        "scheduler__finetune_min_share": 0.2,
        "scheduler__finetune_max_wait_s": 0.5,
        "align__epochs": 10_000,
        "align__loss_threshold": 0.0,
        "guard__held_out_share": 0.0,
        "guard__max_kl_nats": 1e9,
    }
    with running_engine(tmp_path, **settings) as (engine, client):
        engine.submit_pairs(random_pairs(8))
        for index in range(1000):
            engine.submit(request(f"r{index}", random_ids(60, index), tokens=200))
        client.wait(lambda: client.finished)
        started, before = time.monotonic(), sum(finetune_s)
        time.sleep(3.0)
        share = (sum(finetune_s) - before) / (time.monotonic() - started)
        assert engine.status()["queue"]["waiting"] > 100, "no overload any more"
        for index in range(1000):
            engine.cancel(f"r{index}")
    assert share >= 0.15
