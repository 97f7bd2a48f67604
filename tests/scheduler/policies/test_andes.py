"""Andes: who is served where memory is short, and who gives way."""

from __future__ import annotations

import math
import random
from itertools import combinations

import pytest

from edged.scheduler.policies.andes.knapsack import Contender, batch_sizes, contest, fewest, pack
from edged.scheduler.reader import Reader
from edged.scheduler.scheduler import Scheduler
from edged.scheduler.task import Kind, ServingTask
from tests.scheduler.policies.test_policies import PAGE, add_decode, granted, resources
from tests.scheduler.test_scheduler import scheduler_of
from tests.scheduler.test_simulation import world_of
from tests.scheduler.world import Life, World

PACE = 5.0


def packed(gains: list[float], needs: list[int], pages: int, most: int) -> list[int]:
    """Whom the knapsack serves, of contenders in the order of gain per page."""
    order = sorted(range(len(gains)), key=lambda one: -gains[one] / needs[one])
    return pack(order, gains, needs, pages, most)


def contender(task_id: int, pages: int, dry_s: float = 0.0, starts_s: float = 0.0) -> Contender:
    return Contender(ServingTask(task_id, Kind.DECODE, 0.0), Reader(PACE, ideal_s=dry_s), pages, starts_s)


class TestKnapsack:
    """The choice of the served, and of the victims."""

    def test_it_comes_near_the_best_of_all_choices(self) -> None:
        draw, shares = random.Random(0), []
        for _ in range(150):
            count = draw.randint(1, 11)
            gains, needs = [draw.random() ** 3 for _ in range(count)], [draw.randint(1, 40) for _ in range(count)]
            pages, most = draw.randint(1, 90), draw.randint(1, 11)
            served = packed(gains, needs, pages, most)
            assert sum(needs[one] for one in served) <= pages
            assert len(served) <= most
            choices = (choice for size in range(most + 1) for choice in combinations(range(count), size))
            fitting = [choice for choice in choices if sum(needs[one] for one in choice) <= pages]
            best = max(sum(gains[one] for one in choice) for choice in fitting)
            shares.append(sum(gains[one] for one in served) / best if best else 1.0)
        assert min(shares) >= 0.5
        assert sum(shares) / len(shares) > 0.96

    def test_one_that_does_not_fit_is_passed_over(self) -> None:
        assert packed([0.4, 0.9, 0.3], [2, 9, 4], 8, 9) == [0, 2]

    def test_one_that_gains_more_than_all_others_together_goes_first(self) -> None:
        assert packed([0.2, 0.9], [1, 10], 10, 9) == [1]

    def test_a_contest_is_won_by_gain_per_page_and_of_equals_by_who_is_there_and_runs_dry_first(self) -> None:
        fed, empty, large = contender(1, 4, dry_s=30.0), contender(2, 4), contender(3, 8)
        fuller, waits = contender(4, 4, dry_s=60.0), contender(5, 4, starts_s=0.5)
        ranked, chosen, size = contest([fuller, fed, waits, large, empty], 16, 9, lambda size: 0.1, 0.0, 5.0)
        assert [one.task.task_id for one, _ in ranked] == [2, 5, 3, 1, 4]
        assert {task.task_id for task in chosen} == {2, 5, 3}
        assert size == math.inf

    def test_gains_of_a_contest_are_those_of_each_reader(self) -> None:
        some = [contender(i, 1 + i % 3, dry_s=0.5 * i, starts_s=0.2 * (i % 4)) for i in range(20)]
        fast, slow = (contest(some, 10, 20, token_s, 1.0, 5.0)[0] for token_s in (lambda _: 0.01, lambda _: 0.4))
        for rate, ranked in ((100.0, fast), (2.5, slow)):
            for one, gained in ranked:
                assert gained == pytest.approx(one.reader.gain(1.0, 5.0, one.starts_s, rate), abs=1e-9)

    def test_victims_are_the_lowest_and_no_more_than_needed(self) -> None:
        lowest = [contender(1, 1), contender(2, 2), contender(3, 6), contender(4, 9)]
        assert fewest(lowest, 6, 0) == [lowest[2]]
        assert fewest(lowest, 7, 0) == [lowest[0], lowest[2]]
        assert fewest(lowest, 0, 0) == []
        assert fewest(lowest, 0, 1) == [lowest[0]]
        assert fewest(lowest, 19, 0) is None

    def test_batches_that_cannot_be_or_that_nobody_needs_so_small_are_not_tried(self) -> None:
        needs = [5, 1, 3, 2, 4]
        assert list(batch_sizes(needs, 10, 9, lambda size: 0.1 * size, 0.25)) == [4, 3, 2]
        assert list(batch_sizes(needs, 10, 9, lambda size: 0.1 * size, 1.0)) == [4]
        assert list(batch_sizes(needs, 10, 2, lambda size: 0.1 * size, 0.01)) == [2, 1]
        assert list(batch_sizes(needs, 0, 9, lambda size: 0.1 * size, 1.0)) == []


