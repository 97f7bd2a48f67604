"""FlexLLM's token-level co-serving: what fits the latency target beside serving, and nothing else, is fine-tuning."""

from __future__ import annotations

import pytest

from edged.scheduler.cost.model import CostModel, roofline
from edged.scheduler.cost.prices import Load
from edged.scheduler.policies.hybrid import SMALLEST_CHUNK
from edged.scheduler.scheduler import Scheduler
from edged.scheduler.task import FinetuneTask, IterationResult, Kind, ServiceClass, ServingTask, TaskOutcome, Unit
from edged.settings.load import SchedulerSettings
from tests.scheduler.policies.test_policies import PAGE, add_decode, add_lesson, add_prompt, granted, resources
from tests.scheduler.test_scheduler import scheduler_of, settings_of
from tests.scheduler.test_simulation import world_of
from tests.scheduler.world import Device


def test_an_iteration_is_as_long_as_the_target_less_the_error_of_predictions() -> None:
    scheduler = scheduler_of(policy="flexllm", slo_ms=100.0)
    add_decode(scheduler, 1)
    add_prompt(scheduler, 2, 2000)
    plan = scheduler.plan(0.0, resources())
    limit_s = 0.1 * (1.0 - scheduler.cost.headroom)
    assert granted(plan)[2][0] > SMALLEST_CHUNK
    assert limit_s - 1.1 * scheduler.cost.token_s < plan.predicted_forward_s <= limit_s


def test_prompts_come_first_come_first_served_and_none_overtakes_one_that_lacks_pages() -> None:
    scheduler = scheduler_of(policy="flexllm", slo_ms=5000.0)
    for task_id, tokens in ((1, 10 * PAGE), (2, 20 * PAGE), (3, PAGE)):
        add_prompt(scheduler, task_id, tokens, arrival_s=0.1 * task_id)
    assert list(granted(scheduler.plan(1.0, resources(free=25, total=100)))) == [1]
    assert list(granted(scheduler.plan(1.0, resources(free=31, total=100)))) == [1, 2, 3]


def test_the_first_prompt_goes_on_where_the_target_is_out_of_reach() -> None:
    scheduler = scheduler_of(policy="flexllm", slo_ms=1.0)
    add_decode(scheduler, 1)
    add_prompt(scheduler, 2, 500)
    add_prompt(scheduler, 3, 500, arrival_s=0.1)
    lesson = add_lesson(scheduler, 9, tokens=100)
    assert granted(scheduler.plan(1.0, resources())) == {1: (1, 0), 2: (SMALLEST_CHUNK, 0)}
    assert lesson.begun is False


def test_a_step_gets_forward_tokens_then_units_as_far_as_the_target_reaches() -> None:
    scheduler = scheduler_of(policy="flexllm", slo_ms=100.0)
    add_decode(scheduler, 1)
    add_lesson(scheduler, 9, tokens=20)
    plan = scheduler.plan(0.0, resources())
    tokens, units = granted(plan)[9]
    assert tokens == 20
    assert units > 0
    spent_s, limit_s = plan.predicted_forward_s + plan.predicted_units_s, 0.1 * (1.0 - scheduler.cost.headroom)
    one_more_s = plan.predicted_units_s / units
    assert spent_s <= limit_s < spent_s + one_more_s


def test_fine_tuning_starves_while_serving_leaves_nothing_and_goes_on_with_nobody_to_serve() -> None:
    scheduler = scheduler_of(policy="flexllm", slo_ms=1.0)
    decode = add_decode(scheduler, 1)
    add_lesson(scheduler, 9)
    for now in (0.0, 10.0, 1000.0):
        assert set(granted(scheduler.plan(now, resources()))) == {1}
    scheduler.remove(decode.task_id)
    assert granted(scheduler.plan(1001.0, resources()))[9][1] >= 1


def test_a_step_does_not_begin_on_pages_that_a_prompt_waits_for() -> None:
    scheduler = scheduler_of(policy="flexllm", slo_ms=5000.0)
    add_decode(scheduler, 1)
    add_prompt(scheduler, 2, 40 * PAGE)
    add_lesson(scheduler, 9, tokens=4 * PAGE)
    assert set(granted(scheduler.plan(0.0, resources(free=30, total=100)))) == {1}
    scheduler.remove(2)
    assert set(granted(scheduler.plan(0.0, resources(free=30, total=100)))) == {1, 9}


