"""LeMix' stages, event by event: what each row does, and Algorithm 1 beside what happens."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edged.lab.simulator.stages import (
    MODELS,
    POLICIES,
    STAGES,
    SimulatedNode,
    StagedCluster,
    StagedLoad,
    StagePolicy,
    play_stages,
)
from edged.placement.stages import StagedPlan, StagedTask


def load(**changes: Any) -> StagedLoad:
    values: dict[str, Any] = {"model": "llama-70b", "training_share": 0.3, "load": 0.9, "tasks": 300}
    return StagedLoad(**(values | changes))


def play(name: str, **changes: Any) -> dict[str, Any]:
    return play_stages((load(**changes), name, None))


def first_node(task: StagedTask, cluster: StagedCluster) -> tuple[SimulatedNode, StagedPlan | None]:
    return cluster.nodes[0], None


def on_one_node(tasks: list[StagedTask], units: int = 1) -> StagedCluster:
    """Play tasks at one node without noise; a task of 100 tokens has a coefficient of sigma 0."""
    cluster = StagedCluster(load(noise=0.0, sigma=0.0), StagePolicy(lambda: first_node, units=units))
    cluster.play(tasks)
    return cluster


def test_a_task_goes_forward_and_back_through_the_stages_in_table_ii_s_time() -> None:
    serves, trains = StagedTask(0.0, 100), StagedTask(50.0, 100, trains=True)
    cluster = on_one_node([serves, trains])
    forward, backward = MODELS["llama-70b"].forward_s, MODELS["llama-70b"].backward_s
    assert cluster.nodes[0].responses_s == pytest.approx([forward])
    assert trains.end_backward[0] - trains.arrival_s == pytest.approx(forward + backward)


def test_a_unit_of_a_backward_is_what_a_forward_waits_for() -> None:
    def response_s(units: int) -> float:
        # In the second stage's backward, which runs from 0.73 to 1.255 s.
        tasks = [StagedTask(0.0, 100, trains=True), StagedTask(0.5, 100)]
        return on_one_node(tasks, units).nodes[0].responses_s[0]

    assert response_s(1) == pytest.approx(1.255 - 0.5 + 0.365)
    assert response_s(8) < 0.73 + 1.05 / STAGES / 8 + 1e-9


@given(gap=st.floats(0.0, 3.0), trained=st.integers(20, 200), length=st.integers(20, 200))
@settings(max_examples=100, deadline=None)
def test_algorithm_1_promises_nothing_sooner_than_it_happens(gap: float, trained: int, length: int) -> None:
    first, second = StagedTask(0.0, trained, trains=True), StagedTask(gap, length)
    cluster = on_one_node([first, second])
    untouched = StagedCluster(load(noise=0.0, sigma=0.0), POLICIES["naive-mix"])
    belief = untouched.nodes[0].belief
    from edged.placement.stages import place, plan

    place(belief, StagedTask(0.0, trained, trains=True), plan(belief, StagedTask(0.0, trained)))
    planned = plan(belief, StagedTask(gap, length))
    # A stage that is free takes the forward, and the algorithm may let it wait for a backward that comes.
    assert planned.response_s >= cluster.nodes[0].responses_s[0] - 1e-9
    if gap > first.end_backward[0]:
        assert planned.response_s == pytest.approx(cluster.nodes[0].responses_s[0])


@pytest.mark.parametrize("name", POLICIES)
def test_every_task_ends_and_no_stage_does_two_things_at_once(name: str) -> None:
    played = play(name, tasks=120)
    assert played["utilization_share"] <= 1.0
    assert played["throughput_per_s"] * played["ended_s"] == pytest.approx(120)
    assert played["training_s"] > 0
    assert played == {**play(name, tasks=120), "decision_ms_p50": played["decision_ms_p50"]}


@pytest.mark.parametrize(("share", "training"), [(0.1, 1), (0.3, 1), (0.5, 2), (0.75, 3), (0.9, 3)])
def test_separate_has_nodes_of_each_kind(share: float, training: int) -> None:
    played = play("separate", training_share=share)
    assert [each is None for each in played["response_by_node_s"]] == [True] * training + [False] * (4 - training)


def test_separate_pauses_to_synchronise_and_knows_nothing_new_before() -> None:
    few, many = play("separate", training_share=0.5, tasks=150), play("separate", training_share=0.5, tasks=400)
    assert few["updates_seen_share"] < 0.1 < many["updates_seen_share"]


def test_the_literal_score_uses_one_node_and_the_mended_one_all() -> None:
    assert (play("lemix-literal")["nodes_used"], play("lemix")["nodes_used"]) == (1, 4)


def test_eq_4_and_units_that_yield_serve_sooner_at_full_load() -> None:
    def in_time(name: str) -> float:
        return sum(play(name, load=1.0, seed=seed)["in_time_share"] for seed in range(3)) / 3

    plain, deprioritised, units = (in_time(name) for name in ("least-response", "least-response-eq4", "units"))
    assert plain < deprioritised < units


def test_a_decision_of_76_ms_bounds_the_tasks_a_second() -> None:
    given: dict[str, Any] = {"model": "gpt-400m", "training_share": 0.1, "load": None, "rate_per_s": 50.0}
    assert play("mix-luf", **given)["throughput_per_s"] < 1 / 0.076
    assert play("mix-luf-free", **given)["throughput_per_s"] > 2 / 0.076


def test_slow_nodes_get_less_and_bursts_cost() -> None:
    busy = play("units", condition="unequal")["busy_by_node_s"]
    steady, bursts = play("units")["in_time_share"], play("units", condition="bursts")["in_time_share"]
    assert max(busy) < 2 * min(busy)
    assert bursts < steady


def test_a_heavy_weight_of_lengths_makes_nodes_of_their_own_for_short_tasks() -> None:
    what: dict[str, Any] = {"training_share": 0.5, "tasks": 600, "seed": 1}
    tuned, named = play_stages((load(**what), "lemix-literal", (0.0, 200.0))), play("lemix-lengths", **what)
    assert tuned["nodes_used"] == 4
    assert tuned["in_time_share"] > play("least-response-eq4", **what)["in_time_share"] + 0.1
    assert named["in_time_share"] == tuned["in_time_share"]
