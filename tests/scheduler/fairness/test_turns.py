"""Virtual token counters over the rows of the engine: who enters, what is charged, and what a reload keeps."""

from __future__ import annotations

import random
from typing import Any

import pytest

from edged.scheduler.cost.model import CostModel, roofline
from edged.scheduler.fairness.turns import TurnOrder
from edged.scheduler.policies.hybrid import LOOK_AHEAD
from edged.scheduler.policies.registry import ROWS
from edged.scheduler.scheduler import Scheduler
from edged.scheduler.task import FinetuneTask, IterationResult, Kind, Resources, ServingTask, TaskOutcome, Unit
from edged.settings.load import FairnessSettings, SchedulerSettings
from tests.scheduler.policies.test_policies import granted, resources
from tests.scheduler.world import World

every_row = pytest.mark.parametrize("row", ROWS)
rows = pytest.mark.parametrize("row", ["mace", "fcfs", "mace-priority"])


def fair_scheduler(row: str = "mace", **fairness: Any) -> Scheduler:
    cost = CostModel(roofline(parameters=135_000_000, flops_per_s=2e11, bytes_per_s=2e10))
    settings = FairnessSettings.model_validate({"policy": "vtc", **fairness})
    return Scheduler(SchedulerSettings(policy=row), cost, fairness=settings)


def world_of(scheduler: Scheduler, pages: int = 500, max_sequences: int = 32, max_tokens: int = 512) -> World:
    return World(scheduler, Resources(pages, pages, 16, max_tokens, max_sequences))


def order_of(scheduler: Scheduler) -> TurnOrder:
    order = scheduler.policy.flow_order
    assert isinstance(order, TurnOrder)
    return order


def prompt(task_id: int, tenant: str, tokens: int = 50) -> ServingTask:
    return ServingTask(task_id, Kind.PREFILL, float(task_id), num_tokens=tokens, tenant=tenant)


@rows
@pytest.mark.parametrize("seed", range(12))
def test_counters_of_those_who_wait_stay_within_the_bound_of_the_paper(row: str, seed: int) -> None:
    chance = random.Random(seed)
    weights = {"ann": 1.0, "bob": chance.choice([0.5, 1.0, 2.0]), "cy": 1.0}
    pages, longest = chance.choice([20, 60]), 120
    world = world_of(fair_scheduler(row, weights=weights), pages, max_sequences=chance.choice([2, 8]), max_tokens=128)
    counters = order_of(world.scheduler).counters
    # One iteration's tokens beside the paper's bound: what runs meanwhile is charged when it ends.
    bound = (max(longest, 2.0 * pages * 16) + 2.0 * 8) / min(weights.values())
    busy = 0
    for round_ in range(300):
        for user in weights:
            if chance.random() < 0.3 and sum(life.task.tenant == user for life in world.lives.values()) < 12:
                world.ask(chance.randint(1, longest), chance.randint(1, 30), tenant=user)
        if round_ % 40 == 7:
            world.teach(60, [Unit("layer", 32)])
        if world.lives and chance.random() < 0.05:
            world.cancel(chance.choice(list(world.lives.values())))
        if world.lives or world.tunings:
            world.step()
        queued = counters.queued.values()
        busy += len(queued) > 1
        assert not queued or max(queued) - min(queued) <= bound
    assert busy > 20


@rows
def test_two_who_always_ask_are_served_by_their_weights(row: str) -> None:
    world = world_of(fair_scheduler(row, weights={"ann": 2.0}), max_sequences=2)
    sizes = {"ann": (300, 5), "bob": (60, 40)}
    while world.now < 60.0:
        for tenant, (tokens, answer) in sizes.items():
            while sum(life.task.tenant == tenant for life in world.lives.values()) < 6:
                world.ask(tokens, answer, tenant=tenant)
        world.step()
    service = dict.fromkeys(sizes, 0.0)
    for life in [*world.done, *world.lives.values()]:
        service[life.task.tenant] += (life.prompt if life.made else 0) + 2.0 * life.made
    assert service["ann"] / service["bob"] == pytest.approx(2.0, rel=0.1)