def test_the_target_is_the_least_of_the_classes_that_are_served() -> None:
    scheduler = scheduler_of(policy="flexllm", tbt_floor_ms=80.0)
    batch = ServingTask(1, Kind.DECODE, 0.0, context=63, held_pages=4, capacity=64, service=ServiceClass.BATCH)
    scheduler.add(batch, 0.0)
    share = 1.0 - scheduler.cost.headroom
    assert scheduler.plan(0.0, resources()).budget_s == 0.5 * share
    add_decode(scheduler, 2)
    assert scheduler.plan(0.0, resources()).budget_s == 0.08 * share


def test_what_an_iteration_takes_outside_its_forward_is_left_to_it() -> None:
    scheduler = scheduler_of(policy="flexllm", slo_ms=100.0)
    decode = add_decode(scheduler, 1)
    for start in range(200):
        scheduler.plan(float(start), resources())
        forward_s = scheduler.cost.forward_s(Load(decodes=1, context=decode.context))
        done = TaskOutcome(decode, 1, 0, Kind.DECODE)
        scheduler.complete(IterationResult([done], forward_s), start + forward_s + 0.02)
    budget_s = scheduler.plan(300.0, resources()).budget_s
    assert budget_s == pytest.approx(0.1 * (1.0 - scheduler.cost.headroom) - 0.02, abs=1e-4)


def test_beside_steady_answers_all_is_learnt_and_no_token_is_late() -> None:
    world = world_of("flexllm", slo_ms=120.0)
    tuning = world.teach(200, [unit for _ in range(40) for unit in add_lesson(scheduler_of(), 1).units[:1]], steps=3)
    lives = [world.ask(prompt=40, answer=150) for _ in range(4)]
    world.run()
    assert tuning.taken == 3
    gaps = [
        after - before for life in lives for before, after in zip(life.token_times, life.token_times[1:], strict=False)
    ]
    assert sorted(gaps)[int(0.98 * len(gaps))] <= 0.12


def test_one_step_at_a_time_is_begun() -> None:
    scheduler = scheduler_of(policy="flexllm", slo_ms=100.0)
    first = add_lesson(scheduler, 8, tokens=2000)
    add_lesson(scheduler, 9, tokens=100)
    plan = scheduler.plan(0.0, resources())
    assert set(granted(plan)) == {8}
    tokens = granted(plan)[8][0]
    scheduler.complete(IterationResult([TaskOutcome(first, tokens, 0, Kind.FINETUNE)], 0.05), 0.05)
    assert set(granted(scheduler.plan(0.1, resources()))) == {8}


def test_a_step_that_was_never_measured_ends_beside_answers_as_soon_as_a_forward_leaves_room_for_it() -> None:
    # A box that computes 160 rows while it reads its weights: the optimizer's unit counts adapters, not rows.
    cost = CostModel(roofline(parameters=3_000_000_000, flops_per_s=2.4e13, bytes_per_s=1.5e11, layers=26))
    scheduler = Scheduler(SchedulerSettings(policy="flexllm"), cost)
    add_decode(scheduler, 1)
    lesson = add_lesson(scheduler, 9)
    lesson.units = (Unit("layer", 64), Unit("step", 1))
    plan = scheduler.plan(0.0, resources())
    assert granted(plan)[9] == (0, 2)
    assert plan.predicted_units_s < plan.predicted_forward_s


