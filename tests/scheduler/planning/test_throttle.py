"""Fine-tuning gets its share of the time and no more, whatever the policy."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edged.scheduler.cost.model import CostModel, roofline
from edged.scheduler.planning.finetune_budget import DutyCycle
from edged.scheduler.policies.registry import ROWS
from edged.scheduler.scheduler import Scheduler
from edged.scheduler.task import FinetuneTask, IterationResult, Kind, Resources, TaskOutcome, Unit
from edged.settings.load import SchedulerSettings


@given(st.sampled_from((0.25, 0.5)), st.lists(st.floats(0.001, 0.3), min_size=20, max_size=60))
def test_over_any_longer_time_the_share_holds(share: float, works: list[float]) -> None:
    throttle, now, worked = DutyCycle(), 0.0, 0.0
    throttle.share = share
    for work_s in works:
        if throttle.closed(now):
            now = throttle.opens_s(now) + 1e-9
        assert not throttle.closed(now)
        now += work_s
        worked += work_s
        throttle.settle(work_s, now)
    assert worked <= share * now + 0.1 + max(works)


def test_the_whole_time_is_never_closed_and_none_never_opens() -> None:
    throttle = DutyCycle()
    throttle.settle(100.0, 1.0)
    assert not throttle.closed(1.0)
    throttle.share = 0.0
    assert throttle.closed(1e6)
    assert math.isinf(throttle.opens_s(1.0))


PERIODIC = {"ekya", "periodic-async"}
"""They take their steps from the same list, and begin none before an interval has passed."""


@pytest.mark.parametrize("policy", [n for n, policy in ROWS.items() if policy.trains and n not in PERIODIC])
def test_no_policy_works_on_a_throttled_step_and_the_plan_says_when_it_goes_on(policy: str) -> None:
    settings = SchedulerSettings(policy=policy)
    scheduler = Scheduler(settings, CostModel(roofline(parameters=135_000_000, flops_per_s=1e11, bytes_per_s=2e10)))
    units = (Unit("layer", 16), Unit("step", 1))
    task = FinetuneTask(1, 0.0, num_tokens=0, units=units)
    scheduler.add(task, 0.0)
    room = Resources(free_pages=100, total_pages=100, page_size=16, max_tokens=256, max_sequences=8)
    plan = scheduler.plan(1.0, room)
    assert [grant.task for grant in plan.grants] == [task]
    scheduler.throttle.share = 0.5
    scheduler.complete(IterationResult([TaskOutcome(task, 0, 1, Kind.FINETUNE)], units=[(units[0], 2.0)]), 3.0)
    plan = scheduler.plan(3.0, room)
    assert plan.grants == []
    assert 3.0 < plan.resume_s <= 7.0
    assert scheduler.plan(plan.resume_s + 0.1, room).grants
