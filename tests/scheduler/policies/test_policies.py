"""What the policies decide, one decision at a time."""

from __future__ import annotations

import inspect

import pytest

from edged.scheduler.policies import base
from edged.scheduler.policies.registry import ROWS
from edged.scheduler.scheduler import Scheduler
from edged.scheduler.task import FinetuneTask, IterationResult, Kind, Plan, Resources, ServingTask, TaskOutcome, Unit
from tests.scheduler.test_scheduler import scheduler_of

PAGE = 16
UNITS = tuple([Unit("layer", 64)] * 200)


def resources(free: int = 1000, tokens: int = 1024, sequences: int = 64, total: int = 1000) -> Resources:
    return Resources(free, total, PAGE, tokens, sequences)


def add_decode(
    scheduler: Scheduler, task_id: int, arrival_s: float = 0.0, context: int = 63, now: float = 0.0
) -> ServingTask:
    """A decode whose pages are full when `context` is a multiple of the page size."""
    pages = -(-context // PAGE)
    task = ServingTask(task_id, Kind.DECODE, arrival_s, context=context, held_pages=pages, capacity=pages * PAGE)
    scheduler.add(task, now)
    return task


def add_prompt(scheduler: Scheduler, task_id: int, tokens: int, arrival_s: float = 0.0) -> ServingTask:
    task = ServingTask(task_id, Kind.PREFILL, arrival_s, num_tokens=tokens)
    scheduler.add(task, arrival_s)
    return task


def add_lesson(
    scheduler: Scheduler, task_id: int, tokens: int = 0, now: float = 0.0, loss: float = 0.69
) -> FinetuneTask:
    """A fine-tune task; without `tokens` its forward is done and its pages are held."""
    task = FinetuneTask(task_id, now, num_tokens=tokens, units=UNITS, loss=loss)
    if not tokens:
        task.context, task.held_pages, task.capacity = 320, 20, 320
    scheduler.add(task, now)
    return task


def granted(plan: Plan) -> dict[int, tuple[int, int]]:
    return {grant.task.task_id: (grant.num_tokens, grant.units) for grant in plan.grants}


every = pytest.mark.parametrize("policy", ROWS)


@every
def test_a_policy_is_short(policy: str) -> None:
    row = ROWS[policy]
    for part in (row.order, row.admission, row.finetune_share, row.fill):
        module = inspect.getmodule(part)
        assert module is not None
        assert module is base or len(inspect.getsource(module).splitlines()) < 150


@every
def test_every_decode_runs_in_every_iteration(policy: str) -> None:
    scheduler = scheduler_of(policy=policy)
    for task_id in range(20):
        add_decode(scheduler, task_id)
    add_prompt(scheduler, 50, 5000)
    plan = scheduler.plan(0.0, resources())
    assert [granted(plan)[task_id] for task_id in range(20)] == [(1, 0)] * 20


@every
def test_a_prompt_enters_only_if_all_of_it_finds_pages(policy: str) -> None:
    scheduler = scheduler_of(policy=policy)
    add_prompt(scheduler, 1, 20 * PAGE)
    add_decode(scheduler, 2)
    assert 1 not in granted(scheduler.plan(0.0, resources(free=20, total=100)))
    assert 1 in granted(scheduler.plan(0.0, resources(free=21, total=100)))


@every
def test_pages_that_were_promised_to_a_prompt_under_way_are_not_promised_again(policy: str) -> None:
    scheduler = scheduler_of(policy=policy, slo_ms=5000.0)
    task = add_prompt(scheduler, 1, 20 * PAGE)
    scheduler.complete(IterationResult([TaskOutcome(task, PAGE, 0, Kind.PREFILL)], 0.02), 0.02)
    task.held_pages, task.capacity = 1, PAGE
    add_prompt(scheduler, 2, 10 * PAGE, arrival_s=0.03)
    assert set(granted(scheduler.plan(0.03, resources(free=28, tokens=1000)))) == {1}
    assert set(granted(scheduler.plan(0.03, resources(free=80, tokens=1000)))) == {1, 2}


@every
def test_no_more_sequences_run_than_allowed(policy: str) -> None:
    scheduler = scheduler_of(policy=policy)
    add_decode(scheduler, 1)
    for task_id in range(2, 9):
        add_prompt(scheduler, task_id, 10)
    assert len(scheduler.plan(0.0, resources(sequences=4)).grants) == 4


@every
def test_when_the_tokens_do_not_suffice_the_decodes_that_are_due_first_go_first(policy: str) -> None:
    scheduler = scheduler_of(policy=policy)
    tasks = [add_decode(scheduler, task_id) for task_id in range(6)]
    for task in tasks[:3]:
        task.deadline_s = 9.0
    assert set(granted(scheduler.plan(0.0, resources(tokens=3)))) == {3, 4, 5}


@every
def test_a_step_whose_streams_lack_pages_gets_nothing_and_takes_nothing(policy: str) -> None:
    scheduler = scheduler_of(policy=policy)
    # Of tokens under way in several streams, some in pages that are not there yet: see `FinetuneTask.capacity`.
    lesson = FinetuneTask(9, 0.0, num_tokens=100, units=UNITS, context=64, held_pages=4, capacity=0)
    scheduler.add(lesson, 0.0)
    add_decode(scheduler, 1, arrival_s=0.5)
    for now in (1.0, 100.0):
        plan = scheduler.plan(now, resources(free=0))
        assert all(tokens > 0 or units > 0 for tokens, units in granted(plan).values())


class TestPreemption:
    """When decodes find no page for their next token."""

    @every
    def test_the_latest_arrival_gives_way(self, policy: str) -> None:
        scheduler = scheduler_of(policy=policy)
        tasks = [add_decode(scheduler, task_id, arrival_s=float(task_id), context=64) for task_id in range(3)]
        plan = scheduler.plan(5.0, resources(free=1))
        assert plan.preempt == [tasks[2]]
        assert set(granted(plan)) == {0, 1}
        assert plan.pages == 2

    def test_fine_tuning_gives_way_before_any_request(self) -> None:
        scheduler = scheduler_of()
        add_decode(scheduler, 1, context=64)
        lesson = add_lesson(scheduler, 9)
        plan = scheduler.plan(0.0, resources(free=0))
        assert plan.preempt == [lesson]
        assert set(granted(plan)) == {1}

    @every
    def test_the_oldest_sequence_never_gives_way(self, policy: str) -> None:
        scheduler = scheduler_of(policy=policy)
        add_decode(scheduler, 1, context=64)
        plan = scheduler.plan(0.0, resources(free=0))
        assert not plan.preempt
        assert not plan.grants

    @every
    def test_the_oldest_prompt_under_way_gets_its_page_before_younger_decodes(self, policy: str) -> None:
        scheduler = scheduler_of(policy=policy)
        task = add_prompt(scheduler, 1, 100)
        scheduler.complete(IterationResult([TaskOutcome(task, 64, 0, Kind.PREFILL)], 0.02), 0.02)
        task.held_pages, task.capacity = 4, 64
        younger = add_decode(scheduler, 2, arrival_s=1.0, context=64)
        plan = scheduler.plan(2.0, resources(free=0))
        assert plan.preempt == [younger]
        assert granted(plan)[1][0] > 0

    @every
    def test_no_more_give_way_than_must(self, policy: str) -> None:
        scheduler = scheduler_of(policy=policy)
        tasks = [add_decode(scheduler, task_id, arrival_s=float(task_id), context=PAGE) for task_id in range(4)]
        plan = scheduler.plan(5.0, resources(free=1))
        assert plan.preempt == [tasks[3], tasks[2]]
        assert set(granted(plan)) == {0, 1}

    @every
    def test_nobody_enters_on_the_pages_that_were_just_taken_from_another(self, policy: str) -> None:
        scheduler = scheduler_of(policy=policy)
        for task_id in range(3):
            add_decode(scheduler, task_id, arrival_s=float(task_id), context=640)
        add_prompt(scheduler, 7, 16, arrival_s=4.0)
        assert 7 not in granted(scheduler.plan(5.0, resources(free=0)))

    @every
    def test_a_prompt_that_waits_for_pages_which_other_waiting_ones_hold_gets_them(self, policy: str) -> None:
        scheduler = scheduler_of(policy=policy)
        add_prompt(scheduler, 1, 20 * PAGE)
        holder = ServingTask(
            2, Kind.PREFILL, 1.0, num_tokens=15 * PAGE, context=10 * PAGE, held_pages=10, capacity=10 * PAGE
        )
        scheduler.add(holder, 1.0)
        plan = scheduler.plan(2.0, resources(free=12, total=22))
        assert plan.preempt == [holder]
        assert set(granted(plan)) == {1}


@every
def test_pages_go_to_the_oldest_decodes_first_whoever_decoded_first(policy: str) -> None:
    scheduler = scheduler_of(policy=policy)
    for task_id, arrival_s in ((1, 3.0), (2, 1.0), (3, 2.0)):
        add_decode(scheduler, task_id, arrival_s=arrival_s)
    assert list(granted(scheduler.plan(5.0, resources()))) == [2, 3, 1]


class TestFcfs:
    """The baseline."""

    def test_it_serves_in_the_order_of_arrival(self) -> None:
        scheduler = scheduler_of(policy="fcfs")
        add_prompt(scheduler, 1, 900, arrival_s=0.0)
        add_prompt(scheduler, 2, 10, arrival_s=0.1)
        add_prompt(scheduler, 3, 200, arrival_s=0.2)
        assert granted(scheduler.plan(0.2, resources())) == {1: (900, 0), 2: (10, 0), 3: (114, 0)}

    def test_it_never_trains(self) -> None:
        scheduler = scheduler_of(policy="fcfs")
        add_lesson(scheduler, 9)
        assert scheduler.plan(100.0, resources()).grants == []
