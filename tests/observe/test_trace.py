"""A trace is valid by Chrome's trace event format, and shows what the records say."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from edged.engine.stats.iterations import Iteration, pack_member
from edged.observe.trace import ENGINE, FINETUNING, ITERATIONS, REQUESTS, UNITS, Tracer
from edged.scheduler.task import FinetuneTask, Kind, TaskOutcome
from tests.engine.harness import random_ids, random_pairs, request, running_engine, wait_idle

TOLERANCE_US = 0.002
"""Two roundings to a nanosecond."""


def check_format(events: list[dict[str, Any]]) -> None:
    """What the format asks of every event; slices of a track nest; all are in order."""
    open_until: dict[tuple[int, int], list[float]] = defaultdict(list)
    latest = 0.0
    for event in events:
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert event["ts"] >= latest, "sorted"
        latest = event["ts"]
        match event["ph"]:
            case "X":
                stack, end = open_until[event["pid"], event["tid"]], event["ts"] + event["dur"]
                assert event["dur"] >= 0
                while stack and stack[-1] <= event["ts"] + TOLERANCE_US:
                    stack.pop()
                assert not stack or end <= stack[-1] + TOLERANCE_US, f"{event} overlaps"
                stack.append(end)
            case "i":
                assert event["s"] in ("g", "p", "t")
            case "C":
                assert event["args"]
                assert all(isinstance(value, int | float) for value in event["args"].values())
            case "M":
                assert event["args"].keys() <= {"name", "sort_index"}
            case other:
                raise AssertionError(f"phase {other}")


def whole(records: list[Iteration], labels: list[Any]) -> list[dict[str, Any]]:
    events = list(chain.from_iterable(Tracer(labels).events(records)))
    parsed: list[dict[str, Any]] = json.loads(json.dumps(events, allow_nan=False))
    return parsed


def iteration(number: int, **changes: Any) -> Iteration:
    values: dict[str, Any] = {
        "number": number,
        "started_s": 10.0 + number,
        "elapsed_s": 0.5,
        "decision_s": 0.01,
        "budget_s": 0.4,
        "predicted_s": 0.3,
        "forward_s": 0.3,
        "units": (),
        "packed": b"",
        "preempted": (),
        "prefill_s": 0.0,
        "decode_s": 0.3,
        "finetune_s": 0.0,
        "free_pages": 7,
        "waiting": 2,
    }
    return Iteration(**{**values, **changes})


def test_what_an_engine_did_is_a_valid_trace_with_a_track_for_every_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # No talk is computed again: its tokens would be of a request more.
    monkeypatch.setattr("edged.engine.renewals._GOES_ON_S", 0.0)
    with running_engine(tmp_path) as (engine, client):
        engine.submit_pairs(random_pairs(8))
        for index in range(3):
            engine.submit(request(f"r{index}", random_ids(20, index), tokens=6, adapter="ann" if index else None))
        client.wait(lambda: len(client.finished) == 3)
        wait_idle(engine)
    records = engine.iterations()
    events = whole(records, list(engine.stats.labels))
    check_format(events)
    slices = [event for event in events if event["ph"] == "X"]
    assert sum(e["pid"] == ENGINE and e["tid"] == ITERATIONS for e in slices) == len(records)
    assert sum(e["pid"] == ENGINE and e["tid"] == UNITS for e in slices) == sum(len(r.units) for r in records)
    assert sum(e["args"]["tokens"] for e in slices if e["pid"] == REQUESTS) == 3 * (20 + 5)
    units = [e for e in slices if e["pid"] == FINETUNING and "context" not in e["args"]]
    assert len(units) == sum(len(record.units) for record in records) > 0
    names = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {"r0", "r1 ann", "r2 ann", "iterations", "units"} <= names
    assert any(name.startswith("task ") and name.endswith(" ann") for name in names)


def test_units_end_with_the_iteration_and_follow_the_forward() -> None:
    member = pack_member(TaskOutcome(FinetuneTask(5, 0.0), 0, 2, Kind.FINETUNE))
    record = iteration(1, units=(("head", 8, 0.05), ("layer", 8, 0.1)), packed=member)
    events = whole([record], [(5, "", "ann")])
    check_format(events)
    units = [e for e in events if e["ph"] == "X" and e["pid"] == ENGINE and e["tid"] == UNITS]
    assert [(e["name"], round(e["ts"]), round(e["dur"])) for e in units] == [
        ("head", 11_350_000, 50_000),
        ("layer", 11_400_000, 100_000),
    ]
    forward = next(e for e in events if e["name"] == "forward")
    assert round(forward["ts"] + forward["dur"]) == 11_350_000


def test_a_decision_made_during_the_iteration_before_stays_in_order() -> None:
    check_format(whole([iteration(1, elapsed_s=0.99), iteration(2, decision_s=0.4), iteration(3)], []))


def test_measured_times_that_do_not_add_up_still_nest() -> None:
    check_format(whole([iteration(1, forward_s=0.6, units=(("layer", 8, 0.7),)), iteration(2)], []))


def test_preempted_tasks_and_counters_are_shown() -> None:
    events = whole([iteration(1, preempted=(9,)), iteration(2, budget_s=None)], [(9, "req", "bob")])
    instant = next(event for event in events if event["ph"] == "i")
    assert instant["args"] == {"task": 9, "request": "req", "adapter": "bob"}
    counters = [(event["name"], event["args"]) for event in events if event["ph"] == "C"]
    assert ("free pages", {"pages": 7}) in counters
    assert ("waiting requests", {"requests": 2}) in counters
    assert sum(name == "budget ms" for name, _ in counters) == 1
