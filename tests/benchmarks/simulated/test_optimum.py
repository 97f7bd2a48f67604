"""The offline optimum's parts: what a load repeats, and rows that know what is to come."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.simulated.optimum import LOADS, Case, Load, known_beginnings, measure, trace_of
from edged.lab.bench.summary import ATTAINMENT
from edged.lab.bench.traces import Arrival


def test_beginnings_of_earlier_prompts_are_known_but_for_a_prompt_s_last_token() -> None:
    first, second = tuple(range(64)), (*range(40), *range(100, 124))
    load = [Arrival(0.0, first, 1), Arrival(1.0, second, 1), Arrival(2.0, first, 1), Arrival(3.0, second[1:], 1)]
    assert list(known_beginnings(load)) == [0, 32, 48, 0]


def test_a_load_whose_file_is_missing_has_no_trace(tmp_path: Path) -> None:
    assert trace_of(Load("none.csv", (1.0,)), tmp_path, 0) is None
    assert trace_of(LOADS["chat"], tmp_path, 0) is not None


@pytest.mark.slow
def test_no_policy_has_more_than_the_optimum(tmp_path: Path) -> None:
    trace = trace_of(LOADS["agents"], tmp_path, 0)
    assert trace is not None
    found = measure(Case(LOADS["agents"], trace, 0.8, 60.0, 0), ["fcfs", "mace"])
    shares = [each[ATTAINMENT.path] for each in found["policies"].values()]
    assert max(shares) <= found["reached"] <= found["at_most"] <= 1.0
