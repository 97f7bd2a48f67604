"""The record of an iteration tells what was in it, what it was predicted to take, and what it took."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from edged.engine.stats.counters import Counters
from edged.engine.stats.iterations import KEPT, Iteration, IterationShare
from edged.scheduler.cost.model import CostModel, roofline
from edged.scheduler.task import FinetuneTask, IterationResult, Kind, Plan, ServiceClass, ServingTask, TaskOutcome
from tests.engine.harness import random_ids, random_pairs, request, running_engine, wait_idle

COST = CostModel(roofline(parameters=1_000_000_000, flops_per_s=1e13, bytes_per_s=1e11))


def record_of(counters: Counters, outcomes: list[TaskOutcome], started_s: float = 0.0) -> Iteration:
    counters.decision_ms.append(0.1)
    return counters.record(Plan(), IterationResult(outcomes), COST, started_s, started_s + 0.01, 1, 0)


def test_every_token_served_and_every_unit_trained_is_in_a_record(tmp_path: Path) -> None:
    with running_engine(tmp_path) as (engine, client):
        engine.submit_pairs(random_pairs(8))
        for index in range(3):
            engine.submit(request(f"r{index}", random_ids(20, index), tokens=6))
        client.wait(lambda: len(client.finished) == 3)
        wait_idle(engine)
    records, totals = engine.iterations(), engine.status()["totals"]
    assert [record.number for record in records] == list(range(1, len(records) + 1))
    assert sum(record.num_tokens(Kind.PREFILL) for record in records) == 60
    assert sum(record.num_tokens(Kind.DECODE) for record in records) == 3 * 5
    assert sum(record.num_tokens(Kind.FINETUNE) for record in records) == totals["finetune_tokens"] > 0
    assert sum(unit == "step" for record in records for unit, _, _ in record.units) == totals["optimizer_steps"] > 0
    for record in records:
        spent_s = record.prefill_s + record.decode_s + record.finetune_s
        assert spent_s == pytest.approx(record.forward_s + sum(seconds for _, _, seconds in record.units))
        assert spent_s <= record.elapsed_s
    assert [earlier.started_s for earlier in records] == sorted(record.started_s for record in records)


def test_members_are_read_as_they_were_packed() -> None:
    kinds = [*product((Kind.PREFILL, Kind.DECODE), ServiceClass), (Kind.FINETUNE, ServiceClass.INTERACTIVE)]
    members = [
        IterationShare(kind, 2**40 + place, place, 3, 100_000, service, place % 2 == 0)
        for place, (kind, service) in enumerate(kinds)
    ]
    tasks = [
        *(ServingTask(its.task_id, its.kind, 0.0, context=its.context, service=its.service) for its in members[:-1]),
        FinetuneTask(members[-1].task_id, 0.0, context=100_000),
    ]
    outcomes = [
        TaskOutcome(task, its.num_tokens, its.units, None if its.finished else its.kind)
        for task, its in zip(tasks, members, strict=True)
    ]
    empty, record = record_of(Counters(), []), record_of(Counters(), outcomes)
    assert list(record.members) == members
    assert record.member_count == len(members)
    for kind in Kind:
        assert record.num_tokens(kind) == sum(member.num_tokens for member in members if member.kind is kind) > 0
    assert (list(empty.members), empty.member_count, empty.num_tokens(Kind.DECODE)) == ([], 0, 0)


def test_a_reader_asks_for_what_is_newer_and_the_oldest_are_dropped() -> None:
    counters = Counters()
    for number in range(KEPT + 5):
        record_of(counters, [], float(number))
    assert [record.number for record in counters.since(KEPT + 2)] == [KEPT + 3, KEPT + 4, KEPT + 5]
    assert counters.since(KEPT + 5) == []
    assert counters.since(0)[0].number == 6
    assert [record.number for record in counters.latest(2)] == [KEPT + 4, KEPT + 5]
    assert counters.latest(1)[0].budget_s is None
