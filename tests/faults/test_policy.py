"""A policy that fails does not end the service: requests go first come, first served, and the status says so."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from edged.scheduler.policies.base import Policy
from edged.scheduler.policies.mace.policy import MACE, MaceSpare
from edged.scheduler.policies.registry import ROWS
from edged.scheduler.scheduler import Scheduler
from edged.scheduler.task import IterationResult, Kind, Resources, Task, TaskOutcome
from edged.settings.load import SchedulerSettings
from tests.engine.harness import random_ids, random_pairs, running_engine, wait_idle
from tests.faults.test_memory import answers
from tests.scheduler.test_scheduler import scheduler_of

RESOURCES = Resources(free_pages=64, total_pages=64, page_size=16, max_tokens=256, max_sequences=8)


@pytest.mark.parametrize("name", ROWS)
def test_every_policy_is_replaced_when_it_fails(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler = scheduler_of(policy=name)

    def fail(*_: object) -> None:
        raise ZeroDivisionError("a bin of no tasks")

    monkeypatch.setattr(scheduler.policy, "plan", fail)
    for task_id in range(3):
        scheduler.add(Task(task_id, Kind.PREFILL, arrival_s=float(task_id), tokens=20), float(task_id))
    assert [grant.task.task_id for grant in scheduler.plan(3.0, RESOURCES).grants] == [0, 1, 2]
    assert f"the policy {name} failed (ZeroDivisionError: a bin of no tasks)" in scheduler.degraded
    assert [vars(record)["event"] for record in caplog.records] == ["policy_failed"]


def test_a_part_that_fails_at_what_happens_is_the_policys_failure() -> None:
    class Failing(MaceSpare):
        def completed(self, *_: object) -> None:
            raise ZeroDivisionError("no work")

    settings = SchedulerSettings()
    cost = scheduler_of().cost
    scheduler = Scheduler(settings, cost, Policy(replace(MACE, spare=Failing), settings, cost))
    task = Task(1, Kind.PREFILL, arrival_s=0.0, tokens=20)
    scheduler.add(task, 0.0)
    assert scheduler.plan(0.0, RESOURCES).grants
    scheduler.complete(IterationResult([TaskOutcome(task, 20, 0, Kind.DECODE)], 0.1), 0.1)
    assert "the policy mace failed (ZeroDivisionError: no work)" in scheduler.degraded
    assert [grant.task for grant in scheduler.plan(0.2, RESOURCES).grants] == [task]


def test_serving_goes_on_learning_waits_and_both_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [random_ids(40, seed) for seed in range(4)]
    with running_engine(tmp_path) as (engine, client):
        wanted = answers(engine, client, "before", prompts)
        engine.submit_pairs(random_pairs(30))
        client.wait(lambda: engine.status()["finetune"]["steps"] > 0 or not engine.status()["queue"]["finetune"])
        policy = engine.built.scheduler.policy
        whole = policy.plan

        def fail(*_: object) -> None:
            raise AssertionError("slack is nan")

        monkeypatch.setattr(policy, "plan", fail)
        assert answers(engine, client, "degraded", prompts) == wanted
        status = engine.status()
        assert status["degraded"][0].startswith("the policy mace failed (AssertionError: slack is nan)")
        assert not status["finetune"]["enabled"]
        assert "the policy mace failed" in status["finetune"]["reason"]
        pages = status["pages"]
        assert pages["free"] + pages["cached"] == pages["total"], "a step kept its pages"
        monkeypatch.setattr(policy, "plan", whole)
        engine.configure(engine.settings).result(10)
        wait_idle(engine)
        assert engine.status()["degraded"] == []
        assert engine.status()["finetune"]["pairs_trained"] > 0


def test_a_plan_made_ahead_falls_back_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running_engine(tmp_path, scheduler__plan_ahead="on") as (engine, client):
        prompts = [random_ids(40, seed) for seed in range(3)]
        wanted = answers(engine, client, "before", prompts)
        policy = engine.built.scheduler.policy
        whole = policy.plan
        calls = [0]

        def fails_later(*arguments: object) -> object:
            calls[0] += 1
            if calls[0] > 4:
                raise ValueError(math.nan)
            return whole(*arguments)

        monkeypatch.setattr(policy, "plan", fails_later)
        assert answers(engine, client, "degraded", prompts) == wanted
        assert engine.status()["degraded"]
