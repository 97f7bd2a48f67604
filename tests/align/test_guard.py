"""Which versions the guard takes back."""

from __future__ import annotations

import pytest

from edged.align.guard import HeldOutScore, judge
from edged.align.pair import PairScored
from edged.config import GuardSettings

SETTINGS = GuardSettings(min_pairs=4, max_accuracy_drop=0.25, max_kl_nats=5.0)


def score(version: int, right: int, of: int, kl_nats: float = 1.0, first: int = 0) -> HeldOutScore:
    """A test of pairs `first`, `first` + 1, ..., of which the first `right` were right."""
    return HeldOutScore(version, {first + index: float(index < right) for index in range(of)}, kl_nats)


BEST = score(3, 9, 10)


@pytest.mark.parametrize(
    ("found", "best", "reason"),
    [
        (score(4, 9, 10), BEST, ""),
        (score(4, 7, 10), BEST, ""),
        (score(4, 6, 10), BEST, "reward accuracy fell from 0.90 (version 3) to 0.60 on 10 pairs"),
        (score(4, 0, 10), None, ""),
        (score(4, 9, 10, 5.1), BEST, "KL to the base is 5.10 nats"),
        (score(4, 9, 10, float("nan")), BEST, "KL to the base"),
        (score(4, 0, 3, 99.0), BEST, ""),
        # Only pairs that both versions were tested on can tell a loss.
        (score(4, 0, 10, first=7), BEST, ""),
        (score(4, 4, 16), score(3, 4, 4), ""),
    ],
)
def test_the_bounds(found: HeldOutScore, best: HeldOutScore | None, reason: str) -> None:
    got = judge(found, best, SETTINGS)
    assert (reason in got) if reason else got == ""


def test_a_lucky_test_of_few_pairs_never_becomes_the_measure_of_later_versions() -> None:
    assert not score(1, 1, 1).better_than(None, SETTINGS)
    assert score(2, 2, 4).better_than(None, SETTINGS)


def test_the_best_is_replaced_by_what_is_as_good_on_the_pairs_of_both() -> None:
    assert score(4, 9, 16).better_than(BEST, SETTINGS)
    assert not score(4, 8, 16).better_than(BEST, SETTINGS)


def test_a_score_is_the_mean_over_pairs_and_an_untrained_adapter_is_even() -> None:
    def scored(pair: int, margin: float, kl: float) -> PairScored:
        return PairScored(pair, "ann", 2, "held_out", 0, 0, 0, 0, margin, 0.7, kl)

    found = HeldOutScore.of(2, [scored(1, 0.3, 1.0), scored(2, -0.1, 3.0)])
    assert (found.accuracy((1, 2)), found.kl_nats) == (0.5, 2.0)
    assert HeldOutScore.of(0, [scored(1, 0.0, 0.0)]).accuracy((1,)) == 0.5