class TestCutWindows:
    """The backward's windows are as long as what is left of the iteration."""

    def test_a_unit_that_does_not_fit_gets_the_rows_that_do(self) -> None:
        scheduler = scheduler_of(policy="flexllm", slo_ms=60.0)
        add_decode(scheduler, 1)
        lesson = add_lesson(scheduler, 9)
        lesson.units = (Unit("layer", 256), Unit("layer", 256), Unit("step", 1))
        plan = scheduler.plan(0.0, resources())
        grant = plan.grants[-1]
        assert (grant.units, grant.window % 16) == (1, 0)
        assert 16 <= grant.window < 256
        one_row_s = scheduler.cost.unit_s(Unit("layer", 256)) - scheduler.cost.unit_s(Unit("layer", 255))
        spent_s = plan.predicted_forward_s + plan.predicted_units_s
        assert spent_s <= plan.budget_s < spent_s + 16 * one_row_s

    def test_a_unit_that_must_be_whole_is_not_cut(self) -> None:
        scheduler = scheduler_of(policy="flexllm", slo_ms=60.0)
        add_decode(scheduler, 1)
        for kind in ("grad", "graph", "step", "test"):
            lesson = add_lesson(scheduler, 9)
            lesson.units = (Unit(kind, 100_000),)
            assert set(granted(scheduler.plan(0.0, resources()))) == {1}
            scheduler.remove(9)

    def test_where_reading_the_weights_alone_takes_too_long_nothing_is_cut(self) -> None:
        cost = CostModel(roofline(parameters=135_000_000, flops_per_s=2e12, bytes_per_s=2e10))
        scheduler = Scheduler(SchedulerSettings(policy="flexllm"), cost)
        decode_s = scheduler.cost.forward_s(Load(decodes=1, context=63))
        min_s = scheduler.cost.unit_s(Unit("layer", 16))
        assert min_s == scheduler.cost.unit_s(Unit("layer", 32)), "both are below the knee"
        add_decode(scheduler, 1)
        lesson = add_lesson(scheduler, 9)
        lesson.units = (Unit("layer", 256),)
        for spare_s, runs in ((0.9 * min_s, False), (1.1 * min_s, True)):
            slo_s = (decode_s + spare_s) / (1.0 - scheduler.cost.headroom)
            scheduler.configure(settings_of(policy="flexllm", slo_ms=1e3 * slo_s))
            assert (9 in granted(scheduler.plan(0.0, resources()))) is runs

    def test_no_part_is_below_the_knee_unless_an_iteration_would_do_nothing_else(self) -> None:
        cost = CostModel(roofline(parameters=135_000_000, flops_per_s=2e12, bytes_per_s=2e10))
        Scheduler(SchedulerSettings(policy="flexllm"), cost)
        unit, whole_s = Unit("layer", 256), cost.unit_s(Unit("layer", 256))
        assert cost.rows(unit, 0.99 * whole_s, least=False) == 144, "the knee is 100 rows"
        short, left_s = Unit("layer", 150), 0.9 * cost.unit_s(Unit("layer", 150))
        assert cost.rows(short, left_s, least=False) == 0
        assert 100 <= cost.rows(short, left_s, least=True) < 150
        assert cost.rows(Unit("layer", 161), whole_s, least=True) == 160, "all but one"

    def test_cut_windows_train_where_whole_ones_never_fit(self) -> None:
        for policy, trains in (("flexllm", True), ("mace", False)):
            device = Device(unit_token_s=0.0004)
            world = world_of(policy, slo_ms=70.0, tbt_floor_ms=70.0, finetune_min_share=0.0, device=device)
            tuning = world.teach(50, [Unit("layer", 256)] * 6)
            world.ask(prompt=20, answer=1000)
            while world.lives:
                world.step()
            assert bool(tuning.taken) is trains


class TestAblations:
    """FlexLLM's public code, and windows that are not cut."""

    def test_static_fills_the_batch_whatever_it_takes_and_runs_one_unit(self) -> None:
        scheduler = scheduler_of(policy="flexllm-static", slo_ms=1.0)
        add_decode(scheduler, 1)
        add_prompt(scheduler, 2, 100)
        add_lesson(scheduler, 9, tokens=2000)
        assert granted(scheduler.plan(0.0, resources(tokens=512))) == {1: (1, 0), 2: (100, 0), 9: (411, 0)}
        scheduler.remove(9)
        add_lesson(scheduler, 9)
        assert granted(scheduler.plan(0.0, resources(tokens=512)))[9] == (0, 1)

    def test_whole_windows_wait_for_an_iteration_that_has_room_for_them(self) -> None:
        for policy, runs in (("flexllm", True), ("flexllm-whole", False)):
            scheduler = scheduler_of(policy=policy, slo_ms=60.0)
            add_decode(scheduler, 1)
            lesson = add_lesson(scheduler, 9)
            lesson.units = (Unit("layer", 256),)
            assert (9 in granted(scheduler.plan(0.0, resources()))) is runs


