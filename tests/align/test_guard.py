"""Which versions the guard takes back."""

from __future__ import annotations

import pytest

from edged.align.guard import HeldOutScore, judge
from edged.align.pair import PairScored
from edged.config import GuardSettings

SETTINGS = GuardSettings(min_pairs=4, max_accuracy_drop=0.25, max_kl_nats=5.0)
BEST = HeldOutScore(3, 0.9, 1.0, 8)


@pytest.mark.parametrize(
    ("score", "best", "reason"),
    [
        (HeldOutScore(4, 0.9, 1.0, 8), BEST, ""),
        (HeldOutScore(4, 0.66, 1.0, 8), BEST, ""),
        (HeldOutScore(4, 0.6, 1.0, 8), BEST, "reward accuracy fell from 0.90 (version 3) to 0.60"),
        (HeldOutScore(4, 0.0, 1.0, 8), None, ""),
        (HeldOutScore(4, 0.9, 5.1, 8), BEST, "KL to the base is 5.10 nats"),
        (HeldOutScore(4, 0.9, float("nan"), 8), BEST, "KL to the base"),
        (HeldOutScore(4, 0.0, 99.0, 3), BEST, ""),
    ],
)
def test_the_bounds(score: HeldOutScore, best: HeldOutScore | None, reason: str) -> None:
    got = judge(score, best, SETTINGS)
    assert (reason in got) if reason else got == ""


def test_a_score_is_the_mean_over_pairs_and_an_untrained_adapter_is_even() -> None:
    def scored(margin: float, kl: float) -> PairScored:
        return PairScored(1, "ann", 2, "held_out", 0, 0, 0, 0, margin, 0.7, kl)

    assert HeldOutScore.of(2, [scored(0.3, 1.0), scored(-0.1, 3.0)]) == HeldOutScore(2, 0.5, 2.0, 2)
    assert HeldOutScore.of(0, [scored(0.0, 0.0)]).accuracy == 0.5