@rows
def test_a_flood_leaves_the_others_what_they_ask_for(row: str) -> None:
    def light_waits(flood: int) -> float:
        world = world_of(fair_scheduler(row), max_sequences=4)
        for _ in range(flood):
            world.ask(200, 30, tenant="flood")
        waits = []
        for _ in range(5):
            for _ in range(20):
                if world.lives:
                    world.step()
            life = world.ask(50, 10, tenant="light")
            while not life.made:
                world.step()
            waits.append(life.token_times[0] - life.task.arrival_s)
        return max(waits)

    assert light_waits(300) < light_waits(10) * 2


@every_row
def test_every_row_ends_all_that_was_asked(row: str) -> None:
    world = world_of(fair_scheduler(row), pages=40, max_sequences=6)
    for number in range(40):
        world.ask(20 + number * 7 % 90, 5 + number % 20, tenant=f"user-{number % 4}")
        if row != "fcfs" and number % 10 == 0:
            world.teach(60, [Unit("layer", 32)])
    world.run()
    assert len(world.done) == 40
    assert not order_of(world.scheduler).counters.queued


def test_nobody_overtakes_a_prompt_that_has_to_wait_for_pages() -> None:
    scheduler = fair_scheduler()
    order_of(scheduler).counters.charge("late", 10.0)
    scheduler.add(prompt(1, "first", tokens=320), 1.0)
    scheduler.add(prompt(2, "late", tokens=32), 2.0)
    assert list(granted(scheduler.plan(2.0, resources(free=10)))) == [1]
    assert set(granted(scheduler.plan(2.0, resources(free=60)))) == {1, 2}


@pytest.mark.parametrize("policy", ["vtc", "justitia"])
def test_as_many_short_prompts_enter_at_once_as_find_room(policy: str) -> None:
    scheduler = fair_scheduler(policy=policy)
    for task_id in range(2 * LOOK_AHEAD):
        scheduler.add(prompt(task_id, f"user-{task_id % 3}", tokens=1), 0.0)
    assert len(granted(scheduler.plan(1.0, resources()))) == 2 * LOOK_AHEAD


def test_prompts_enter_as_if_each_were_charged_at_once() -> None:
    scheduler = fair_scheduler()
    for task_id in range(4):
        scheduler.add(prompt(task_id, "ann"), float(task_id))
    for task_id in range(4, 8):
        scheduler.add(prompt(task_id, "bob", tokens=25), float(task_id))
    assert [task.task_id for task in scheduler.queues.first(6)] == [0, 4, 5, 1, 6, 7]
    assert [task.task_id for task in scheduler.queues.first(100)] == [0, 4, 5, 1, 6, 7, 2, 3]


def test_what_the_cache_had_is_given_back() -> None:
    scheduler = fair_scheduler()
    task = prompt(1, "ann", tokens=100)
    scheduler.add(task, 1.0)
    scheduler.plan(1.0, resources())
    counters = order_of(scheduler).counters
    assert counters.counter("ann") == 100.0
    # As the engine does when the prompt is admitted.
    task.num_tokens, task.context = 36, 64
    scheduler.complete(IterationResult([TaskOutcome(task, 36, 0, Kind.DECODE)], 0.1), 1.1)
    assert counters.counter("ann") == 36.0 + 2.0


def test_a_prompt_that_was_cancelled_before_anything_was_computed_costs_nothing() -> None:
    scheduler = fair_scheduler()
    scheduler.add(prompt(1, "ann"), 1.0)
    scheduler.plan(1.0, resources())
    scheduler.remove(1)
    assert order_of(scheduler).counters.counter("ann") == 0.0


def test_what_is_computed_again_after_a_preemption_is_not_charged_again() -> None:
    world = world_of(fair_scheduler("fcfs"), pages=12, max_sequences=4)
    for tenant in ("ann", "bob", "cy"):
        world.ask(40, 60, tenant=tenant)
    world.run()
    assert sum(life.preemptions for life in world.done) > 0
    counters = order_of(world.scheduler).counters
    total = sum(counters.counter(tenant) for tenant in ("ann", "bob", "cy"))
    assert total == 3 * (40 + 2.0 * 60)