class TestSpatialSharing:
    """A step in a stream of its own, beside a forward that is planned as if it were alone."""

    def test_a_step_is_as_long_as_the_forward_beside_it(self) -> None:
        scheduler = scheduler_of(policy="spatial", slo_ms=1.0)
        add_decode(scheduler, 1)
        add_lesson(scheduler, 9).units = (Unit("layer", 16),) * 100
        plan = scheduler.plan(0.0, resources())
        units = granted(plan)[9][1]
        assert units > 1
        one_s = plan.predicted_units_s / units
        assert plan.predicted_forward_s - one_s < plan.predicted_units_s <= plan.predicted_forward_s

    def test_a_step_goes_on_beside_a_forward_that_is_shorter_than_its_next_unit(self) -> None:
        scheduler = scheduler_of(policy="spatial", slo_ms=1.0)
        add_decode(scheduler, 1)
        add_lesson(scheduler, 9).units = (Unit("layer", 100_000), Unit("step", 1))
        assert granted(scheduler.plan(0.0, resources()))[9] == (0, 1)

    def test_prompts_get_what_flexllm_gives_them(self) -> None:
        chunks = []
        for policy in ("flexllm", "spatial"):
            scheduler = scheduler_of(policy=policy, slo_ms=100.0)
            add_decode(scheduler, 1)
            add_prompt(scheduler, 2, 2000)
            add_lesson(scheduler, 9)
            chunks.append(granted(scheduler.plan(0.0, resources()))[2])
        assert chunks[0] == chunks[1]


class TestFillAhead:
    """The next group's forward joins forwards of serving while units of the group before it run."""

    def served(self, ahead: int = 5000) -> tuple[Scheduler, FinetuneTask]:
        scheduler = scheduler_of(policy="flexllm", slo_ms=100.0)
        add_decode(scheduler, 1)
        lesson = add_lesson(scheduler, 9)
        lesson.ahead = ahead
        return scheduler, lesson

    def test_it_takes_the_tokens_below_the_knee_and_leaves_the_rest_of_the_time_to_units(self) -> None:
        scheduler, lesson = self.served()
        free = scheduler.cost.free_tokens(Load(decodes=1))
        plan = scheduler.plan(0.0, resources())
        tokens, units = granted(plan)[9]
        assert tokens == free > 0
        assert units > 0
        assert plan.predicted_forward_s + plan.predicted_units_s <= plan.budget_s
        lesson.ahead = 3
        assert granted(scheduler.plan(0.0, resources()))[9][0] == 3

    def test_it_reads_no_weights_of_its_own(self) -> None:
        scheduler, _ = self.served()
        scheduler.remove(1)
        tokens, units = granted(scheduler.plan(0.0, resources()))[9]
        assert (tokens, units > 0) == (0, True)

    def test_it_takes_pages_that_are_open_or_none(self) -> None:
        scheduler, lesson = self.served(ahead=10 * PAGE)
        need = lesson.pages_for(lesson.ahead, PAGE)
        # The decode may soon need one, too.
        assert granted(scheduler.plan(0.0, resources(free=need)))[9][0] == 0
        assert granted(scheduler.plan(0.0, resources(free=need + 1)))[9][0] > 0

    def test_what_is_done_of_it_is_not_granted_again(self) -> None:
        scheduler, lesson = self.served(ahead=100)
        tokens, units = granted(scheduler.plan(0.0, resources()))[9]
        scheduler.complete(IterationResult([TaskOutcome(lesson, tokens, units, Kind.FINETUNE)], 0.05), 0.05)
        assert (lesson.num_tokens, lesson.ahead, lesson.next_unit) == (0, 100 - tokens, units)
        scheduler.restart(lesson, 30, 0.1)
        assert (lesson.num_tokens, lesson.ahead) == (30, 0)
