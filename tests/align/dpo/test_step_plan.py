"""A step's units are planned without tensors, and follow the pairs that turn out to have a part in its gradient."""

from __future__ import annotations

import subprocess
import sys

import pytest

from edged.align.dpo.step_plan import StepPlan
from edged.align.feedback.pair import TokenPair
from edged.settings.load import AlignSettings

PAIRS = [TokenPair(number, "ann", (1,) * 20, (2,) * 6, (3,) * 4) for number in range(3)]


def plan(keeps_graph: bool) -> StepPlan:
    """Of two layers, where the first pair alone needs a reference; two pairs of 30 tokens make a group."""
    align = AlignSettings(window_tokens=60 if keeps_graph else 30)
    return StepPlan(PAIRS, lambda pair: pair.pair_id == 0, align, 2, 100, 1000, keeps_graph)


def test_a_group_that_computes_layers_again_has_a_unit_for_each_layer_and_window() -> None:
    made = plan(keeps_graph=False)
    assert made.units == [("score", 10), ("head", 20), *[("layer", 30)] * 4]
    assert made.begin_backward([(0, 30)]) == [(0, 30)]
    assert made.units == [("layer", 30)] * 2, "the other pair is known well enough"
    made.next_group()
    assert made.units == [("head", 10), *[("layer", 30)] * 2, ("step", 1)]
    made.begin_backward([])
    assert made.units == [("step", 1)]
    assert made.group_ended


def test_a_kept_graph_goes_back_as_a_whole() -> None:
    made = plan(keeps_graph=True)
    assert made.units == [*[("graph", 60)] * 2, ("score", 10), ("head", 20), *[("grad", 60)] * 2]
    made.begin_backward([(30, 60)])
    assert made.units == [("grad", 60)] * 2


@pytest.mark.parametrize(
    ("loss", "rejected", "scored"),
    [("sft", (), 6), ("sigmoid", (3,) * 4, 6 + 4), ("simpo", (3,) * 4, 6 + 4), ("orpo", (3,) * 4, 6 + 4 + 19)],
)
def test_logits_are_computed_of_the_rows_that_a_loss_scores(loss: str, rejected: tuple[int, ...], scored: int) -> None:
    pair = TokenPair(1, "ann", (1,) * 20, (2,) * 6, rejected)
    align = AlignSettings(window_tokens=60, loss=loss)
    made = StepPlan([pair], lambda pair: False, align, 2, 100, 1000, keeps_graph=False)
    assert made.units == [("head", scored), *[("layer", pair.num_tokens)] * 2, ("step", 1)]


def test_planning_takes_no_torch() -> None:
    code = "import sys, edged.align.dpo.step_plan; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