def test_a_reload_keeps_counters_and_another_policy_starts_anew() -> None:
    scheduler = fair_scheduler()
    order_of(scheduler).counters.charge("ann", 500.0)
    scheduler.share_by(FairnessSettings(policy="vtc", weights={"ann": 2.0}))
    assert order_of(scheduler).counters.counter("ann") == 500.0
    scheduler.add(prompt(1, "ann"), 1.0)
    scheduler.add(prompt(2, "bob"), 2.0)
    scheduler.share_by(FairnessSettings(policy="off"))
    assert [task.task_id for task in scheduler.queues.first(2)] == [1, 2]
    scheduler.share_by(FairnessSettings(policy="vtc"))
    assert order_of(scheduler).counters.queued == {"ann": 0.0, "bob": 0.0}
    assert len(granted(scheduler.plan(3.0, resources()))) == 2


def test_an_order_that_fails_is_replaced_by_that_of_arrival(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = fair_scheduler()
    scheduler.add(prompt(1, "bob"), 1.0)
    scheduler.add(prompt(2, "ann"), 2.0)

    def fail(*_: object) -> list[ServingTask]:
        raise ZeroDivisionError("a share of nothing")

    monkeypatch.setattr(order_of(scheduler), "first", fail)
    assert list(granted(scheduler.plan(3.0, resources()))) == [1, 2]
    assert "a share of nothing" in scheduler.degraded


def test_choices_of_one_request_share_their_users_counter() -> None:
    scheduler = fair_scheduler()
    for task_id in range(10):
        scheduler.add(prompt(task_id, "many"), 1.0)
    scheduler.add(prompt(10, "one"), 1.1)
    assert [task.task_id for task in scheduler.queues.first(2)] == [0, 10]


class TestTraining:
    """The next step is of the ready adapter that was trained least."""

    def step(self, scheduler: Scheduler, task_id: int, *adapters: str, done: bool = True) -> None:
        task = FinetuneTask(task_id, 0.0, num_tokens=100, trains=adapters)
        scheduler.add(task, 0.0)
        plan = scheduler.plan(0.0, resources())
        assert [grant.task for grant in plan.grants] == [task]
        tokens = 100 if done else 40
        outcome = TaskOutcome(task, tokens, 0, None if done else Kind.FINETUNE)
        scheduler.complete(IterationResult([outcome], 0.1), 0.1)
        if not done:
            scheduler.remove(task_id)

    def test_the_least_trained_comes_first(self) -> None:
        scheduler = fair_scheduler()
        assert scheduler.next_steps(["ann", "bob"], 1) == ["ann"]
        self.step(scheduler, 1, "ann")
        assert scheduler.next_steps(["ann", "bob"], 2) == ["bob", "ann"]
        assert order_of(scheduler).training.counters.counter("ann") > 0.0

    def test_a_step_of_several_is_charged_to_each_and_an_abandoned_one_to_nobody(self) -> None:
        scheduler = fair_scheduler()
        self.step(scheduler, 1, "ann", "bob")
        self.step(scheduler, 2, "cy", done=False)
        counters = order_of(scheduler).training.counters
        ann, bob, cy = (counters.counter(name) for name in ("ann", "bob", "cy"))
        assert ann == bob > 0.0 == cy

    def test_by_itself_training_counts_as_a_prompt_of_the_same_time(self) -> None:
        scheduler = fair_scheduler()
        self.step(scheduler, 1, "ann")
        service = order_of(scheduler).training.counters.counter("ann")
        assert service > 0.0
        assert service * scheduler.cost.token_s == pytest.approx(0.1, rel=0.5)

    def test_who_comes_back_has_saved_nothing_up(self) -> None:
        scheduler = fair_scheduler()
        scheduler.next_steps(["ann"], 1)
        self.step(scheduler, 1, "ann")
        scheduler.next_steps(["ann", "bob"], 1)
        counters = order_of(scheduler).training.counters
        assert counters.counter("bob") == counters.counter("ann") > 0.0
