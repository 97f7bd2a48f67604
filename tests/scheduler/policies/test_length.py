"""How long prompts make an iteration of `mace`, by who may come meanwhile."""

from __future__ import annotations

import pytest

from edged.scheduler.cost.prices import Load
from edged.scheduler.policies.mace.length import LATEST
from edged.scheduler.scheduler import Scheduler
from edged.scheduler.task import Kind, ServiceClass, ServingTask
from tests.scheduler.policies.test_policies import add_decode, add_prompt, granted, resources
from tests.scheduler.test_scheduler import scheduler_of
from tests.scheduler.test_simulation import world_of
from tests.scheduler.world import Device

LONG = 4000


def seen(scheduler: Scheduler, tokens: int, count: int, candidate: bool = False) -> None:
    """Have so many requests come and go."""
    for number in range(count):
        scheduler.add(ServingTask(1000 + number, Kind.PREFILL, 0.0, num_tokens=tokens, candidate=candidate), 0.0)
        scheduler.remove(1000 + number)


def chunk_beside(scheduler: Scheduler) -> int:
    """Tokens that a long prompt gets in an iteration by itself."""
    add_prompt(scheduler, 1, LONG)
    return granted(scheduler.plan(0.0, resources()))[1][0]


def test_prompts_leave_iterations_short_where_short_requests_come() -> None:
    scheduler = scheduler_of()
    seen(scheduler, 20, LATEST)
    target_s = scheduler.targets.ttft_s(ServiceClass.INTERACTIVE, 20)
    tokens = chunk_beside(scheduler)
    assert tokens < 1024
    assert scheduler.cost.priced_s(Load(prefill_tokens=tokens)) <= target_s / 2


def test_prompts_fill_iterations_where_only_long_ones_come() -> None:
    scheduler = scheduler_of()
    seen(scheduler, LONG, LATEST)
    assert chunk_beside(scheduler) == 1024


def test_one_short_request_among_many_long_ones_makes_no_iteration_short() -> None:
    scheduler = scheduler_of()
    seen(scheduler, 20, 1)
    seen(scheduler, LONG, LATEST - 1)
    assert chunk_beside(scheduler) == 1024


def test_what_came_long_ago_counts_no_more() -> None:
    scheduler = scheduler_of()
    seen(scheduler, 20, LATEST)
    seen(scheduler, LONG, LATEST)
    assert chunk_beside(scheduler) == 1024


def test_candidates_are_no_requests() -> None:
    scheduler = scheduler_of()
    seen(scheduler, 20, LATEST, candidate=True)
    assert chunk_beside(scheduler) == 1024


@pytest.mark.parametrize("policy", ["mace-paper", "fcfs"])
def test_other_rows_fill_their_iterations_as_before(policy: str) -> None:
    scheduler = scheduler_of(policy=policy)
    seen(scheduler, 20, LATEST)
    assert chunk_beside(scheduler) == 1024


def test_prices_and_targets_of_zero_bound_nothing() -> None:
    scheduler = scheduler_of(ttft_floor_ms=1e-9, ttft_factor=1e-9)
    add_decode(scheduler, 2)
    seen(scheduler, 20, LATEST)
    assert chunk_beside(scheduler) > 0


def test_short_requests_amid_a_burst_of_long_ones_are_in_time() -> None:
    """As many as the same load has in time where iterations are as long as they can be, and more."""

    def in_time(policy: str) -> int:
        world = world_of(policy, pages=20_000, max_tokens=1024, device=Device(pass_s=0.02, token_s=0.0005))
        asked = []
        for number in range(60):
            life = world.ask(1500 if number % 3 == 0 else 20, 3)
            asked.append((life, life.task.deadline_s))
            until = world.now + 0.25
            while world.lives and world.now < until:
                world.step()
            world.now = max(world.now, until)
        while world.lives:
            world.step()
        return sum(life.token_times[0] <= due_s for life, due_s in asked)

    assert in_time("mace") > in_time("mace-paper")
