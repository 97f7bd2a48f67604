"""What defines each baseline, and what each ablation of MACE lacks and keeps."""

from __future__ import annotations

import math

import pytest

from edged.scheduler.policies.registry import ROWS
from edged.scheduler.task import IterationResult, Kind, Plan, TaskOutcome, Unit
from tests.scheduler.policies.test_policies import PAGE, add_decode, add_lesson, add_prompt, granted, resources
from tests.scheduler.test_scheduler import scheduler_of
from tests.scheduler.test_simulation import overload, world_of
from tests.scheduler.world import World

STEP = [Unit("layer", 100)] * 50
"""More than half a second of units on the device of `tests.scheduler.world`."""


def kinds(plan: Plan) -> set[Kind]:
    """What a bin mixes."""
    return {grant.task.kind for grant in plan.grants}


def tunes(plan: Plan) -> bool:
    return kinds(plan) == {Kind.FINETUNE}


def serves(plan: Plan) -> bool:
    return bool(plan.grants) and Kind.FINETUNE not in kinds(plan)


def watched(world: World, until_s: float, keeps: int = 3) -> list[tuple[float, Plan]]:
    """Every plan with when it was made, while `keeps` requests at a time are served."""
    plans = []
    while world.now < until_s:
        while len(world.lives) < keeps:
            world.ask(prompt=60, answer=20)
        now = world.now
        plans.append((now, world.step()))
    return plans


@pytest.mark.parametrize("policy", ["ekya", "adainf", "periodic-async", "sync"])
def test_an_iteration_without_hybrid_bins_serves_or_learns(policy: str) -> None:
    world = world_of(policy, retrain_every_s=2.0)
    world.teach(100, STEP, steps=20)
    plans = [plan for _, plan in watched(world, until_s=20.0)]
    assert all(tunes(plan) != serves(plan) for plan in plans)
    world.run()
    assert not world.tunings


@pytest.mark.parametrize("policy", ["ekya", "adainf", "sync"])
def test_running_answers_stand_still_with_their_pages_while_a_step_runs(policy: str) -> None:
    world = world_of(policy, retrain_every_s=1.0)
    life = world.ask(prompt=100, answer=2000)
    while world.now < 0.9:
        world.step()
    world.teach(400, STEP)
    while world.tunings:
        made, pages = life.made, life.task.held_pages
        plan = world.step()
        if tunes(plan):
            assert (life.made, life.task.held_pages) == (made, pages)
    assert life.preemptions == 0


@pytest.mark.parametrize("policy", ["ekya", "periodic-async"])
def test_a_step_that_comes_after_a_rest_waits_for_its_interval(policy: str) -> None:
    scheduler = scheduler_of(policy=policy, retrain_every_s=30.0)
    scheduler.plan(0.0, resources())
    add_lesson(scheduler, 9, tokens=100, now=95.0)
    waits = scheduler.plan(95.0, resources())
    assert not waits.grants
    assert waits.resume_s == 120.0
    assert tunes(scheduler.plan(120.0, resources()))


@pytest.mark.parametrize("policy", ["adainf", "sync", "temporal"])
def test_a_step_that_lacks_pages_waits_for_answers_to_end_and_nobody_enters_before_it(policy: str) -> None:
    world = world_of(policy, pages=40, temporal_every=1)
    running = [world.ask(prompt=150, answer=30) for _ in range(3)]
    world.step()
    tuning = world.teach(30 * 16, STEP)
    world.now = 1.0
    late = world.ask(prompt=16, answer=5)
    world.run()
    assert all(life.preemptions == 0 for life in (*running, late))
    assert tuning.run_times[-1] < late.token_times[0]


