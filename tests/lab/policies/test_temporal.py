"""Temporal sharing: iterations that serve, a group of pairs alone, and how many lie between two groups."""

from __future__ import annotations

from itertools import groupby

import pytest

from edged.lab.policies.temporal import DynamicInterval
from edged.scheduler.task import IterationResult, Kind, TaskOutcome
from tests.lab.policies.test_baselines import STEP, kinds, serves, tunes, watched
from tests.scheduler.policies.test_policies import add_decode, add_lesson, resources
from tests.scheduler.test_scheduler import scheduler_of
from tests.scheduler.test_simulation import world_of


def test_a_group_runs_alone_after_a_fixed_number_of_iterations_that_serve() -> None:
    world = world_of("temporal", temporal_every=10)
    # Its forward takes two iterations, the second one with all units.
    world.teach(600, STEP, steps=100)
    plans = [plan for _, plan in watched(world, until_s=20.0)]
    runs = [(kind, len(list(run))) for kind, run in groupby(plans, key=tunes)]
    assert all(tunes(plan) != serves(plan) for plan in plans)
    # The first group finds nobody to serve yet, or had its turn at once.
    assert {length for tuned, length in runs[1:-1] if not tuned} == {10}
    assert {length for tuned, length in runs[1:-1] if tuned} == {2}


def test_a_group_that_was_interrupted_goes_on_and_the_next_one_of_its_step_waits_for_its_turn() -> None:
    scheduler = scheduler_of(policy="temporal", temporal_every=2)
    decode, lesson = add_decode(scheduler, 1), add_lesson(scheduler, 9)
    turns = []
    for iteration in range(8):
        plan = scheduler.plan(float(iteration), resources())
        (kind,) = kinds(plan)
        turns.append(kind)
        if kind is Kind.FINETUNE:
            # A request comes after 20 units, twice.
            ran = min(20, plan.grants[0].units) if lesson.next_unit < 40 else plan.grants[0].units
            scheduler.complete(IterationResult([TaskOutcome(lesson, 0, ran, Kind.FINETUNE)], 0.0), iteration + 0.5)
            if lesson.next_unit == len(lesson.units):
                lesson.groups_done, lesson.next_unit = 1, 0
        else:
            scheduler.complete(IterationResult([TaskOutcome(decode, 1, 0, Kind.DECODE)], 0.1), iteration + 0.5)
    d, f = Kind.DECODE, Kind.FINETUNE
    assert turns == [d, d, f, f, f, d, d, f]


@pytest.mark.parametrize("policy", ["temporal", "temporal-dynamic"])
def test_with_nobody_to_serve_groups_follow_one_another(policy: str) -> None:
    world = world_of(policy)
    tuning = world.teach(100, STEP, steps=5)
    world.run()
    assert tuning.taken == 5
    assert world.iterations == 5


def test_the_dynamic_interval_is_short_while_nobody_waits_and_grows_with_the_queue() -> None:
    world = world_of("temporal-dynamic", max_sequences=2)
    world.teach(100, [STEP[0]], steps=1000)
    few = [tunes(plan) for _, plan in watched(world, until_s=60.0, keeps=2)]
    many = [tunes(plan) for _, plan in watched(world, until_s=240.0, keeps=60)]
    assert 0.0 < sum(many) / len(many) < 0.6 * sum(few) / len(few)


class TestAlgorithm3:
    """FlexLLM's Algorithm 3 beside tables worked by hand."""

    @staticmethod
    def intervals(queued: int, arrived: int, ended: int, count: int) -> list[int]:
        made, steps = DynamicInterval(), 0
        found: list[int] = []
        while len(found) < count:
            steps += 1
            if made.step(queued, arrived, ended):
                found.append(steps)
                steps = 0
        return found

    def test_without_pressure_it_stays_short_and_line_38_is_not_for_the_shortest(self) -> None:
        # 64; twice ceil(1.1 * 64); every third time max(64, 64 + 16). With the factor 1.35 on every branch f_p would
        # become (86.4 + 128) / 3 = 71.5 and the interval behind it 79.
        assert self.intervals(queued=0, arrived=1, ended=1, count=7) == [64, 71, 71, 80, 71, 71, 80]

    def test_between_the_bounds_line_38_lengthens_it(self) -> None:
        # p = 1 + 0.5: f = 1.35 * (64 + 0.6 * 448 * 0.7 / 1.2) = 298.08, f_s = (298.08 + 128) / 3 = 142.03.
        assert self.intervals(queued=20, arrived=0, ended=0, count=5) == [64, 71, 71, 143, 157]

    def test_at_full_pressure_it_nears_the_longest_by_thirds_and_the_longest_is_not_lengthened(self) -> None:
        # p = 1 + 0.5 + 1: f = 512, f_s = (512 + 128) / 3 = 213.33, then (512 + 426.67) / 3 = 312.89.
        assert self.intervals(queued=40, arrived=8, ended=0, count=8) == [64, 71, 71, 214, 235, 235, 313, 345]

    def test_more_ends_than_arrivals_are_no_pressure(self) -> None:
        assert self.intervals(queued=0, arrived=0, ended=50, count=4) == [64, 71, 71, 80]

    def test_what_was_before_a_group_is_forgotten(self) -> None:
        made = DynamicInterval()
        for _ in range(64 + 71):
            made.step(queued=40, arrived=8, ended=0)
        rest = [made.step(queued=0, arrived=0, ended=0) for _ in range(71 + 80)]
        assert [index + 1 for index, turn in enumerate(rest) if turn] == [71, 151]
