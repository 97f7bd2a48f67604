"""A task's life in the scheduler: added, advanced, preempted, retired."""

from __future__ import annotations

import math
import sys

import pytest

from edged.scheduler.cost.model import CostModel, roofline
from edged.scheduler.cost.prices import Load
from edged.scheduler.policies.base import Policy
from edged.scheduler.policies.phased import FCFS
from edged.scheduler.policies.registry import ROWS
from edged.scheduler.scheduler import Scheduler
from edged.scheduler.task import (
    FinetuneTask,
    IterationResult,
    Kind,
    Resources,
    ServiceClass,
    ServingTask,
    TaskOutcome,
    Unit,
)
from edged.settings.load import SchedulerSettings

AMPLE = Resources(free_pages=1000, total_pages=1000, page_size=16, max_tokens=1024, max_sequences=64)


def settings_of(**settings: object) -> SchedulerSettings:
    """Settings, with the options of policies beside them."""
    own = {name: settings.pop(name) for name in SchedulerSettings.model_fields.keys() & settings.keys()}
    return SchedulerSettings.model_validate({"options": settings, **own})


def scheduler_of(**settings: object) -> Scheduler:
    cost = CostModel(roofline(parameters=135_000_000, flops_per_s=2e11, bytes_per_s=2e10))
    return Scheduler(settings_of(**settings), cost)


def prompt(task_id: int = 1, tokens: int = 100, arrival_s: float = 0.0) -> ServingTask:
    return ServingTask(task_id, Kind.PREFILL, arrival_s, num_tokens=tokens)


def lesson(task_id: int = 9, tokens: int = 100) -> FinetuneTask:
    return FinetuneTask(task_id, 0.0, num_tokens=tokens, units=(Unit("layer", 32), Unit("step", 0)))


def test_a_prompt_is_due_a_multiple_of_its_own_forward_after_it_arrived() -> None:
    scheduler = scheduler_of(ttft_factor=5.0, ttft_floor_ms=1.0)
    task = prompt(tokens=500, arrival_s=3.0)
    scheduler.add(task, now=3.5)
    assert task.deadline_s == pytest.approx(3.0 + 5.0 * scheduler.cost.prompt_s(500))


def test_no_target_is_tighter_than_its_floor() -> None:
    scheduler = scheduler_of(ttft_floor_ms=60_000.0, tbt_floor_ms=7_000.0)
    task = prompt()
    scheduler.add(task, now=0.0)
    assert task.deadline_s == 60.0
    scheduler.complete(IterationResult([TaskOutcome(task, 100, 0, Kind.DECODE)], 0.1), now=1.0)
    assert task.deadline_s == 8.0


def test_requests_of_the_batch_class_are_held_to_their_own_targets() -> None:
    scheduler = scheduler_of(ttft_floor_ms=100.0)
    batch, interactive = prompt(1), prompt(2)
    batch.service = ServiceClass.BATCH
    for task in (batch, interactive):
        scheduler.add(task, now=0.0)
    ttft_s = max(5.0, 50.0 * scheduler.cost.prompt_s(100))
    assert batch.deadline_s == ttft_s > interactive.deadline_s
    outcomes = [TaskOutcome(task, 100, 0, Kind.DECODE) for task in (batch, interactive)]
    scheduler.complete(IterationResult(outcomes, 0.1), now=1.0)
    assert batch.deadline_s >= 1.5 > interactive.deadline_s


def test_interactive_prompts_are_computed_before_those_of_the_batch_class() -> None:
    scheduler = scheduler_of()
    batch, interactive = prompt(1, tokens=2000), prompt(2, tokens=1024, arrival_s=0.1)
    batch.service = ServiceClass.BATCH
    scheduler.add(batch, now=0.0)
    scheduler.add(interactive, now=0.1)
    assert [grant.task for grant in scheduler.plan(0.1, AMPLE).grants] == [interactive]


def test_a_target_that_a_lone_request_misses_is_named_with_the_way_out() -> None:
    cost = scheduler_of().cost
    alone_ms = cost.forward_s(Load(decodes=1)) * 1e3
    assert scheduler_of().targets.impossible() == []
    assert scheduler_of(tbt_factor=0.5, tbt_floor_ms=alone_ms * 1.01).targets.impossible() == []
    (problem,) = scheduler_of(tbt_factor=0.5, tbt_floor_ms=alone_ms * 0.5).targets.impossible()
    assert "TBT target of interactive requests" in problem
    assert "raise scheduler.tbt_factor" in problem
    (problem,) = scheduler_of(ttft_factor=0.1, ttft_floor_ms=0.001).targets.impossible()
    assert "scheduler.ttft_floor_ms" in problem


def test_a_deadline_that_was_given_is_kept() -> None:
    task = prompt()
    task.deadline_s = 0.125
    scheduler_of().add(task, now=0.0)
    assert task.deadline_s == 0.125