class TestEkya:
    """Periodic, blocking."""

    def test_it_learns_in_windows_alone_and_serves_between_them(self) -> None:
        world = world_of("ekya", retrain_every_s=5.0, retrain_window_s=2.0)
        world.teach(100, STEP, steps=100)
        longest_s = 0.0
        for now, plan in watched(world, until_s=30.0):
            since_s = now % 5.0
            if now < 5.0 or since_s > 2.0 + longest_s:
                assert serves(plan)
            elif since_s < 2.0 and since_s > world.longest_iteration_s:
                assert tunes(plan)
            longest_s = max(longest_s, world.longest_iteration_s)
        assert 0 < next(iter(world.tunings.values())).taken < 100

    def test_a_window_ends_when_nothing_is_left_to_learn_and_the_next_is_an_interval_later(self) -> None:
        world = world_of("ekya", retrain_every_s=5.0)
        world.teach(100, STEP, steps=2)
        watched(world, until_s=6.9)
        assert not world.tunings
        later = world.teach(100, STEP)
        plans = watched(world, until_s=12.0)
        assert min(now for now, plan in plans if tunes(plan)) == pytest.approx(10.0, abs=0.2)
        assert later.taken == 1

    def test_steps_that_open_one_after_the_other_share_a_window(self) -> None:
        world = world_of("ekya", retrain_every_s=5.0)
        for _ in range(3):
            world.teach(100, STEP)
            while world.tunings:
                world.step()
            assert 5.0 < world.now < 7.5

    def test_a_step_under_way_is_ended_after_the_window(self) -> None:
        world = world_of("ekya", retrain_every_s=5.0, retrain_window_s=0.1, max_tokens=64)
        tuning = world.teach(640, STEP * 4, steps=2)
        plans = watched(world, until_s=9.9)
        turns = [tunes(plan) for _, plan in plans]
        assert tuning.taken == 1
        assert sum(turns) == turns[turns.index(True) :].index(False) == 10

    def test_a_window_does_not_wait_for_answers_that_hold_the_pages_of_a_step(self) -> None:
        world = world_of("ekya", pages=40, retrain_every_s=1.0)
        lives = [world.ask(prompt=150, answer=40) for _ in range(3)]
        world.step()
        world.teach(30 * 16, STEP)
        world.now = 1.0
        plan = world.step()
        assert tunes(plan)
        assert plan.preempt == [life.task for life in reversed(lives[1:])]
        world.run()
        assert [life.preemptions for life in lives] == [0, 1, 1]

    def test_without_requests_it_says_when_the_next_window_opens(self) -> None:
        scheduler = scheduler_of(policy="ekya", retrain_every_s=30.0)
        assert math.isinf(scheduler.plan(100.0, resources()).resume_s)
        add_lesson(scheduler, 9, tokens=50, now=101.0)
        plan = scheduler.plan(101.0, resources())
        assert plan.grants == []
        assert plan.resume_s == 130.0
        assert tunes(scheduler.plan(130.0, resources()))


class TestAdaInf:
    """Continuous, fine-tuning first."""

    def test_a_step_stops_all_decodes_until_it_has_ended(self) -> None:
        world = world_of("adainf", max_tokens=64)
        watched(world, until_s=1.0)
        tuning = world.teach(600, STEP)
        while world.tunings:
            assert tunes(world.step())
        assert tuning.taken == 1
        assert serves(world.step())

    def test_steps_go_first_in_first_out_and_before_any_serving(self) -> None:
        world = world_of("adainf")
        world.ask(prompt=60, answer=20)
        tunings = [world.teach(100, STEP) for _ in range(3)]
        for _ in range(3):
            assert tunes(world.step())
        assert serves(world.step())
        ends = [tuning.run_times[-1] for tuning in tunings]
        assert ends == sorted(ends)

    def test_a_step_that_no_memory_can_hold_does_not_stop_serving(self) -> None:
        scheduler = scheduler_of(policy="adainf")
        add_lesson(scheduler, 9, tokens=2000 * PAGE)
        add_decode(scheduler, 1)
        add_prompt(scheduler, 2, 100)
        assert set(granted(scheduler.plan(0.0, resources()))) == {1, 2}

    def test_a_step_under_way_is_ended_before_another_begins(self) -> None:
        scheduler = scheduler_of(policy="adainf")
        add_lesson(scheduler, 8, tokens=100)
        add_lesson(scheduler, 9)
        assert set(granted(scheduler.plan(0.1, resources()))) == {9}