@pytest.fixture
def scheduler() -> Scheduler:
    """A scheduler by Andes."""
    return scheduler_of(policy="andes")


def add_answer(
    scheduler: Scheduler, task_id: int, ahead_s: float, pages: int = 20, preemptions: int = 0
) -> ServingTask:
    """A decode, in the order of its id, whose reader has text for `ahead_s` from 10 on."""
    context = pages * PAGE - 1
    task = ServingTask(task_id, Kind.DECODE, 0.1 * task_id, context=context, held_pages=pages, capacity=pages * PAGE)
    task.reader, task.preemptions = Reader(PACE, ideal_s=10.0 + ahead_s), preemptions
    scheduler.add(task, 10.0)
    return task


def add_question(
    scheduler: Scheduler, task_id: int, tokens: int, waited_s: float = 1.0, reads: bool = True
) -> ServingTask:
    task = ServingTask(task_id, Kind.PREFILL, 10.0 - waited_s, num_tokens=tokens)
    task.reader = Reader(PACE, ideal_s=task.arrival_s + 1.0) if reads else None
    scheduler.add(task, 10.0)
    return task


def full(scheduler: Scheduler, *ahead_s: float) -> list[ServingTask]:
    """Answers that leave next to no page, the oldest with nothing in hand."""
    return [add_answer(scheduler, number, seconds) for number, seconds in enumerate((0.0, *ahead_s), 1)]


def test_who_has_most_to_read_gives_way_to_a_prompt_for_which_there_is_no_room(scheduler: Scheduler) -> None:
    answers = full(scheduler, 1.0, 30.0, 2.0)
    add_question(scheduler, 9, 15 * PAGE)
    plan = scheduler.plan(10.0, resources(free=10, total=90))
    assert plan.preempt == [answers[2]]
    assert set(granted(plan)) == {1, 2, 4, 9}


def test_each_prompt_that_enters_has_a_victim_of_its_own(scheduler: Scheduler) -> None:
    answers = full(scheduler, 1.0, 30.0, 40.0)
    for number in (8, 9):
        add_question(scheduler, number, 15 * PAGE)
    plan = scheduler.plan(10.0, resources(free=10, total=90))
    assert set(plan.preempt) == set(answers[2:])
    assert set(granted(plan)) == {1, 2, 8, 9}


def test_of_answers_that_outgrow_the_pages_the_one_gives_way_whose_reader_gains_least_by_a_page(
    scheduler: Scheduler,
) -> None:
    answers = [add_answer(scheduler, number, 3.0, pages) for number, pages in ((1, 20), (2, 40), (3, 20))]
    for answer in answers:
        answer.context = answer.capacity
    assert scheduler.plan(10.0, resources(free=2, total=82)).preempt == [answers[1]]


def test_nobody_gives_way_where_there_is_room(scheduler: Scheduler) -> None:
    full(scheduler, 1.0, 30.0, 2.0)
    add_question(scheduler, 9, 15 * PAGE)
    plan = scheduler.plan(10.0, resources(free=200, total=280))
    assert not plan.preempt
    assert set(granted(plan)) == {1, 2, 3, 4, 9}


@pytest.mark.parametrize("ahead_s", [0.2, 10.1])
def test_nobody_gives_way_whose_reader_would_wait_for_it(scheduler: Scheduler, ahead_s: float) -> None:
    full(scheduler, ahead_s, ahead_s, ahead_s)
    add_question(scheduler, 9, 15 * PAGE)
    assert not scheduler.plan(10.0, resources(free=10, total=90)).preempt