def test_a_prompt_becomes_a_decode_and_each_token_gets_a_new_deadline() -> None:
    scheduler = scheduler_of(tbt_factor=2.0, tbt_floor_ms=0.001)
    task = prompt(tokens=100)
    scheduler.add(task, now=0.0)
    scheduler.complete(IterationResult([TaskOutcome(task, 60, 0, Kind.PREFILL)], 0.05), now=1.0)
    assert (task.kind, task.num_tokens, task.context) == (Kind.PREFILL, 40, 60)
    scheduler.complete(IterationResult([TaskOutcome(task, 40, 0, Kind.DECODE)], 0.05), now=2.0)
    assert (task.kind, task.num_tokens, task.context) == (Kind.DECODE, 1, 100)
    scheduler.complete(IterationResult([TaskOutcome(task, 1, 0, Kind.DECODE)], 0.02), now=3.0)
    assert (task.kind, task.num_tokens, task.context) == (Kind.DECODE, 1, 101)
    assert task.deadline_s == pytest.approx(3.0 + 2.0 * scheduler.cost.forward_s(Load(decodes=1, context=101)))
    scheduler.complete(IterationResult([TaskOutcome(task, 1, 0, None)], 0.02), now=4.0)
    assert sum(scheduler.counts().values()) == 0
    assert scheduler.plan(5.0, AMPLE).grants == []


def test_a_fine_tune_task_advances_by_tokens_then_units() -> None:
    scheduler = scheduler_of()
    task = lesson()
    scheduler.add(task, now=0.0)
    scheduler.complete(
        IterationResult([TaskOutcome(task, 100, 1, Kind.FINETUNE)], 0.05, [(Unit("layer", 32), 0.01)]), now=1.0
    )
    assert (task.num_tokens, task.context, task.next_unit) == (0, 100, 1)
    scheduler.complete(IterationResult([TaskOutcome(task, 0, 1, None)], 0.0, [(Unit("step", 0), 0.01)]), now=2.0)
    assert scheduler.counts()[Kind.FINETUNE] == 0


def test_a_preempted_sequence_starts_over_and_keeps_its_arrival() -> None:
    scheduler = scheduler_of()
    task = prompt(tokens=100, arrival_s=0.5)
    scheduler.add(task, now=0.5)
    scheduler.complete(IterationResult([TaskOutcome(task, 100, 0, Kind.DECODE)], 0.05), now=1.0)
    scheduler.restart(task, num_tokens=103, now=2.0)
    assert (task.kind, task.num_tokens, task.context, task.held_pages, task.capacity) == (Kind.PREFILL, 103, 0, 0, 0)
    assert task.arrival_s == 0.5
    assert scheduler.queues.count_waiting == 1
    (grant,) = scheduler.plan(2.0, AMPLE).grants
    assert (grant.task, grant.num_tokens) == (task, 103)


def test_a_preempted_step_starts_over_with_its_forward() -> None:
    scheduler = scheduler_of()
    task = lesson()
    scheduler.add(task, now=0.0)
    scheduler.complete(
        IterationResult([TaskOutcome(task, 100, 1, Kind.FINETUNE)], 0.05, [(Unit("layer", 32), 0.01)]), now=1.0
    )
    scheduler.restart(task, num_tokens=100, now=1.0)
    assert (task.kind, task.num_tokens, task.context, task.next_unit) == (Kind.FINETUNE, 100, 0, 0)
    assert not task.begun


def test_a_step_is_in_its_middle_between_its_groups() -> None:
    scheduler = scheduler_of()
    task = lesson()
    scheduler.add(task, now=0.0)
    assert not task.begun
    scheduler.complete(
        IterationResult([TaskOutcome(task, 100, 1, Kind.FINETUNE)], 0.05, [(Unit("layer", 32), 0.01)]), now=1.0
    )
    # As the engine does when the next group begins.
    task.num_tokens, task.context, task.next_unit = 50, 0, 0
    scheduler.update(task)
    assert task.begun


def test_a_grant_without_an_outcome_leaves_its_task_as_it_was() -> None:
    scheduler = scheduler_of()
    task = prompt(tokens=100)
    scheduler.add(task, now=0.0)
    scheduler.plan(0.0, AMPLE)
    scheduler.complete(IterationResult(), now=0.1)
    assert (task.kind, task.num_tokens, task.context) == (Kind.PREFILL, 100, 0)
    assert [grant.task for grant in scheduler.plan(0.2, AMPLE).grants] == [task]


def test_a_removed_task_is_planned_no_more_and_a_late_outcome_is_ignored() -> None:
    scheduler = scheduler_of()
    task, other = prompt(1), prompt(2)
    scheduler.add(task, now=0.0)
    scheduler.add(other, now=0.0)
    assert scheduler.remove(1) is task
    assert scheduler.remove(1) is None
    scheduler.complete(IterationResult([TaskOutcome(task, 100, 0, Kind.DECODE)], 0.05), now=1.0)
    assert scheduler.counts() == {Kind.PREFILL: 1, Kind.DECODE: 0, Kind.FINETUNE: 0}
    assert [grant.task for grant in scheduler.plan(1.0, AMPLE).grants] == [other]


