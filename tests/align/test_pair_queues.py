"""What an adapter's steps and tests change of it when they end."""

from __future__ import annotations

from edged.align.dpo.evaluation import HeldOutEvaluation
from edged.align.dpo.step import DpoStep
from edged.align.feedback.pair import TokenPair
from edged.align.pair_queues import AdapterQueue
from edged.settings.load import GuardSettings


def test_a_test_that_ends_is_no_step() -> None:
    queue = AdapterQueue("ann", alone=True)
    queue.step = HeldOutEvaluation.__new__(HeldOutEvaluation)
    queue.end()
    assert (queue.step, queue.alone, queue.steps) == (None, True, 0)
    queue.step = DpoStep.__new__(DpoStep)
    queue.end()
    assert (queue.step, queue.alone, queue.steps) == (None, False, 1)


def test_a_pair_whose_version_was_taken_back_waits_once_however_often_it_comes() -> None:
    queue, everything_held_out = AdapterQueue("ann"), GuardSettings(held_out_share=1.0)
    pair = TokenPair(1, "ann", (1,), (2,), (3,), again=True)
    for _ in range(3):
        assert queue.enqueue(pair, everything_held_out, 0.0) is None
    assert list(queue.queue) == [pair]
    assert (queue.new_pairs, queue.held_out) == (0, {}), "it was let in before"
