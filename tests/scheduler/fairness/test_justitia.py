"""Justitia over the rows of the engine: runs by their tags, open for a while, charged by what they hold."""

from __future__ import annotations

from typing import Any

import pytest

from edged.scheduler.cost.model import CostModel, roofline
from edged.scheduler.fairness.justitia import JustitiaOrder
from edged.scheduler.fairness.virtual_time import call_cost
from edged.scheduler.policies.registry import ROWS
from edged.scheduler.scheduler import Scheduler
from edged.scheduler.task import Kind, Resources, ServingTask, Unit
from edged.settings.load import FairnessSettings, SchedulerSettings
from tests.scheduler.policies.test_policies import resources
from tests.scheduler.world import Life, World


def world_of(row: str = "mace", pages: int = 60, max_sequences: int = 8, **fairness: Any) -> World:
    cost = CostModel(roofline(parameters=135_000_000, flops_per_s=2e11, bytes_per_s=2e10))
    settings = FairnessSettings.model_validate({"policy": "justitia", **fairness})
    scheduler = Scheduler(SchedulerSettings(policy=row), cost, fairness=settings)
    return World(scheduler, Resources(pages, pages, 16, 512, max_sequences))


def order_of(world: World) -> JustitiaOrder:
    order = world.scheduler.policy.flow_order
    assert isinstance(order, JustitiaOrder)
    return order


def call(world: World, prompt: int, answer: int, run: str = "", user: str = "ann", cost: float = 0.0) -> Life:
    task = ServingTask(world._id(), Kind.PREFILL, world.now, num_tokens=prompt, tenant=user, run=run)
    task.run_cost = cost or call_cost(prompt, answer)
    life = world.lives[task.task_id] = Life(task, prompt, answer)
    world.scheduler.add(task, world.now)
    return life


@pytest.mark.parametrize("row", ROWS)
def test_every_row_ends_all_runs_and_keeps_nothing_of_them(row: str) -> None:
    world = world_of(row, idle_s=50.0)
    for number in range(40):
        call(world, 20 + number * 7 % 90, 5 + number % 20, f"run-{number % 8}" if number % 3 else "", f"u{number % 4}")
        if row != "fcfs" and number % 10 == 0:
            world.teach(60, [Unit("layer", 32)])
    world.run()
    assert len(world.done) == 40
    world.now += 60.0
    world.scheduler.plan(world.now, world.room())
    order = order_of(world)
    assert not order.clock.applications
    assert not order._runs
    assert len(order.late_s) == 8 + 14


def test_a_run_is_charged_what_equation_1_says_also_where_calls_are_preempted() -> None:
    world = world_of("fcfs", pages=12, max_sequences=4)
    lives = [call(world, 40, 60, "all") for _ in range(3)]
    world.run()
    assert sum(life.preemptions for life in lives) > 0
    assert order_of(world).clock.applications["all"].served == 3 * call_cost(40, 60)


def test_the_calls_of_a_small_run_enter_before_those_of_a_large_one_that_came_first() -> None:
    world = world_of(by="application", max_sequences=2)
    cost = 20 * call_cost(100, 20)
    elephant = [call(world, 100, 20, "elephant", cost=cost) for _ in range(20)]
    world.step()
    mouse = call(world, 20, 5, "mouse")
    world.run()
    firsts = sorted(life.token_times[0] for life in elephant)
    assert mouse.token_times[0] <= firsts[3]


def test_ten_runs_of_one_user_do_not_delay_another_users_one() -> None:
    world = world_of(max_sequences=1)
    many = [call(world, 50, 20, f"run-{number}", "many") for number in range(10)]
    one = call(world, 50, 20, "run", "one")
    world.run()
    ends = sorted(life.token_times[-1] for life in many)
    assert one.token_times[-1] < ends[2]


def test_a_later_call_takes_its_run_up_again_and_after_a_while_it_is_another_run() -> None:
    world = world_of(idle_s=5.0)
    call(world, 40, 10, "chat", cost=1e6)
    world.run()
    clock, tag = order_of(world).clock, order_of(world).clock.applications["chat"].tag
    world.now += 4.0
    call(world, 40, 10, "chat", cost=7.0)
    world.run()
    assert clock.applications["chat"].tag == tag
    world.now += 6.0
    world.scheduler.plan(world.now, world.room())
    assert not clock.applications
    call(world, 40, 10, "chat", cost=7.0)
    assert clock.applications["chat"].cost == 7.0


def test_lateness_is_told_of_runs_that_ended() -> None:
    world = world_of("fcfs", max_sequences=1, by="application")
    call(world, 10, 400, "long")
    world.step()
    call(world, 10, 5, "short")
    world.run()
    late = order_of(world).late_s
    assert late["short"] > 0.0
    assert late["long"] == 0.0


def test_a_clock_that_jumps_back_moves_no_tag() -> None:
    world = world_of()
    call(world, 40, 10, "a")
    call(world, 40, 10, "b", "bob")
    world.step()
    tags = [known.tag for known in order_of(world).clock.applications.values()]
    world.now -= 100.0
    world.step()
    assert [known.tag for known in order_of(world).clock.applications.values()] == tags


def test_calls_are_ranked_by_their_places_whatever_happened_since_they_were_filed() -> None:
    world = world_of(pages=12, max_sequences=6)
    order, queues = order_of(world), world.scheduler.queues
    for number in range(40):
        call(world, 20 + number * 7 % 90, 5 + number % 20, f"run-{number % 8}" if number % 3 else "", f"u{number % 4}")
    while world.lives:
        world.step()
        new = ServingTask(10_000, Kind.PREFILL, world.now)
        some = [*queues.any_order, *queues.started, new][-9 - world.iterations % 2 :]
        for prompts in (some, some[:-1]):
            assert order.rank(prompts, world.now)[0] == sorted(prompts, key=order.place)
    assert sum(life.preemptions for life in world.done) > 0


def test_the_report_has_the_runs_in_the_order_of_their_tags() -> None:
    world = world_of()
    call(world, 400, 100, "ann/long")
    call(world, 10, 5, "bob/short", "bob")
    report = world.scheduler.fairness_report()
    assert [(run["user"], run["run"]) for run in report["runs"]] == [("bob", "short"), ("ann", "long")]


def test_switching_at_run_time_leaves_every_prompt_in_a_queue() -> None:
    world = world_of()
    for number in range(6):
        call(world, 40, 10, f"run-{number}", f"user-{number % 2}")
    world.step()
    for policy in ("vtc", "off", "justitia"):
        world.scheduler.share_by(FairnessSettings.model_validate({"policy": policy}))
        world.step()
    world.run()
    assert len(world.done) == 6
    assert world.scheduler.plan(world.now, resources()).grants == []


@pytest.mark.parametrize("where", ["parked", "preempted"])
def test_a_task_that_was_in_no_queue_at_the_switch_has_its_turn_later(where: str) -> None:
    world = world_of(policy="off")
    scheduler, task = world.scheduler, call(world, 40, 10, "first").task
    if where == "parked":
        scheduler.park(task)
    else:
        world.step()
        assert task.kind is Kind.DECODE
    scheduler.share_by(FairnessSettings(policy="justitia"))
    for number in range(3):
        call(world, 400, 100, f"run-{number}", f"user-{number}")
    if where == "parked":
        scheduler.add(task, world.now)
    else:
        scheduler.restart(task, 41, world.now)
    assert task in scheduler.queues.first(4)
    for life in list(world.lives.values()):
        scheduler.remove(life.task.task_id)
    world.now += 60.0
    scheduler.plan(world.now, resources())
    assert not order_of(world).clock.applications
