"""What readers lend to fine-tuning, and that they do not feel it."""

from __future__ import annotations

import pytest

from edged.scheduler.reader import Reader
from edged.scheduler.scheduler import Scheduler
from edged.scheduler.task import Kind, ServingTask, Unit
from tests.scheduler.policies.test_policies import add_decode, add_lesson, granted, resources
from tests.scheduler.test_scheduler import scheduler_of
from tests.scheduler.world import Device, World

PACE = 5.0


def add_reader(scheduler: Scheduler, task_id: int, ahead_s: float) -> ServingTask:
    """A decode whose reader has text for `ahead_s` from 0 on."""
    task = ServingTask(
        task_id, Kind.DECODE, 0.0, context=63, held_pages=4, capacity=64, reader=Reader(PACE, ideal_s=ahead_s)
    )
    scheduler.add(task, 0.0)
    return task


@pytest.fixture
def scheduler() -> Scheduler:
    """MACE's scheduler whose fine-tuning has had all that its slow-down allows."""
    scheduler = scheduler_of(tbt_slowdown=1.0, idle_quantum_ms=1000.0)
    add_lesson(scheduler, 9)
    return scheduler


def test_a_reader_with_text_in_hand_lends_what_serving_without_one_does_not(scheduler: Scheduler) -> None:
    add_reader(scheduler, 1, ahead_s=3.0)
    assert granted(scheduler.plan(0.0, resources()))[9][1] > 0
    add_decode(scheduler, 2)
    assert 9 not in granted(scheduler.plan(0.0, resources()))


def test_candidates_take_nothing_that_readers_lend(scheduler: Scheduler) -> None:
    add_reader(scheduler, 1, ahead_s=3.0)
    alone = granted(scheduler.plan(0.0, resources(sequences=9)))[9][1]
    for task_id in (2, 3, 4, 5):
        candidate = ServingTask(task_id, Kind.DECODE, 0.0, context=63, held_pages=4, capacity=64, candidate=True)
        scheduler.add(candidate, 0.0)
    beside = granted(scheduler.plan(0.0, resources(sequences=9, free=1000)))
    assert beside.keys() == {1, 2, 3, 4, 5, 9}
    assert beside[9][1] == alone > 0
    scheduler.remove(1)
    assert 9 not in granted(scheduler.plan(0.0, resources()))


def test_a_reader_who_has_no_more_than_the_reserve_is_due_at_the_target_of_others(scheduler: Scheduler) -> None:
    hungry, fed = add_reader(scheduler, 1, ahead_s=0.9), add_reader(scheduler, 2, ahead_s=3.0)
    other = add_decode(scheduler, 3)
    assert hungry.deadline_s == pytest.approx(other.deadline_s, rel=0.1)
    assert fed.deadline_s == pytest.approx(1.0)


def test_a_reader_who_waits_already_is_overdue(scheduler: Scheduler) -> None:
    assert add_reader(scheduler, 1, ahead_s=-0.5).deadline_s == pytest.approx(-0.5)


def test_little_is_lent_where_slots_or_pages_are_short(scheduler: Scheduler) -> None:
    add_reader(scheduler, 1, ahead_s=3.0)
    plenty = granted(scheduler.plan(0.0, resources()))[9][1]
    assert 0 < granted(scheduler.plan(0.0, resources(sequences=2)))[9][1] < plenty
    assert 0 < granted(scheduler.plan(0.0, resources(free=300)))[9][1] < plenty


def test_mace_to_the_letter_lends_nothing() -> None:
    scheduler = scheduler_of(policy="mace-paper", tbt_slowdown=1.0)
    add_lesson(scheduler, 9)
    add_reader(scheduler, 1, ahead_s=3.0)
    assert 9 not in granted(scheduler.plan(0.0, resources()))


def read_to(reads: bool = True, reserve_s: float = 1.0, plans_ahead: bool = False) -> tuple[World, float]:
    """A world in which one answer is made beside a long lesson whose units may each take half a second; returns it and
    the work that the lesson got meanwhile."""
    scheduler = scheduler_of(reader_reserve_s=reserve_s, idle_quantum_ms=500.0, finetune_max_wait_s=1e4)
    world = World(scheduler, resources(), Device(unit_base_s=0.4))
    world.plans_ahead = plans_ahead
    life = world.ask(100, 60)
    reader = Reader(PACE, ideal_s=2.0)
    life.task.reader = reader if reads else None
    tuning = world.teach(64, [Unit("layer", 64)] * 500)
    while life not in world.done:
        world.step()
    return world, tuning.work_s


@pytest.mark.parametrize("plans_ahead", [False, True])
def test_readers_lend_much_and_wait_for_nothing(plans_ahead: bool) -> None:
    world, work_s = read_to(plans_ahead=plans_ahead)
    reader = world.done[0].task.reader
    assert reader is not None
    assert reader.qoe == pytest.approx(1.0)
    assert work_s > 2 * read_to(reads=False)[1]
    assert world.scheduler.lent_s == pytest.approx(work_s, rel=0.1)


def answered_s(units: int) -> float:
    """Return the seconds in which answers to four readers are made, one after the other, beside so many units."""
    world = World(scheduler_of(tbt_slowdown=1.0, idle_quantum_ms=200.0, finetune_max_wait_s=1e4), resources(), Device())
    if units:
        world.teach(64, [Unit("layer", 64)] * units)
    for number in range(4):
        life = world.ask(100, 100)
        life.task.reader = Reader(PACE, ideal_s=world.now + 2.0)
        while len(world.done) <= number:
            world.step()
    return world.now


def test_answers_take_up_to_three_times_as_long_for_what_their_readers_lend() -> None:
    assert 2.0 < answered_s(10_000) / answered_s(0) < 3.05


def test_without_a_reserve_all_that_a_reader_has_in_hand_is_lent() -> None:
    lent = []
    for reserve_s in (0.0, 1.0):
        scheduler = scheduler_of(reader_reserve_s=reserve_s, idle_quantum_ms=1000.0, tbt_slowdown=1.0)
        add_lesson(scheduler, 9)
        add_reader(scheduler, 1, ahead_s=1.1)
        lent.append(granted(scheduler.plan(0.0, resources()))[9][1])
    assert lent[0] > 4 * lent[1] > 0
