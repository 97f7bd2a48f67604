"""What MACE decides, one decision at a time."""

from __future__ import annotations

import pytest

from edged.scheduler.cost.model import CostModel
from edged.scheduler.cost.prices import Load, Prices
from edged.scheduler.policies.hybrid import SMALLEST_CHUNK
from edged.scheduler.scheduler import Scheduler
from edged.scheduler.task import FinetuneTask, IterationResult, Kind, TaskOutcome
from edged.settings.load import SchedulerSettings
from tests.scheduler.policies.test_policies import PAGE, UNITS, add_decode, add_lesson, add_prompt, granted, resources
from tests.scheduler.test_scheduler import scheduler_of


class TestMaceServing:
    """Prompts beside decodes."""

    def test_prompts_come_in_the_order_of_their_deadlines(self) -> None:
        scheduler = scheduler_of(ttft_floor_ms=1.0)
        add_prompt(scheduler, 1, 2000, arrival_s=0.0)
        add_prompt(scheduler, 2, 20, arrival_s=0.1)
        assert list(granted(scheduler.plan(0.1, resources()))) == [2, 1]

    def test_a_prompt_under_way_gives_way_to_one_that_is_due_earlier(self) -> None:
        scheduler = scheduler_of(ttft_floor_ms=1.0)
        task = add_prompt(scheduler, 1, 3000)
        scheduler.complete(IterationResult([TaskOutcome(task, 1000, 0, Kind.PREFILL)], 1.0), 1.0)
        task.held_pages, task.capacity = 63, 63 * PAGE
        add_prompt(scheduler, 2, 20, arrival_s=1.0)
        assert list(granted(scheduler.plan(1.0, resources()))) == [2, 1]

    def test_a_chunk_keeps_the_decodes_on_time_while_the_prompt_is_in_no_hurry(self) -> None:
        scheduler = scheduler_of(ttft_floor_ms=60_000.0)
        decode = add_decode(scheduler, 1)
        add_prompt(scheduler, 2, 1000)
        plan = scheduler.plan(0.0, resources())
        assert SMALLEST_CHUNK <= granted(plan)[2][0] < 1000
        assert plan.predicted_forward_s <= decode.deadline_s

    @pytest.mark.parametrize("adapter", [1, 2])
    def test_a_chunk_that_brings_an_adapter_is_shorter_by_what_the_adapter_costs(self, adapter: int) -> None:
        prices = Prices((0.01, 0.0001, 0.0001, 0.0, 0.0, 0.0, 0.0, 0.01), 64, {"layer": (0.0, 0.001)})
        scheduler = Scheduler(SchedulerSettings(ttft_floor_ms=60_000.0, tbt_floor_ms=80.0), CostModel(prices))
        decode = add_decode(scheduler, 1)
        decode.adapter = 1
        add_prompt(scheduler, 2, 1000).adapter = adapter
        plan = scheduler.plan(0.0, resources())
        limit_s = decode.deadline_s * (1.0 - scheduler.cost.headroom)
        assert granted(plan)[2][0] > SMALLEST_CHUNK
        assert plan.predicted_forward_s <= limit_s < plan.predicted_forward_s + 0.001

    def test_a_prompt_that_would_be_late_is_not_held_back_by_decodes(self) -> None:
        scheduler = scheduler_of(ttft_floor_ms=60_000.0)
        add_decode(scheduler, 1, now=50.0)
        add_prompt(scheduler, 2, 1000)
        assert granted(scheduler.plan(58.0, resources()))[2][0] == 1000

    def test_a_prompt_goes_on_even_where_the_decodes_leave_no_time(self) -> None:
        scheduler = scheduler_of(ttft_floor_ms=60_000.0)
        add_decode(scheduler, 1)
        add_prompt(scheduler, 2, 1000)
        assert granted(scheduler.plan(0.2, resources()))[2][0] == SMALLEST_CHUNK

    def test_a_small_prompt_passes_a_large_one_that_finds_no_pages_until_that_one_is_very_late(self) -> None:
        scheduler = scheduler_of(policy="mace-paper", ttft_floor_ms=1000.0, ttft_factor=0.1)
        add_decode(scheduler, 1)
        add_prompt(scheduler, 2, 40 * PAGE, arrival_s=0.0)
        add_prompt(scheduler, 3, 2 * PAGE, arrival_s=0.2)
        assert 3 in granted(scheduler.plan(1.9, resources(free=30, total=100)))
        assert 3 not in granted(scheduler.plan(2.1, resources(free=30, total=100)))


