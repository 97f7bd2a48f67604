"""Which versions the guard takes back."""

from __future__ import annotations

import pytest

from edged.align.feedback.pair import PairScored
from edged.align.guard import TestScore, broken_language, lost_accuracy
from edged.settings.load import GuardSettings

SETTINGS = GuardSettings(max_kl_nats=1.0, max_nll_change=0.1)


def score(version: int, right: int, of: int, first: int = 0) -> TestScore:
    """A test of pairs `first`, `first` + 1, ..., of which the first `right` were right."""
    return TestScore(version, {first + index: float(index < right) for index in range(of)}, 0.1)


BEST = score(3, 9, 10)


@pytest.mark.parametrize(
    ("kl_nats", "nll_change", "reason"),
    [
        (0.9, 0.09, ""),
        (None, None, ""),
        (1.1, 0.0, "KL to the base is 1.10 nats a token, the bound is 1"),
        (float("nan"), 0.0, "KL to the base"),
        (None, 0.25, "NLL of neutral text is +25%, the bound is +10%"),
        (0.0, float("nan"), "NLL of neutral text"),
    ],
)
def test_language_is_broken_beyond_the_bounds(kl_nats: float | None, nll_change: float | None, reason: str) -> None:
    got = broken_language(TestScore(4, {}, kl_nats, nll_change), SETTINGS)
    assert (reason in got) if reason else got == ""


@pytest.mark.parametrize(
    ("found", "best", "reason"),
    [
        (score(4, 9, 10), BEST, ""),
        (score(4, 7, 10), BEST, ""),
        (score(4, 4, 10), BEST, "reward accuracy fell from 0.90 (version 3) to 0.40 on 10 pairs"),
        (score(4, 0, 10), None, ""),
        # Three of ten more are wrong: that may be chance.
        (score(4, 6, 10), BEST, ""),
        # Only pairs that both versions were tested on can tell a loss.
        (score(4, 0, 10, first=7), BEST, ""),
        (score(4, 4, 16), score(3, 4, 4), ""),
    ],
)
def test_a_loss_of_accuracy_must_be_large_and_no_chance(found: TestScore, best: TestScore | None, reason: str) -> None:
    got = lost_accuracy(found, best)
    assert (reason in got) if reason else got == ""


def test_a_lucky_test_of_few_pairs_never_becomes_the_measure_of_later_versions() -> None:
    assert not score(1, 1, 1).better_than(None)
    assert score(2, 2, 4).better_than(None)


def test_the_best_is_replaced_by_what_is_as_good_on_the_pairs_of_both() -> None:
    assert score(4, 9, 16).better_than(BEST)
    assert not score(4, 8, 16).better_than(BEST)


def test_a_score_is_the_mean_over_pairs_its_kl_over_tokens_and_an_untrained_adapter_is_even() -> None:
    def scored(pair: int, margin: float, kl: float, tokens: int = 0) -> PairScored:
        lengths = {"chosen_tokens": tokens, "rejected_tokens": tokens}
        return PairScored(pair, "ann", 2, "held_out", 0, 0, 0, 0, margin, 0.7, kl, **lengths)

    found = TestScore.of(2, [scored(1, 0.3, 1.0, 30), scored(2, -0.1, 3.0, 10)], (2.2, 2.0))
    assert (found.accuracy((1, 2)), found.kl_nats) == (0.5, 1.5)
    assert found.nll_change == pytest.approx(0.1)
    assert TestScore.of(0, [scored(1, 0.0, 0.0)]).accuracy((1,)) == 0.5
    assert TestScore.of(1, [], (2.0, 2.0)).kl_nats is None


def test_ratings_are_right_on_their_side_of_the_middle_however_far_all_answers_have_moved() -> None:
    def rated(pair: int, good: bool, reward: float) -> PairScored:
        lengths = {"chosen_tokens": 9 * good, "rejected_tokens": 9 * (not good)}
        return PairScored(pair, "ann", 2, "held_out", 0, 0, 0, 0, reward if good else -reward, 0.5, 0.1, **lengths)

    for moved in (-5.0, 0.0, 5.0):
        rewards = [(1, True, 1.0), (2, True, -2.0), (3, False, -0.9), (4, False, -2.0)]
        found = TestScore.of(2, [rated(pair, good, reward + moved) for pair, good, reward in rewards])
        assert found.correct == {1: 1.0, 2: 0.0, 3: 0.0, 4: 1.0}, "the middle is -0.975"
    assert TestScore.of(2, [rated(1, True, -3.0)]).correct == {1: 0.5}, "with nothing to compare it to"
    assert set(TestScore.of(0, [rated(1, True, 0.0), rated(2, False, 0.0)]).correct.values()) == {0.5}