def test_the_oldest_who_gave_way_before_and_who_are_not_read_to_keep_their_pages(scheduler: Scheduler) -> None:
    add_answer(scheduler, 1, ahead_s=30.0)
    add_answer(scheduler, 2, ahead_s=30.0, preemptions=1)
    add_decode(scheduler, 3, arrival_s=0.3, context=20 * PAGE - 1)
    add_question(scheduler, 9, 15 * PAGE)
    assert not scheduler.plan(10.0, resources(free=10, total=70)).preempt


def test_nobody_gives_way_to_a_prompt_that_nobody_reads(scheduler: Scheduler) -> None:
    full(scheduler, 30.0, 30.0, 30.0)
    add_question(scheduler, 9, 15 * PAGE, reads=False)
    assert not scheduler.plan(10.0, resources(free=10, total=90)).preempt


def test_a_slot_is_as_good_a_reason_as_pages(scheduler: Scheduler) -> None:
    answers = full(scheduler, 30.0)
    add_question(scheduler, 9, PAGE)
    plan = scheduler.plan(10.0, resources(free=900, sequences=2))
    assert plan.preempt == [answers[1]]
    assert set(granted(plan)) == {1, 9}


@pytest.mark.parametrize(("policy", "gives_way"), [("andes", False), ("andes-plain", True)])
def test_a_prompt_stays_out_whose_entry_costs_readers_more_than_it_gains(policy: str, gives_way: bool) -> None:
    scheduler = scheduler_of(policy=policy)
    full(scheduler, 0.0, 0.0, 0.0)
    # To compute it again takes seconds, in which the three wait.
    fed = add_answer(scheduler, 5, ahead_s=300.0, pages=900)
    add_question(scheduler, 9, 15 * PAGE)
    plan = scheduler.plan(10.0, resources(free=10, total=1000))
    assert (fed in plan.preempt) is gives_way


def test_an_answer_that_gave_way_comes_back_before_its_reader_has_read_all(scheduler: Scheduler) -> None:
    full(scheduler, 2.0, 30.0)
    back = ServingTask(9, Kind.PREFILL, 0.5, deadline_s=10.0, num_tokens=15 * PAGE, preemptions=1)
    back.reader = Reader(PACE, ideal_s=25.0)
    scheduler.add(back, 10.0)
    assert 9 not in granted(scheduler.plan(10.0, resources(free=10, total=70)))
    back.reader.ideal_s = 10.01
    plan = scheduler.plan(10.0, resources(free=10, total=70))
    assert 9 in granted(plan)
    assert [task.task_id for task in plan.preempt] == [3]


def test_where_the_box_is_slower_than_readers_those_with_text_in_hand_stand_still(scheduler: Scheduler) -> None:
    for number in range(1, 41):
        add_answer(scheduler, number, ahead_s=0.0 if number % 2 else 30.0, pages=4)
        scheduler.queues.tasks[number].reader.pace = 100.0  # type: ignore[union-attr]
    plan = scheduler.plan(10.0, resources())
    assert not plan.preempt
    assert set(range(1, 41, 2)) <= set(granted(plan)) < set(range(1, 41))


def burst(policy: str, plans_ahead: bool = False) -> tuple[World, list[Life]]:
    """Forty long answers within ten seconds, of which eight fit."""
    world = world_of(policy, pages=8 * 20)
    world.plans_ahead = plans_ahead
    lives: list[Life] = []
    while len(lives) < 40 or world.lives:
        while len(lives) < 40 and len(lives) * 0.25 <= world.now:
            life = world.ask(prompt=120, answer=200)
            life.task.reader = Reader(PACE, ideal_s=world.now + 1.0)
            lives.append(life)
        world.busy_again_s = len(lives) * 0.25
        world.step()
        assert world.iterations < 20_000
    return world, lives


def qoe(lives: list[Life]) -> float:
    return sum(life.task.reader.qoe for life in lives if life.task.reader) / len(lives)


@pytest.mark.parametrize("plans_ahead", [False, True])
def test_in_a_burst_readers_are_served_better_than_in_the_order_of_deadlines(plans_ahead: bool) -> None:
    _, lives = burst("andes", plans_ahead)
    assert all(life.made == 200 for life in lives)
    assert qoe(lives) > qoe(burst("mace")[1]) + 0.02