class TestMaceFineTuning:
    """Fine-tuning beside serving."""

    def test_alone_it_fills_the_idle_quantum(self) -> None:
        scheduler = scheduler_of(idle_quantum_ms=50.0)
        add_lesson(scheduler, 9)
        plan = scheduler.plan(0.0, resources())
        units_s = granted(plan)[9][1] * scheduler.cost.unit_s(UNITS[0])
        assert plan.predicted_units_s == pytest.approx(units_s)
        assert 0.050 - scheduler.cost.unit_s(UNITS[0]) < units_s <= 0.050

    def test_alone_it_runs_even_a_unit_that_is_longer_than_the_quantum(self) -> None:
        scheduler = scheduler_of(idle_quantum_ms=0.001)
        add_lesson(scheduler, 9)
        assert granted(scheduler.plan(0.0, resources())) == {9: (0, 1)}

    def test_the_last_tokens_of_a_forward_and_the_first_units_share_an_iteration(self) -> None:
        scheduler = scheduler_of(idle_quantum_ms=500.0)
        add_lesson(scheduler, 9, tokens=50)
        tokens, units = granted(scheduler.plan(0.0, resources()))[9]
        assert tokens == 50
        assert units > 0

    def test_no_unit_runs_before_the_forward_is_complete(self) -> None:
        scheduler = scheduler_of(idle_quantum_ms=500.0)
        add_lesson(scheduler, 9, tokens=500)
        assert granted(scheduler.plan(0.0, resources(tokens=100))) == {9: (100, 0)}

    def test_beside_decodes_it_keeps_the_latency_budget(self) -> None:
        scheduler = scheduler_of(tbt_floor_ms=80.0)
        decode = add_decode(scheduler, 1)
        add_lesson(scheduler, 9)
        plan = scheduler.plan(0.0, resources())
        assert granted(plan)[9][1] > 0
        assert plan.predicted_forward_s + plan.predicted_units_s <= plan.budget_s < decode.deadline_s

    def test_the_budget_leaves_headroom_for_the_cost_models_error(self) -> None:
        scheduler = scheduler_of(tbt_floor_ms=30.0, idle_quantum_ms=1e6)
        add_decode(scheduler, 1)
        assert scheduler.plan(0.0, resources()).budget_s <= 0.030 * (1.0 - scheduler.cost.mape)

    def test_where_decodes_have_no_slack_it_waits_until_it_outranks_them(self) -> None:
        scheduler = scheduler_of(tbt_floor_ms=1.0, tbt_factor=0.5, finetune_max_wait_s=0.5)
        add_lesson(scheduler, 9)
        task = add_decode(scheduler, 1)
        task.deadline_s = 0.0
        assert 9 not in granted(scheduler.plan(0.3, resources()))
        assert granted(scheduler.plan(0.5, resources()))[9][1] >= 1

    @pytest.mark.parametrize("prompts", [0, 1])
    def test_prompts_that_wait_as_long_outrank_it_also_where_an_answer_loses_its_pages(self, prompts: int) -> None:
        scheduler = scheduler_of(finetune_max_wait_s=1.0)
        answers = [add_decode(scheduler, number, context=4 * PAGE) for number in (1, 2)]
        lesson = FinetuneTask(3, 0.0, units=UNITS, next_unit=1, num_tokens=0)
        scheduler.add(lesson, 0.0)
        for number in range(prompts):
            add_prompt(scheduler, 4 + number, 100)
        plan = scheduler.plan(0.9, resources(free=1, total=9))
        assert plan.preempt == answers[1:]
        assert (3 in granted(plan)) is (prompts == 0)

    def test_when_it_outranks_serving_it_gets_its_share_of_the_time_it_waited(self) -> None:
        scheduler = scheduler_of(finetune_max_wait_s=0.5, finetune_min_share=0.1, idle_quantum_ms=1000.0)
        add_lesson(scheduler, 9)
        task = add_decode(scheduler, 1)
        task.deadline_s = 0.0
        plan = scheduler.plan(1.0, resources())
        assert 0.1 - scheduler.cost.unit_s(UNITS[0]) < plan.predicted_units_s <= 0.1

    def test_an_overdue_forward_gets_tokens_though_prompts_want_them_all(self) -> None:
        scheduler = scheduler_of(finetune_max_wait_s=0.5)
        add_lesson(scheduler, 9, tokens=500)
        for task_id in range(1, 9):
            add_prompt(scheduler, task_id, 1000)
        assert 9 not in granted(scheduler.plan(0.1, resources()))
        plan = scheduler.plan(0.6, resources())
        assert granted(plan)[9][0] >= SMALLEST_CHUNK
        assert sum(tokens for tokens, _ in granted(plan).values()) == 1024

    def test_what_overdue_fine_tuning_gets_is_taken_from_the_chunk_beside_it(self) -> None:
        scheduler = scheduler_of(
            ttft_floor_ms=60_000.0,
            tbt_floor_ms=300.0,
            idle_quantum_ms=1000.0,
            finetune_min_share=0.1,
            finetune_max_wait_s=0.5,
        )
        add_lesson(scheduler, 9)
        task = add_decode(scheduler, 1, now=1.0)
        add_prompt(scheduler, 2, 1000, arrival_s=1.0)
        plan = scheduler.plan(1.0, resources())
        assert plan.predicted_units_s > 0.09
        assert 1.0 + plan.predicted_forward_s + plan.predicted_units_s <= task.deadline_s

    def test_a_task_that_was_just_added_is_not_overdue_whatever_happened_before(self) -> None:
        scheduler = scheduler_of(tbt_floor_ms=1.0, tbt_factor=0.5, finetune_max_wait_s=0.5)
        add_lesson(scheduler, 9)
        task = add_decode(scheduler, 1)
        scheduler.remove(9)
        task.deadline_s = 0.0
        add_lesson(scheduler, 8, now=100.0)
        assert 8 not in granted(scheduler.plan(100.1, resources()))
        assert 8 in granted(scheduler.plan(100.6, resources()))

    def test_the_next_step_inherits_the_wait_of_the_one_before(self) -> None:
        scheduler = scheduler_of(tbt_floor_ms=1.0, tbt_factor=0.5, finetune_max_wait_s=0.5)
        lesson = add_lesson(scheduler, 8)
        add_decode(scheduler, 1).deadline_s = 0.0
        scheduler.complete(IterationResult([TaskOutcome(lesson, 0, 1, None)]), 0.4)
        add_lesson(scheduler, 9, now=0.4)
        assert 9 in granted(scheduler.plan(0.6, resources()))

    def test_a_step_under_way_is_ended_before_another_begins(self) -> None:
        scheduler = scheduler_of()
        add_lesson(scheduler, 8, tokens=100, loss=5.0)
        add_lesson(scheduler, 9)
        assert set(granted(scheduler.plan(0.4, resources()))) == {9}

    def test_of_two_steps_the_one_with_the_larger_loss_begins(self) -> None:
        scheduler = scheduler_of()
        add_lesson(scheduler, 8, tokens=100, loss=0.1)
        add_lesson(scheduler, 9, tokens=100, loss=2.0)
        assert set(granted(scheduler.plan(0.1, resources()))) == {9}

    def test_best_fit_lets_a_small_step_begin_where_the_first_finds_no_pages(self) -> None:
        scheduler = scheduler_of()
        add_lesson(scheduler, 8, tokens=900 * PAGE, loss=2.0)
        add_lesson(scheduler, 9, tokens=10 * PAGE, loss=0.1)
        assert set(granted(scheduler.plan(0.1, resources(free=500)))) == {9}

    def test_beside_serving_it_does_not_begin_a_step_that_takes_most_of_the_free_pages(self) -> None:
        scheduler = scheduler_of(tbt_floor_ms=500.0)
        add_decode(scheduler, 1)
        add_lesson(scheduler, 9, tokens=20 * PAGE)
        assert 9 not in granted(scheduler.plan(0.1, resources(free=39, total=60)))
        assert 9 in granted(scheduler.plan(0.1, resources(free=42, total=60)))

    def test_a_step_between_its_groups_asks_for_pages_as_one_that_has_not_begun(self) -> None:
        scheduler = scheduler_of(tbt_floor_ms=500.0)
        add_decode(scheduler, 1)
        add_lesson(scheduler, 8, tokens=PAGE)
        add_lesson(scheduler, 9, tokens=20 * PAGE).underway = True
        assert not {8, 9} & granted(scheduler.plan(0.1, resources(free=39, total=60))).keys(), (
            "half of it begun is enough"
        )
        assert 9 in granted(scheduler.plan(0.1, resources(free=42, total=60)))

    def test_an_overdue_step_that_finds_no_pages_is_the_next_to_get_them(self) -> None:
        scheduler = scheduler_of(finetune_max_wait_s=0.5)
        add_decode(scheduler, 1)
        add_lesson(scheduler, 9, tokens=50 * PAGE)
        add_prompt(scheduler, 2, 10 * PAGE, arrival_s=0.9)
        assert set(granted(scheduler.plan(1.0, resources(free=40)))) == {1}
        assert 9 in granted(scheduler.plan(1.0, resources(free=60)))

    def test_a_step_that_keeps_a_prompt_out_of_memory_gets_the_quantum(self) -> None:
        scheduler = scheduler_of(idle_quantum_ms=50.0)
        add_lesson(scheduler, 9)
        task = add_decode(scheduler, 1)
        task.deadline_s = 0.0
        add_prompt(scheduler, 2, 40 * PAGE)
        plan = scheduler.plan(0.1, resources(free=30))
        assert plan.prepaid
        assert 0.045 < plan.predicted_units_s <= 0.050

    def test_the_denser_serving_is_the_less_it_takes(self) -> None:
        def units(decodes: int) -> int:
            scheduler = scheduler_of(tbt_floor_ms=200.0)
            for task_id in range(decodes):
                add_decode(scheduler, task_id)
            add_lesson(scheduler, 99)
            return granted(scheduler.plan(0.0, resources())).get(99, (0, 0))[1]

        assert units(2) > units(32) > units(64) == 0


