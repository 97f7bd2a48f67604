"""LeMix Algorithm 1 and Eq. 1 to 4: cases by hand, and an event simulation that knows nothing of the algorithm."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edged.placement.stages import (
    Lemix,
    StagedNode,
    StagedTask,
    deprioritised,
    idleness_profit,
    length_consistency,
    place,
    plan,
    score,
)


def node(name: str = "n", stages: int = 2, forward: float = 0.01, backward: float = 0.02) -> StagedNode:
    return StagedNode(name, stages, forward, backward)


def put(where: StagedNode, task: StagedTask) -> StagedTask:
    place(where, task, plan(where, task))
    return task


def test_a_lone_forward_goes_through_the_stages() -> None:
    planned = plan(node(), StagedTask(1.0, 10))
    assert planned.start_forward == (1.0, 2.0)
    assert planned.end_forward == (2.0, 3.0)
    assert (planned.idle_s, planned.response_s) == (1.0, 2.0)


def test_a_backward_follows_in_reverse_and_a_later_forward_waits_for_it() -> None:
    n = node()
    trained = put(n, StagedTask(0.0, 10, trains=True))
    # Forwards 0-1 and 1-2; backwards of two seconds: stage 2 from 2 to 4, stage 1 from 4 to 6.
    assert trained.start_backward == [4.0, 2.0]
    assert trained.end_backward == [6.0, 4.0]
    # A forward that fits before the backward of stage 1 runs there, and waits in stage 2 for its end.
    planned = plan(n, StagedTask(1.5, 10))
    assert planned.start_forward == (1.5, 4.0)
    assert planned.end_forward == (2.5, 5.0)
    # Idle: half a second in stage 1; in stage 2 two seconds since the forward before, which the backward filled.
    assert planned.idle_s == pytest.approx(0.5 + 0.0)
    assert planned.response_s == 3.5
    assert planned.passed == ()


def test_a_forward_behind_the_backward_of_the_first_stage_takes_it_from_the_queue() -> None:
    n = node()
    trained = put(n, StagedTask(0.0, 10, trains=True))
    planned = plan(n, StagedTask(3.5, 10))
    assert planned.start_forward[0] == 6.0
    assert planned.passed == (trained,)
    put(n, StagedTask(3.5, 10))
    assert n.training == []


@given(
    arrivals=st.lists(st.floats(0.0, 5.0), min_size=1, max_size=12),
    lengths=st.lists(st.integers(1, 12), min_size=12, max_size=12),
    stages=st.integers(1, 4),
)
def test_forwards_alone_are_those_of_a_pipeline_simulated_event_by_event(
    arrivals: list[float], lengths: list[int], stages: int
) -> None:
    n, free, now = node(stages=stages), [0.0] * stages, 0.0
    for gap, length in zip(arrivals, lengths, strict=False):
        now += gap
        planned, ready = plan(n, StagedTask(now, length)), now
        for stage in range(stages):
            begun = max(ready, free[stage])
            ready = free[stage] = begun + 0.01 * length**2
            assert planned.end_forward[stage] == pytest.approx(ready)
        put(n, StagedTask(now, length))


@given(
    gaps=st.lists(st.floats(0.0, 3.0), min_size=2, max_size=10),
    tolerance=st.floats(0.0, 1.0),
    lengths=st.lists(st.integers(1, 20), min_size=10, max_size=10),
)
def test_with_one_stage_eq_1_is_the_tolerance_whatever_comes(
    gaps: list[float], tolerance: float, lengths: list[int]
) -> None:
    n, now = node(stages=1), 0.0
    put(n, StagedTask(0.0, 5))
    for gap, length in zip(gaps, lengths, strict=False):
        now += gap
        task = StagedTask(now, length)
        assert idleness_profit(n, task, plan(n, task), tolerance) == pytest.approx(-tolerance, abs=1e-9)
        put(n, task)


def test_eq_2_is_the_normal_density_and_eq_3_the_quotient() -> None:
    n = node()
    for length in (8, 12):
        put(n, StagedTask(0.0, length))
    # Mean 10 and deviation 2: the density at the mean is 1 / (2 sqrt(2 pi)).
    assert length_consistency(n, StagedTask(1.0, 10)) == pytest.approx(0.19947, abs=1e-5)
    assert length_consistency(n, StagedTask(1.0, 14)) == pytest.approx(0.19947 * 0.135335, abs=1e-5)
    assert score(-0.05, 0.2, 2.0, 1.0, 0.1) == pytest.approx(-0.015)


def test_literally_a_tolerance_sends_all_to_one_node_and_mended_it_does_not() -> None:
    used: dict[bool, set[str]] = {True: set(), False: set()}
    for literal in used:
        nodes = [node(name, stages=1, forward=3e-6) for name in "abcd"]
        for number in range(40):
            task = StagedTask(0.3 * number, 300 + 50 * (number % 7))
            chosen, planned = Lemix(0.05, 1.0, 0.1, literal).choose(task, nodes)
            place(chosen, task, planned)
            used[literal].add(chosen.name)
    assert len(used[True]) == 1
    assert len(used[False]) >= 3


def test_eq_4_asks_whether_the_next_inference_would_be_late_everywhere() -> None:
    busy, free = node("busy"), node("free")
    put(busy, StagedTask(0.0, 30))
    task = StagedTask(1.0, 10)
    assert deprioritised(task, [busy], 5.0)
    assert not deprioritised(task, [busy, free], 5.0)