class TestSync:
    """Synchronous, step by step."""

    def test_a_step_preempts_decodes_at_once_and_serving_has_an_iteration_before_the_next(self) -> None:
        world = world_of("sync", max_tokens=64)
        watched(world, until_s=1.0)
        tuning = world.teach(128, STEP, steps=3)
        turns = "".join("t" if tunes(world.step()) else "s" for _ in range(10))
        assert turns == "ttsttsttss"
        assert tuning.taken == 3

    def test_where_nobody_is_served_steps_follow_each_other(self) -> None:
        world = world_of("sync")
        world.teach(100, STEP, steps=3)
        assert all(tunes(world.step()) for _ in range(3))


class TestPeriodicAsync:
    """At intervals, in the gaps of serving."""

    def test_it_learns_only_from_an_interval_on_and_only_when_nobody_is_served(self) -> None:
        world = world_of("periodic-async", retrain_every_s=5.0, idle_quantum_ms=50.0)
        tuning = world.teach(100, STEP, steps=4)
        assert all(serves(plan) for _, plan in watched(world, until_s=5.5))
        while world.lives:
            assert serves(world.step())
        assert tunes(world.step())
        life = world.ask(prompt=20, answer=5)
        while life.made < 5:
            assert serves(world.step())
        world.run()
        assert tuning.taken == 4
        assert world.now < 10.0

    def test_idle_it_waits_for_the_interval(self) -> None:
        world = world_of("periodic-async", retrain_every_s=5.0)
        tuning = world.teach(100, STEP)
        world.run()
        assert tuning.run_times[0] > 5.0

    def test_a_request_waits_for_no_more_than_a_quantum_of_it(self) -> None:
        scheduler = scheduler_of(policy="periodic-async", retrain_every_s=5.0, idle_quantum_ms=50.0)
        add_lesson(scheduler, 9)
        scheduler.plan(0.0, resources())
        assert 0.045 < scheduler.plan(5.0, resources()).predicted_units_s <= 0.050


class TestMaceBin:
    """Without best-fit bins."""

    def test_one_that_finds_no_room_keeps_those_behind_it_out(self) -> None:
        for policy, enters in (("mace", True), ("mace-bin", False)):
            scheduler = scheduler_of(policy=policy, ttft_floor_ms=60_000.0)
            add_decode(scheduler, 1)
            add_prompt(scheduler, 2, 40 * PAGE)
            add_prompt(scheduler, 3, 2 * PAGE, arrival_s=0.2)
            assert (3 in granted(scheduler.plan(0.2, resources(free=30, total=100)))) is enters

    def test_order_and_hybrid_iterations_are_those_of_mace(self) -> None:
        plans = {}
        for policy in ("mace", "mace-bin"):
            world = world_of(policy)
            world.teach(100, STEP, steps=50)
            plans[policy] = [[kinds(plan), plan.pages] for _, plan in watched(world, until_s=5.0)]
        assert plans["mace"] == plans["mace-bin"]


