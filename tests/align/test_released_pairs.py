"""What was released from quarantine is learned from, or comes before somebody again: it is never lost."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from edged.align.dpo.adapter_step import AdapterStep
from edged.align.dpo.loss import AnswerLogps
from edged.align.feedback.outliers import OutlierDetector, OutlierHistory
from edged.align.feedback.pair import PairRetired, TokenPair
from edged.align.journal import Journal
from edged.align.pair_queues import AdapterQueue
from edged.settings.load import FeedbackSettings
from edged.store import Store, quarantine
from edged.store.feedback import get_pairs
from tests.align.adapters.test_adapter import state
from tests.align.learning import queue_pairs

USUAL = OutlierHistory([0.1, 0.2, 0.3, 0.2] * 16, [1.0, 1.5, 2.0, 3.0] * 8)


def pair(number: int, **more: object) -> TokenPair:
    return TokenPair(number, "ann", (1, number), (5,) * 12, (9,) * 12, **more)  # type: ignore[arg-type]


def stepped(queue: AdapterQueue, *pairs: TokenPair, margin: float = -3.0, gradient: float = 1e4) -> AdapterStep:
    """A step of these pairs that ended; by their `margin` of log-probabilities they are suspicious or usual."""
    adapter_step = AdapterStep(state("ann", beta=1.0), pairs, [], queue.detector)
    for one in pairs:
        adapter_step.add_pair(one, [AnswerLogps(margin, 0.0, 12), AnswerLogps(0.0, 0.0, 12)])
    for total in (tensor for both in adapter_step.gradients.values() for tensor in both):
        total += torch.full_like(total, gradient)
    adapter_step.finish()
    return adapter_step


@pytest.fixture
def queue() -> AdapterQueue:
    made = AdapterQueue("ann", OutlierDetector(FeedbackSettings()))
    made.detector.restore(USUAL, 0.0)
    return made


def test_a_released_pair_is_stepped_however_large_its_gradient_is(queue: AdapterQueue) -> None:
    adapter_step = stepped(queue, pair(1, trusted=True))
    assert (adapter_step.rejected_reason, adapter_step.state.version) == ("", 1)
    assert [record.state for record in queue.finish_step(adapter_step, 1, 1)] == ["trained"]


def test_a_released_pair_beside_others_of_a_strange_step_is_tried_again_without_them(queue: AdapterQueue) -> None:
    adapter_step = stepped(queue, pair(1), pair(2, trusted=True), margin=0.0)
    assert adapter_step.rejected_reason
    assert [(record.pair_id, record.state) for record in queue.finish_step(adapter_step, 0, 1)] == [(1, "quarantined")]
    assert [waits.pair_id for waits in queue.queue] == [2]


def test_a_burst_takes_nothing_with_it_that_was_released_or_learned_from(queue: AdapterQueue) -> None:
    queue.queue.append(pair(9, trusted=True))
    fresh = [pair(1, trusted=True), *(pair(number) for number in range(2, 7)), pair(7, epochs_done=1)]
    adapter_step = stepped(queue, *fresh)
    assert adapter_step.burst
    queue.put_back(adapter_step.fresh)
    assert [held.pair_id for held in queue.hold_burst(0.0)] == [2, 3, 4, 5, 6]
    assert [waits.pair_id for waits in queue.queue] == [1, 7, 9]


@pytest.mark.parametrize("others", [0, 1])
def test_a_burst_of_the_users_own_signals_alone_is_trained_on_and_watched(queue: AdapterQueue, others: int) -> None:
    own = [pair(number, first_party=True) for number in range(8 - others)]
    adapter_step = stepped(queue, *own, *(pair(9 + number) for number in range(others)), gradient=0.01)
    assert adapter_step.turned == (not others), "of mixed ones the others are held"
    assert bool(adapter_step.burst) == bool(others)
    assert adapter_step.state.version == (0 if others else 1)


def test_a_released_pair_that_is_quarantined_again_waits_for_another_decision(tmp_path: Path) -> None:
    store = Store(tmp_path / "edged.db")
    (number,) = queue_pairs(store, 1)
    journal = Journal(store, "base")
    journal.append([PairRetired(number, "ada", "quarantined", 0, 0, "outlying: its loss is 9")])
    store.write(lambda db: quarantine.decide(db, number, "released", "2026-01-01T00:00:00.000Z")).result()
    reason = f"outlying: its loss is {math.nan}"
    journal.append([PairRetired(number, "ada", "quarantined", 1, 0, reason)])
    store.write(lambda db: None).result()
    (listed,) = store.read(quarantine.quarantined)
    assert (listed["pair_id"], listed["reason"]) == (number, reason)
    assert store.read(quarantine.count_quarantined) == 1
    assert store.write(lambda db: quarantine.decide(db, number, "released", "2026-01-02T00:00:00.000Z")).result()
    (row,) = store.read(lambda db: get_pairs(db, [number]))
    assert row.state == "queued"
    store.close()
