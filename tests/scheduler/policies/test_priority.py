"""MACE's priorities: who stands above whom, and from when on."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edged.scheduler.planning.finetune_budget import FinetuneDeficit, SlowdownBudget
from edged.scheduler.policies.mace.priority import Priorities
from edged.scheduler.task import FinetuneTask
from edged.settings.load import SchedulerSettings

waits = st.floats(0.0, 1e4)


def derived(wait_s: float = 0.5, gamma: float = 0.1) -> Priorities:
    return Priorities(SchedulerSettings(finetune_max_wait_s=wait_s, options={"gamma": gamma}))


def test_on_arrival_a_decode_stands_above_a_prefill_above_fine_tuning() -> None:
    priorities = derived()
    assert priorities.decode(0.0) > priorities.prefill(0.0) > priorities.finetune(0.0, 0.69)


@settings(deadline=None)
@given(st.floats(0.01, 100.0))
def test_fine_tuning_rises_faster_than_prefill_faster_than_decode(wait_s: float) -> None:
    priorities = derived(wait_s)
    waited = priorities.decode(wait_s), priorities.prefill(wait_s), priorities.finetune(wait_s, 0.0)
    fresh = priorities.decode(0.0), priorities.prefill(0.0), priorities.finetune(0.0, 0.0)
    decode, prefill, finetune = (late - early for late, early in zip(waited, fresh, strict=True))
    assert finetune > prefill > decode > 0.0


@settings(deadline=None)
@given(st.floats(0.01, 100.0), waits, st.floats(0.0, 5.0), st.floats(0.0, 2.0))
def test_after_the_longest_wait_fine_tuning_outranks_all_serving_however_old(
    wait_s: float, age_s: float, loss: float, more: float
) -> None:
    priorities = derived(wait_s)
    own = priorities.finetune(wait_s * (1.0 + 1e-9 + more), loss)
    assert own >= priorities.decode(age_s)
    assert own >= priorities.prefill(age_s)


@settings(deadline=None)
@given(st.floats(allow_nan=True, allow_infinity=True))
def test_no_loss_alone_lifts_fine_tuning_above_a_request_that_just_arrived(loss: float) -> None:
    own = derived(gamma=100.0).finetune(0.0, loss)
    assert math.isfinite(own)
    assert own <= derived().prefill(0.0)


def test_of_two_pairs_the_worse_aligned_goes_first() -> None:
    assert derived().finetune(0.1, 2.0) > derived().finetune(0.1, 0.1)


def arrears_at(now: float, wait_s: float = 1.0) -> FinetuneDeficit:
    arrears = FinetuneDeficit()
    arrears.configure(SchedulerSettings(finetune_max_wait_s=wait_s, finetune_min_share=0.1))
    arrears.start(now)
    return arrears


def test_a_sliver_of_work_pays_for_as_much_waiting_as_its_share() -> None:
    arrears, task = arrears_at(10.0), FinetuneTask(1, 10.0)
    arrears.pay(task, 0.01, 11.0, prepaid=False)
    assert arrears.wait_s(11.0) == pytest.approx(0.9)
    arrears.pay(task, 0.09, 11.0, prepaid=False)
    assert arrears.wait_s(11.0) == pytest.approx(0.0)


def test_time_without_any_fine_tune_task_is_no_wait_but_what_was_owed_is_kept() -> None:
    arrears = arrears_at(10.0)
    arrears.stop(10.5)
    arrears.start(99.0)
    assert arrears.wait_s(99.25) == pytest.approx(0.75)


def test_a_debt_does_not_grow_without_end() -> None:
    assert arrears_at(0.0, wait_s=0.5).wait_s(1e6) == 5.5


@pytest.mark.parametrize(
    ("slowdown", "load", "share"),
    [(1.0, 0.5, 0.0), (1.05, 0.5, 0.0122), (3.0, 0.2, 0.2286), (3.0, 0.5, 0.25), (3.0, 0.8, 0.1231), (3.0, 1.0, 0.0)],
)
def test_what_may_be_taken_beside_serving_falls_with_the_load(slowdown: float, load: float, share: float) -> None:
    # Of busy time f = (1 - 1 / slow-down) * (1 - load), so f / (1 - f) of the time that serves.
    budget, taken_s = SlowdownBudget(), 0.0
    budget.configure(slowdown, max_saved_s=0.05)
    for step in range(2000):
        spent_s = 0.05 if budget.left_s > 0.0 else 0.0
        budget.settle(0.1 * load, 0.1 * load, spent_s, 0.1 * step)
        taken_s += spent_s * (step >= 1000)
    assert taken_s / 100.0 == pytest.approx(share, abs=0.01)


def test_a_reload_keeps_what_was_overdrawn() -> None:
    budget = SlowdownBudget()
    budget.configure(3.0)
    assert budget.left_s == pytest.approx(20 / 3)
    budget.settle(0.0, 0.0, 10.0, 0.0)
    budget.configure(1.05)
    assert budget.left_s == pytest.approx(-10 / 3)


def test_work_that_was_prepaid_puts_off_the_next_wait() -> None:
    arrears = arrears_at(0.0)
    arrears.pay(FinetuneTask(1, 0.0), 0.2, 0.0, prepaid=True)
    assert arrears.wait_s(2.0) == 0.0
    assert arrears.wait_s(3.0) == pytest.approx(1.0)
