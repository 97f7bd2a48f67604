"""The time of an iteration is divided among what was in it."""

from __future__ import annotations

import pytest

from edged.engine.stats.counters import Counters, split
from edged.scheduler.cost.model import CostModel, roofline
from edged.scheduler.task import FinetuneTask, IterationResult, Kind, Plan, ServingTask, TaskOutcome, Unit

COST = CostModel(roofline(parameters=1_000_000_000, flops_per_s=1e13, bytes_per_s=1e11))


def outcome(kind: Kind, tokens: int) -> TaskOutcome:
    task = FinetuneTask(1, 0.0, tokens) if kind is Kind.FINETUNE else ServingTask(1, kind, 0.0, tokens)
    return TaskOutcome(task, tokens, 0, kind)


def test_the_parts_add_up_to_the_forward_and_the_units() -> None:
    members = [outcome(Kind.PREFILL, 400), outcome(Kind.DECODE, 1), outcome(Kind.FINETUNE, 300)]
    prefill_s, decode_s, finetune_s = split(COST, IterationResult(members, 0.2, [(Unit("layer", 300), 0.05)]))
    assert prefill_s + decode_s + finetune_s == pytest.approx(0.25)
    assert prefill_s > decode_s > 0.0
    # Of 700 tokens beyond the knee, 300 are fine-tuning's; decode shares the reading of the weights.
    assert 0.05 + 0.2 * 0.2 < finetune_s < 0.05 + 0.2 * 0.5


@pytest.mark.parametrize(("kind", "place"), [(Kind.PREFILL, 0), (Kind.DECODE, 1), (Kind.FINETUNE, 2)])
def test_a_forward_of_one_kind_is_all_its_own(kind: Kind, place: int) -> None:
    expected = [0.0, 0.0, 0.0]
    expected[place] = 0.1
    assert split(COST, IterationResult([outcome(kind, 1)], 0.1)) == pytest.approx(tuple(expected))


def test_iterations_are_counted_by_what_they_hold() -> None:
    counters = Counters()
    counters.decision_ms.append(0.1)
    for result, elapsed_s in (
        (IterationResult([outcome(Kind.DECODE, 1)], 0.1), 0.2),
        (IterationResult([outcome(Kind.DECODE, 1)], 0.1, [(Unit("head", 8), 0.1)]), 0.4),
        (IterationResult([], 0.0, [(Unit("head", 8), 0.1)]), 0.1),
    ):
        counters.record(Plan(), result, COST, 0.0, elapsed_s, free_pages=0, waiting=0)
    assert counters.busy.iterations == {"serving": 1, "finetune": 1, "hybrid": 1}
    assert counters.busy.iteration_s == {"serving": 0.2, "finetune": 0.1, "hybrid": 0.4}
