"""What an adapter's steps and tests change of it when they end."""

from __future__ import annotations

from edged.align.dpo import DpoStep
from edged.align.held_out import HeldOutTest
from edged.align.learner import Learner


def test_a_test_that_ends_is_no_step() -> None:
    learner = Learner("ann", alone=True)
    learner.step = HeldOutTest.__new__(HeldOutTest)
    learner.end()
    assert (learner.step, learner.alone, learner.steps) == (None, True, 0)
    learner.step = DpoStep.__new__(DpoStep)
    learner.end()
    assert (learner.step, learner.alone, learner.steps) == (None, False, 1)
