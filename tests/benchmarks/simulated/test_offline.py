"""What one server could have had in time: trying all sets, a schedule, and a bound."""

from __future__ import annotations

from itertools import chain, combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.simulated.offline import Job, at_most, exact, feasible, reachable


def jobs(most: int, releases: st.SearchStrategy[float]) -> st.SearchStrategy[list[Job]]:
    work = st.integers(1, 10)
    one = st.builds(
        lambda at, took, slack: Job(at, at + took * slack, took), releases, work, st.sampled_from((1, 2, 5))
    )
    return st.lists(one, min_size=1, max_size=most)


SOME = jobs(8, st.integers(0, 20))


@settings(max_examples=150, deadline=None)
@given(SOME)
def test_the_optimum_lies_between_the_schedule_and_the_bound(some: list[Job]) -> None:
    assert 1 <= reachable(some) <= exact(some) <= at_most(some) <= len(some)


@settings(max_examples=100, deadline=None)
@given(jobs(7, st.integers(0, 20)))
def test_all_sets_are_tried(some: list[Job]) -> None:
    sets = chain.from_iterable(combinations(some, size) for size in range(len(some) + 1))
    assert exact(some) == max(len(chosen) for chosen in sets if feasible(chosen))


@settings(max_examples=100, deadline=None)
@given(jobs(8, st.just(3.0)))
def test_the_bound_is_exact_where_all_come_at_once(together: list[Job]) -> None:
    assert at_most(together) == exact(together)


@settings(max_examples=100, deadline=None)
@given(jobs(7, st.integers(0, 12)))
def test_feasible_is_what_any_order_with_preemption_can_do(some: list[Job]) -> None:
    # Integers throughout: a set is feasible exactly if no span of time has more work inside it than its length.
    spans = [(one.released_s, other.due_s) for one in some for other in some if one.released_s < other.due_s]
    fits = all(
        sum(job.work_s for job in some if begin <= job.released_s and job.due_s <= end) <= end - begin
        for begin, end in spans
    )
    assert feasible(some) == fits


def test_a_long_job_is_put_aside_for_one_that_is_due_sooner() -> None:
    long, short = Job(0.0, 12.0, 10.0), Job(1.0, 3.0, 2.0)
    assert feasible([long, short])
    assert exact([long, short, Job(2.0, 3.0, 1.0)]) == 2


def test_two_bursts_far_apart_add_up() -> None:
    burst = [Job(at, at + 2.0, 2.0) for at in (0.0, 0.0, 0.0, 100.0, 100.0)]
    assert (reachable(burst), exact(burst), at_most(burst)) == (2, 2, 2)
    assert at_most([]) == reachable([]) == 0
    assert exact(burst[:1]) == pytest.approx(1)