def test_a_short_prompt_enters_beside_a_long_one_whose_pages_are_not_held_yet() -> None:
    scheduler = scheduler_of(ttft_floor_ms=9000.0)
    long = add_prompt(scheduler, 1, 90 * PAGE)
    assert set(granted(scheduler.plan(0.0, resources(free=100, total=100)))) == {1}
    scheduler.complete(IterationResult([TaskOutcome(long, PAGE, 0, Kind.PREFILL)], 0.01), 0.01)
    add_prompt(scheduler, 2, 4 * PAGE, arrival_s=0.01)
    assert 2 in granted(scheduler.plan(0.01, resources(free=95, total=100)))
    assert 2 not in granted(scheduler.plan(0.01, resources(free=91, total=100))), "promised pages are not taken"


def test_a_bin_mixes_all_three_workloads_and_adds_up() -> None:
    scheduler = scheduler_of(tbt_floor_ms=9000.0, ttft_floor_ms=9000.0, idle_quantum_ms=9000.0)
    for task_id in range(4):
        add_decode(scheduler, task_id, context=64)
    add_prompt(scheduler, 10, 100)
    add_lesson(scheduler, 20, tokens=100)
    plan = scheduler.plan(0.0, resources())
    assert [grant.task.kind for grant in plan.grants] == [Kind.DECODE] * 4 + [Kind.PREFILL, Kind.FINETUNE]
    assert plan.pages == 4 + 7 + 7
    load = Load(prefill_tokens=100, decodes=4, finetune_tokens=100, context=256, pairs=100 * 50.0)
    assert plan.predicted_forward_s == pytest.approx(scheduler.cost.forward_s(load))


def test_a_forward_that_reads_the_weights_for_one_answer_is_no_load() -> None:
    def left_s(policy: str) -> float:
        scheduler = scheduler_of(policy=policy, tbt_slowdown=1.5, tbt_floor_ms=500.0, finetune_min_share=0.0)
        add_lesson(scheduler, 9, tokens=10)
        task = add_decode(scheduler, 1)
        now = spent_s = 0.0
        pass_s = scheduler.cost.pass_s
        for _ in range(3000):
            plan = scheduler.plan(now, resources())
            units_s = plan.predicted_units_s
            spent_s += units_s
            now += pass_s + units_s
            scheduler.complete(
                IterationResult(
                    [TaskOutcome(task, 1, 0, Kind.DECODE)], pass_s, [(UNITS[0], units_s)] if units_s else []
                ),
                now,
            )
        return spent_s / now

    assert left_s("mace") > 1.5 * left_s("mace-paper")
