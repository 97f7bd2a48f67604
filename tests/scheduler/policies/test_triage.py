"""Who goes next when not all can be in time."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edged.scheduler.policies.mace.patience import PATIENCE, TARGETS, Patience
from edged.scheduler.policies.mace.triage import LATE, PatientAdmission
from edged.scheduler.task import IterationResult, Kind, ServingTask, TaskOutcome
from tests.scheduler.policies.test_policies import PAGE, add_decode, add_prompt, granted, resources
from tests.scheduler.test_scheduler import scheduler_of
from tests.scheduler.test_simulation import world_of
from tests.scheduler.world import Device


def order_at(now: float, *prompts: tuple[int, float, float]) -> list[int]:
    """Numbers in the order of their chunks of prompts with (tokens, arrival, deadline)."""
    scheduler = scheduler_of()
    for number, (tokens, arrival_s, deadline_s) in enumerate(prompts):
        scheduler.add(ServingTask(number, Kind.PREFILL, arrival_s, num_tokens=tokens, deadline_s=deadline_s), arrival_s)
    return list(granted(scheduler.plan(now, resources())))


def test_where_all_can_be_in_time_the_earliest_deadline_goes_first() -> None:
    assert order_at(0.0, (30, 0.0, 60.0), (10, 0.0, 70.0)) == [0, 1]


def test_where_not_all_can_be_in_time_the_shortest_goes_first() -> None:
    token_s = scheduler_of().cost.token_s
    assert order_at(0.0, (300, 0.0, 310 * token_s), (100, 0.0, 320 * token_s)) == [1, 0]


def test_a_late_prompt_goes_after_one_that_can_be_in_time() -> None:
    assert order_at(1.0, (100, 0.0, 0.9), (100, 0.0, 60.0)) == [1, 0]


def test_a_prompt_is_late_as_soon_as_its_own_forward_would_end_too_late() -> None:
    assert order_at(0.9, (300, 0.0, 0.9 + 1e-6), (100, 0.0, 60.0)) == [1, 0]


def test_one_that_has_been_late_for_long_goes_first() -> None:
    assert order_at(TARGETS * 0.9 - 0.01, (100, 0.0, 0.9), (100, 0.0, 60.0)) == [1, 0]
    assert order_at(TARGETS * 0.9 + 0.01, (100, 0.0, 0.9), (100, 0.0, 60.0)) == [0, 1]


def test_how_long_a_late_prompt_waits_is_bounded_by_what_is_before_it_and_not_by_its_length() -> None:
    patience, token_s = Patience(), 0.01
    prompts = [ServingTask(number, Kind.PREFILL, 0.0, num_tokens=100, deadline_s=0.5) for number in range(20)]
    for prompt in prompts:
        patience.arrived(prompt, token_s)
    assert patience.overdue_s[0] == TARGETS * 0.5
    assert patience.overdue_s[19] == pytest.approx(PATIENCE * 1900 * token_s)
    for prompt in prompts:
        patience.completed(IterationResult([TaskOutcome(prompt, 100, 0, Kind.DECODE)], 0.5), 0.0)
    long = ServingTask(20, Kind.PREFILL, 60.0, num_tokens=4000, deadline_s=80.0)
    patience.arrived(long, token_s)
    assert patience.overdue_s[20] == pytest.approx(60.0 + PATIENCE * 1900 * token_s), "the latest waits count"


def test_what_the_cache_had_of_a_prompt_and_hearing_of_it_again_count_for_no_wait() -> None:
    patience, token_s = Patience(), 0.01
    cached = ServingTask(1, Kind.PREFILL, 0.0, num_tokens=4000, deadline_s=0.5)
    for _ in range(2):
        patience.arrived(cached, token_s)
    patience.completed(IterationResult([TaskOutcome(cached, 10, 0, Kind.DECODE)], 0.1), 0.0)
    later = ServingTask(2, Kind.PREFILL, 1.0, num_tokens=10, deadline_s=1.5)
    patience.arrived(later, token_s)
    assert patience.overdue_s[2] == pytest.approx(1.0 + TARGETS * 0.5)


def test_an_answer_that_lost_its_pages_goes_first() -> None:
    scheduler = scheduler_of()
    task = add_prompt(scheduler, 1, 20)
    scheduler.plan(0.0, resources())
    scheduler.complete(IterationResult([TaskOutcome(task, 20, 0, Kind.DECODE)], 0.02), 0.02)
    scheduler.restart(task, 21, 0.1)
    add_prompt(scheduler, 2, 10, arrival_s=0.1)
    assert list(granted(scheduler.plan(5.0, resources()))) == [1, 2]


def test_an_answer_whose_prompt_was_late_goes_first_too_if_it_loses_its_pages() -> None:
    scheduler = scheduler_of()
    task = add_prompt(scheduler, 1, 20)
    now = task.deadline_s + 0.1
    scheduler.plan(now, resources())
    assert scheduler.queues.flows == {LATE: [task]}
    scheduler.complete(IterationResult([TaskOutcome(task, 20, 0, Kind.DECODE)], 0.02), now)
    for number in range(2, 80):
        add_prompt(scheduler, number, 10, arrival_s=now)
    scheduler.plan(now, resources(free=0))
    scheduler.restart(task, 21, now)
    assert next(iter(granted(scheduler.plan(now, resources())))) == 1


def test_a_task_that_did_not_come_as_a_prompt_has_a_place_among_late_ones() -> None:
    scheduler = scheduler_of()
    answered = add_decode(scheduler, 1)
    scheduler.restart(answered, 40, 0.1)
    answered.deadline_s = 0.2
    add_prompt(scheduler, 2, 10, arrival_s=0.1)
    for now in (0.3, 5.0):
        assert set(granted(scheduler.plan(now, resources()))) == {1, 2}
    assert not scheduler.degraded


def test_late_prompts_do_not_make_the_chunks_of_others_longer() -> None:
    scheduler = scheduler_of(ttft_floor_ms=1.0)
    add_decode(scheduler, 1, now=10.0)
    add_prompt(scheduler, 2, 900)
    assert granted(scheduler.plan(10.0, resources()))[2][0] < 900
    paper = scheduler_of(policy="mace-paper", ttft_floor_ms=1.0)
    add_decode(paper, 1, now=10.0)
    add_prompt(paper, 2, 900)
    assert granted(paper.plan(10.0, resources()))[2][0] == 900


def test_a_large_prompt_that_lacks_pages_is_overtaken_until_it_goes_first() -> None:
    scheduler = scheduler_of(ttft_floor_ms=1000.0, ttft_factor=0.1)
    add_decode(scheduler, 1)
    add_prompt(scheduler, 2, 40 * PAGE)
    add_prompt(scheduler, 3, 2 * PAGE, arrival_s=0.2)
    assert 3 in granted(scheduler.plan(TARGETS - 0.1, resources(free=30, total=100)))
    assert 3 not in granted(scheduler.plan(PatientAdmission.patience + 0.1, resources(free=30, total=100)))


@settings(max_examples=15, deadline=None)
@given(st.integers(100, 2000), st.integers(5, 40), st.sampled_from([2, 8, 64]), st.booleans())
def test_nobody_waits_without_bound_beside_short_prompts_without_end(
    tokens: int, short: int, sequences: int, ahead: bool
) -> None:
    world = world_of(max_sequences=sequences, device=Device(pass_s=0.02, token_s=0.0005), ttft_floor_ms=50.0)
    world.plans_ahead = ahead
    for _ in range(20):
        world.ask(short, answer=2)
    long = world.ask(tokens, answer=2)
    target_s = long.task.deadline_s
    behind_s = 0.0
    while not long.made:
        while len(world.lives) < 20:
            world.ask(short, answer=2)
        world.step()
        behind_s = max(behind_s, world.longest_iteration_s)
        # By then it is first; its own chunks, and those of the few that were overdue before it, are left.
        assert world.now < PATIENCE * target_s + 21 * (tokens + 20 * short) * 0.0005 + 200 * behind_s
