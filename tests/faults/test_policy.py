"""A policy that fails does not end the service: requests go first come, first served, and the status says so."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from edged.cache.inflight_prefixes import InflightPrefixes
from edged.scheduler.policies.base import Policy
from edged.scheduler.policies.mace.finetune_share import MaceFinetuneShare
from edged.scheduler.policies.mace.policy import MACE
from edged.scheduler.policies.registry import ROWS
from edged.scheduler.scheduler import Scheduler
from edged.scheduler.task import IterationResult, Kind, Resources, ServingTask, TaskOutcome
from edged.settings.load import SchedulerSettings
from tests.engine.harness import random_ids, random_pairs, request, running_engine, wait_idle
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

    monkeypatch.setattr(scheduler.policy.fill, "plan", fail)
    for task_id in range(3):
        scheduler.add(ServingTask(task_id, Kind.PREFILL, arrival_s=float(task_id), num_tokens=20), float(task_id))
    assert [grant.task.task_id for grant in scheduler.plan(3.0, RESOURCES).grants] == [0, 1, 2]
    assert f"the policy {name} failed (ZeroDivisionError: a bin of no tasks)" in scheduler.degraded
    assert [vars(record)["event"] for record in caplog.records] == ["policy_failed"]


def test_a_part_that_fails_at_what_happens_is_the_policys_failure() -> None:
    class Failing(MaceFinetuneShare):
        def completed(self, *_: object) -> None:
            raise ZeroDivisionError("no work")

    settings = SchedulerSettings()
    cost = scheduler_of().cost
    scheduler = Scheduler(settings, cost, Policy(replace(MACE, finetune_share=Failing), settings, cost))
    task = ServingTask(1, Kind.PREFILL, arrival_s=0.0, num_tokens=20)
    scheduler.add(task, 0.0)
    assert scheduler.plan(0.0, RESOURCES).grants
    scheduler.complete(IterationResult([TaskOutcome(task, 20, 0, Kind.DECODE)], 0.1), 0.1)
    assert "the policy mace failed (ZeroDivisionError: no work)" in scheduler.degraded
    assert [grant.task for grant in scheduler.plan(0.2, RESOURCES).grants] == [task]


def test_an_order_that_fails_leaves_every_prompt_where_it_was_and_comes_back_with_a_reload(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler = scheduler_of(policy="mace")
    tasks = [ServingTask(i, Kind.PREFILL, arrival_s=float(i), num_tokens=200 if i == 2 else 20) for i in range(5)]
    for task in tasks[2:4]:
        scheduler.add(task, task.arrival_s)
    (begun,) = (grant.num_tokens for grant in scheduler.plan(3.0, RESOURCES).grants if grant.task is tasks[2])
    assert 0 < begun < 200, "it is in the middle of its prompt"
    scheduler.complete(IterationResult([TaskOutcome(tasks[2], begun, 0, Kind.PREFILL)], 0.1), 3.1)
    order = scheduler.policy.flow_order

    def fail(_task: ServingTask) -> tuple[float, int]:
        raise KeyError("a counter that was never made")

    with monkeypatch.context() as failing:
        failing.setattr(order, "key", fail)
        for task in (tasks[0], tasks[1], tasks[4]):
            scheduler.add(task, 4.0)
        assert "the policy mace failed (KeyError: 'a counter that was never made')" in scheduler.degraded
        assert [record.levelname for record in caplog.records] == ["ERROR"], "it is told once"
        scheduler.remove(4)
        plan = scheduler.plan(5.0, RESOURCES)
        assert {grant.task.task_id: grant.num_tokens for grant in plan.grants} == {0: 20, 1: 20, 2: 200 - begun, 3: 20}
        scheduler.configure(SchedulerSettings())
        assert scheduler.degraded, "it fails still"
    scheduler.configure(SchedulerSettings())
    assert not scheduler.degraded
    granted: set[int] = set()
    for now in range(6, 10):
        plan = scheduler.plan(now, RESOURCES)
        granted |= {grant.task.task_id for grant in plan.grants}
        outcomes = [TaskOutcome(grant.task, grant.num_tokens, 0, Kind.PREFILL) for grant in plan.grants]
        scheduler.complete(IterationResult(outcomes, 0.1), now + 0.1)
    assert granted == {0, 1, 2, 3}


def test_a_request_that_cannot_be_queued_ends_with_the_reason_and_the_next_one_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = random_ids(60, 1)
    with running_engine(tmp_path) as (engine, client):
        with monkeypatch.context() as failing:

            def fail(*_: object) -> None:
                raise ValueError("the clock stands still")

            failing.setattr(InflightPrefixes, "enter", fail)
            engine.submit(request("odd", prompt))
            client.wait(lambda: "odd" in client.finished)
        assert client.finished["odd"].reason == "error"
        assert "the clock stands still" in client.finished["odd"].error
        for name in ("one", "two"):
            engine.submit(request(name, prompt))
        client.wait(lambda: len(client.finished) == 3)
        assert client.ids("one") == client.ids("two") != []
        assert engine.status()["queue"] == {"waiting": 0, "prefill": 0, "decode": 0, "finetune": 0}


def test_serving_goes_on_learning_waits_and_both_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [random_ids(40, seed) for seed in range(4)]
    with running_engine(tmp_path) as (engine, client):
        wanted = answers(engine, client, "before", prompts)
        engine.submit_pairs(random_pairs(30))
        client.wait(lambda: engine.status()["finetune"]["steps"] > 0 or not engine.status()["queue"]["finetune"])
        policy = engine.built.scheduler.policy
        whole = policy.fill.plan

        def fail(*_: object) -> None:
            raise AssertionError("slack is nan")

        monkeypatch.setattr(policy.fill, "plan", fail)
        assert answers(engine, client, "degraded", prompts) == wanted
        status = engine.status()
        assert status["degraded"][0].startswith("the policy mace failed (AssertionError: slack is nan)")
        assert not status["finetune"]["enabled"]
        assert "the policy mace failed" in status["finetune"]["reason"]
        pages = status["pages"]
        assert pages["free"] + pages["cached"] == pages["total"], "a step kept its pages"
        monkeypatch.setattr(policy.fill, "plan", whole)
        engine.configure(engine.settings).result(10)
        wait_idle(engine)
        assert engine.status()["degraded"] == []
        assert engine.status()["finetune"]["pairs_trained"] > 0


def test_a_plan_made_ahead_falls_back_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running_engine(tmp_path) as (engine, client):
        engine.loop.plans_ahead = True
        prompts = [random_ids(40, seed) for seed in range(3)]
        wanted = answers(engine, client, "before", prompts)
        policy = engine.built.scheduler.policy
        whole = policy.fill.plan
        calls = [0]

        def fails_later(*arguments: object) -> object:
            calls[0] += 1
            if calls[0] > 4:
                raise ValueError(math.nan)
            return whole(*arguments)

        monkeypatch.setattr(policy.fill, "plan", fails_later)
        assert answers(engine, client, "degraded", prompts) == wanted
        assert engine.status()["degraded"]
