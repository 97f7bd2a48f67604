"""The next plan made while an iteration runs: the same plan as without, or none."""

from __future__ import annotations

import pytest

from edged.lab.policies.spatial import SpatialSharing
from edged.scheduler.policies.flexllm import CoServing
from edged.scheduler.policies.hybrid import Hybrid
from edged.scheduler.policies.registry import ROWS
from edged.scheduler.task import Kind, Plan, Unit
from tests.scheduler.test_simulation import world_of
from tests.scheduler.world import Device, World


def outline(plan: Plan) -> list[tuple[int, int, int]]:
    """Who may do what."""
    return [(grant.task.task_id, grant.num_tokens, grant.units) for grant in plan.grants]


def busy_world(policy: str) -> World:
    """Requests of different lengths that all fit, on a device that keeps the predicted times."""
    world = world_of(policy, pages=2_000, max_tokens=64, device=Device(pass_s=0.02, token_s=0.0005))
    for prompt, answer in ((30, 6), (100, 9), (250, 4), (8, 20)):
        world.ask(prompt, answer)
    return world


@pytest.mark.parametrize("policy", ROWS)
def test_a_foreseen_plan_is_the_one_that_would_have_been_made(policy: str) -> None:
    world = busy_world(policy)
    world.plans_ahead = True
    used = 0
    while world.lives:
        foresight = world.foresight
        wanted = world.scheduler.plan(world.now, world.room())
        plan = world.step()
        if plan.foreseen:
            used += 1
            assert foresight is not None
            # The iteration in between taught the cost model something: chunks may differ by what that is worth.
            assert [grant[0] for grant in outline(plan)] == [grant[0] for grant in outline(wanted)]
            sized = issubclass(ROWS[policy].fill, Hybrid | CoServing | SpatialSharing)  # type: ignore[arg-type]
            for now, then in zip(outline(plan), outline(wanted), strict=True):
                assert now[1] == pytest.approx(then[1], rel=0.25 if sized else 0.0)
    assert used > 10


def test_an_answer_that_ends_only_loses_its_grant() -> None:
    world = world_of("fcfs", pages=500)
    long, short = world.ask(10, 60), world.ask(10, 50)
    world.plans_ahead = True
    plans = []
    while world.lives:
        plans.append(world.step())
    # By then the cost model knows this device.
    assert [plan.foreseen for plan in plans[40:]] == [True] * 20
    assert [len(plan.grants) for plan in plans[48:52]] == [2, 2, 1, 1]
    assert (long.made, short.made) == (60, 50)


def test_a_request_that_comes_meanwhile_is_planned_for_at_once() -> None:
    world = world_of("mace", pages=500)
    world.ask(10, 20)
    world.plans_ahead = True
    for _ in range(5):
        world.step()
    life = world.ask(10, 2)
    plan = world.step()
    assert not plan.foreseen
    assert life.made == 1


def test_a_waiting_prompt_that_changed_meanwhile_is_planned_for_at_once() -> None:
    world = world_of("fcfs", pages=500, max_sequences=1)
    world.ask(10, 20)
    waiting = world.ask(100, 2)
    world.plans_ahead = True
    for _ in range(5):
        world.step()
    waiting.task.num_tokens = 20
    world.scheduler.update(waiting.task)
    assert not world.step().foreseen
    assert world.step().foreseen


def test_a_step_whose_units_changed_meanwhile_is_planned_for_at_once() -> None:
    world = world_of("fcfs", pages=500)
    world.ask(10, 20)
    step = world.teach(20, [Unit("layer", 20), Unit("step", 0)]).task
    world.plans_ahead = True
    world.step()
    step.units = step.units[:1]
    assert not world.step().foreseen
    assert world.step().foreseen


def test_a_granted_prompt_that_could_not_begin_is_planned_anew() -> None:
    world = world_of("fcfs", pages=500)
    world.ask(10, 20)
    plan = world.scheduler.plan(0.0, world.room())
    foresight = world.scheduler.foresee(plan, 0.0, world.room())
    # The engine found no LoRA slot for it: it waits as before.
    assert not world.scheduler.plan(plan.predicted_forward_s, world.room(), foresight).foreseen


def test_prompts_that_only_wait_are_not_looked_at() -> None:
    world = world_of("mace", pages=500, max_sequences=2)
    for _ in range(1_000):
        world.ask(10, 20)
    foresight = world.scheduler.foresee(world.step(), world.now, world.room())
    assert foresight is not None
    assert len(foresight.tasks) == 2


def test_an_iteration_that_took_much_longer_is_planned_anew() -> None:
    world = world_of("fcfs", pages=500)
    world.ask(1_000, 20)
    world.plans_ahead = True
    world.step()
    world.now += 10.0
    assert not world.step().foreseen


def test_nothing_is_foreseen_while_fine_tuning_has_a_part() -> None:
    world = world_of("mace", pages=500)
    world.teach(20, [Unit("layer", 20), Unit("step", 0)], steps=3)
    world.plans_ahead = True
    while world.tunings:
        plan = world.step()
        assert all(grant.task.kind is Kind.FINETUNE for grant in plan.grants)
        assert world.foresight is None


def test_a_prompt_found_in_the_cache_has_less_to_do_than_was_granted() -> None:
    world = world_of("fcfs", pages=500)
    task = world.ask(100, 5).task
    plan = world.scheduler.plan(world.now, world.room())
    assert plan.grants[0].num_tokens == 100
    task.num_tokens, task.context, task.held_pages, task.capacity = 36, 64, 4, 64
    foresight = world.scheduler.foresee(plan, world.now, world.room())
    assert foresight is not None
    copy = foresight.tasks[task.task_id]
    assert (copy.kind, copy.num_tokens, copy.context, copy.capacity) == (Kind.DECODE, 1, 100, 112)