class TestMacePriority:
    """Without priorities."""

    def test_prompts_come_in_the_order_of_their_arrival_whatever_their_deadlines(self) -> None:
        scheduler = scheduler_of(policy="mace-priority", ttft_floor_ms=1.0)
        add_prompt(scheduler, 1, 2000, arrival_s=0.0)
        add_prompt(scheduler, 2, 20, arrival_s=0.1)
        assert list(granted(scheduler.plan(0.1, resources()))) == [1]

    def test_prompts_under_way_too_and_a_near_deadline_hurries_those_before_it(self) -> None:
        chunks = {}
        for policy in ("mace", "mace-priority"):
            scheduler = scheduler_of(policy=policy, ttft_floor_ms=60_000.0)
            tasks = [add_prompt(scheduler, task_id, 1000) for task_id in (1, 2)]
            scheduler.complete(IterationResult([TaskOutcome(task, 100, 0, Kind.PREFILL) for task in tasks], 0.2), 0.2)
            for task in tasks:
                task.held_pages, task.capacity = 63, 63 * PAGE
            tasks[1].deadline_s = 0.5
            tasks[1].num_tokens = 20
            scheduler.update(tasks[1])
            add_decode(scheduler, 3).deadline_s = 0.0
            plan = granted(scheduler.plan(0.2, resources()))
            chunks[policy] = [(task_id, plan[task_id][0]) for task_id in plan if task_id != 3]
        assert chunks["mace-priority"] == [(1, 900), (2, 20)]
        assert chunks["mace"][0] == (2, 20)

    def test_memory_goes_to_prompts_and_steps_by_their_arrival(self) -> None:
        for policy, who in (("mace", {1, 2}), ("mace-priority", {1, 9})):
            scheduler = scheduler_of(policy=policy, ttft_floor_ms=60_000.0)
            add_prompt(scheduler, 1, 10 * PAGE)
            add_lesson(scheduler, 9, tokens=10 * PAGE, now=0.1)
            add_prompt(scheduler, 2, 10 * PAGE, arrival_s=0.2)
            assert set(granted(scheduler.plan(0.2, resources(free=24, total=100)))) == who

    def test_neither_its_wait_nor_its_loss_puts_a_step_before_an_older_request(self) -> None:
        for policy, outranks in (("mace", True), ("mace-priority", False)):
            scheduler = scheduler_of(policy=policy, tbt_floor_ms=1.0, tbt_factor=0.5, finetune_max_wait_s=0.5)
            add_decode(scheduler, 1).deadline_s = 0.0
            add_lesson(scheduler, 9, now=0.1, loss=10.0)
            assert (9 in granted(scheduler.plan(2.0, resources()))) is outranks

    def test_a_step_that_is_older_than_all_requests_comes_before_them(self) -> None:
        scheduler = scheduler_of(policy="mace-priority", tbt_floor_ms=1.0, tbt_factor=0.5, finetune_max_wait_s=50.0)
        add_lesson(scheduler, 9)
        add_decode(scheduler, 1, arrival_s=0.1).deadline_s = 0.0
        assert 9 in granted(scheduler.plan(0.2, resources()))

    def test_of_two_steps_the_first_come_begins_whatever_their_losses(self) -> None:
        scheduler = scheduler_of(policy="mace-priority")
        add_lesson(scheduler, 8, tokens=100, loss=0.1)
        add_lesson(scheduler, 9, tokens=100, now=0.05, loss=2.0)
        assert set(granted(scheduler.plan(0.1, resources()))) == {8}

    def test_bins_are_hybrid_as_in_mace(self) -> None:
        world = world_of("mace-priority")
        world.teach(100, STEP, steps=50)
        plans = [plan for _, plan in watched(world, until_s=5.0)]
        assert any(Kind.FINETUNE in kinds(plan) and Kind.DECODE in kinds(plan) for plan in plans)


@pytest.mark.parametrize(("policy", "shares", "prunes"), [("mace-prefix", False, True), ("mace-prune", True, False)])
def test_an_ablation_of_the_cache_decides_as_mace_does(policy: str, shares: bool, prunes: bool) -> None:
    assert (ROWS[policy].shares_prefixes, ROWS[policy].prunes) == (shares, prunes)
    assert (ROWS["mace"].shares_prefixes, ROWS["mace"].prunes) == (True, True)
    ends = []
    for name in ("mace", policy):
        world = world_of(name)
        overload(world, seconds=3.0)
        ends.append([life.token_times for life in world.done])
    assert ends[0] == ends[1]