def test_an_id_that_is_live_already_is_refused() -> None:
    scheduler = scheduler_of()
    scheduler.add(prompt(7), now=0.0)
    with pytest.raises(ValueError, match="task 7 is scheduled already"):
        scheduler.add(prompt(7), now=0.0)


@pytest.mark.parametrize("act", ["update", "restart"])
def test_a_task_that_is_not_live_cannot_be_changed(act: str) -> None:
    scheduler = scheduler_of()
    with pytest.raises(ValueError, match="task 7 is not scheduled"):
        scheduler.update(prompt(7)) if act == "update" else scheduler.restart(prompt(7), 1, 0.0)


def test_a_decode_before_the_end_of_its_prompt_is_an_error() -> None:
    scheduler = scheduler_of()
    task = prompt(7, tokens=100)
    scheduler.add(task, now=0.0)
    with pytest.raises(ValueError, match="task 7 cannot decode: 40 tokens of its prompt are left"):
        scheduler.complete(IterationResult([TaskOutcome(task, 60, 0, Kind.DECODE)], 0.05), now=1.0)


def test_the_policy_of_the_settings_can_be_replaced_by_ones_own() -> None:
    cost = CostModel(roofline(parameters=1_000_000, flops_per_s=1e11, bytes_per_s=1e10))
    own = Policy(FCFS, SchedulerSettings(), cost)
    assert Scheduler(SchedulerSettings(), cost, own).policy is own


def test_a_reload_keeps_what_fine_tuning_was_paid() -> None:
    settings = {"tbt_floor_ms": 1.0, "tbt_factor": 0.5, "finetune_max_wait_s": 0.5}
    scheduler = scheduler_of(**settings)
    decode = ServingTask(1, Kind.DECODE, 100.0, deadline_s=0.0, context=63, held_pages=4, capacity=64)
    scheduler.add(decode, now=100.0)
    task = lesson()
    scheduler.add(task, now=100.0)

    def runs(now: float) -> bool:
        return task in [grant.task for grant in scheduler.plan(now, AMPLE).grants]

    assert runs(102.0)
    scheduler.complete(
        IterationResult([TaskOutcome(task, 10, 0, Kind.FINETUNE)], 1.0, [(Unit("layer", 32), 1.0)]), 102.1
    )
    assert not runs(102.2)
    scheduler.configure(SchedulerSettings.model_validate({**settings, "finetune_min_share": 0.04}))
    assert not runs(102.3)


def test_a_reload_keeps_when_the_intervals_began_and_what_is_due_in_them() -> None:
    scheduler = scheduler_of(policy="ekya", retrain_every_s=30.0)
    scheduler.plan(0.0, AMPLE)
    task = lesson()
    scheduler.add(task, now=5.0)
    scheduler.configure(settings_of(policy="ekya", retrain_every_s=30.0, tau_tasks=3))
    assert scheduler.plan(29.0, AMPLE).resume_s == 30.0
    scheduler.configure(settings_of(policy="ekya", retrain_every_s=30.0))
    assert [grant.task for grant in scheduler.plan(40.0, AMPLE).grants] == [task]


def test_the_plan_predicts_what_the_cost_model_says_of_it() -> None:
    scheduler = scheduler_of()
    scheduler.add(prompt(tokens=100), now=0.0)
    plan = scheduler.plan(0.0, AMPLE)
    assert plan.predicted_forward_s == pytest.approx(scheduler.cost.forward_s(Load(prefill_tokens=100, pairs=5000.0)))
    assert math.isfinite(plan.budget_s)


@pytest.mark.parametrize("policy", ROWS)
def test_a_decision_does_not_look_at_every_prompt_of_a_long_queue(policy: str) -> None:
    def calls(queued: int) -> int:
        """Function calls of a decision, its completion and the plan made ahead."""
        scheduler = scheduler_of(policy=policy)
        for task_id in range(queued):
            scheduler.add(prompt(task_id, tokens=600), now=0.0)
        counted = 0

        def count(_frame: object, event: str, _argument: object) -> None:
            nonlocal counted
            counted += event in ("call", "c_call")

        sys.setprofile(count)
        plan = scheduler.plan(0.0, AMPLE)
        scheduler.foresee(plan, 0.0, AMPLE)
        scheduler.complete(
            IterationResult([TaskOutcome(grant.task, grant.num_tokens, 0, None) for grant in plan.grants], 0.1), 0.1
        )
        sys.setprofile(None)
        return counted

    assert calls(4096) <= calls(512) + 20
