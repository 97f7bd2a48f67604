"""The choice of a start: by what pairs say, more than chance and the own adapter; what rests, and who is left alone."""

from __future__ import annotations

import pytest

from edged.align.feedback.pair import PairScored
from edged.align.starts import Start, StartChoice
from edged.runtime.chance import by_chance

STARTS = [Start("low", 1, "", 2.0), Start("high", 1, "", 4.0)]


def scored(pair_id: int, margin: float, loss: float = 0.5) -> PairScored:
    about = {"chosen_logp": 0.0, "rejected_logp": 0.0, "ref_chosen_logp": 0.0, "ref_rejected_logp": 0.0}
    return PairScored(
        pair_id, "ann", 0, "prequential", **about, reward_margin=margin, loss=loss, chosen_tokens=5, rejected_tokens=5
    )


def choice(right: int, pairs: int, own: int = 0) -> StartChoice:
    """A user's pairs, of which "low" has some right and "high" none; the own adapter is right on `own`."""
    made = StartChoice()
    made.take_scores(scored(n, 1.0 if n < own else -1.0) for n in range(pairs))
    made.scores = {
        "low": {n: (0.4, 1.0 if n < right else -1.0) for n in range(pairs)},
        "high": {n: (0.9, -1.0) for n in range(pairs)},
    }
    return made


@pytest.mark.parametrize(
    ("right", "pairs", "p"),
    [(4, 4, 0.0625), (3, 4, 0.3125), (6, 8, 0.1445), (5, 8, 0.3633), (11, 16, 0.1051), (10, 16, 0.2272)],
)
def test_a_start_is_taken_where_chance_is_rarely_right_on_as_many(right: int, pairs: int, p: float) -> None:
    """The probabilities are scipy's, of `binomtest(right, pairs, alternative="greater")`."""
    assert by_chance(right, pairs) == pytest.approx(p, abs=1e-4)
    assert choice(right, pairs).judge(STARTS) == ("low" if p <= 0.15 else "")


def test_a_start_is_not_taken_where_the_own_adapter_was_right_on_as_many() -> None:
    assert choice(7, 8, own=6).judge(STARTS) == "low"
    made = choice(7, 8, own=7)
    assert made.judge(STARTS) == ""
    assert made.verdict[0].note == "the user's own adapter was right on 7"


def test_the_start_of_least_loss_is_compared_and_no_other() -> None:
    made = choice(4, 4)
    made.scores["high"] = {n: (0.3, -1.0) for n in range(4)}
    assert made.judge(STARTS) == ""
    assert [score.note for score in made.verdict] == ["high fits better", "chance may be right on as many"]


def test_a_start_that_was_taken_back_rests_for_32_pairs() -> None:
    made = choice(8, 8)
    made.take_version(5, "start low", None)
    made.take_version(6, "guard: KL", 4)
    assert made.start == ""
    assert made.judge(STARTS) == ""
    assert made.verdict[0].note == "it was taken back, and rests for 32 pairs"
    made.learned += 32
    assert made.judge(STARTS) == "low"
    made.take_version(7, "start low", None)
    made.take_version(9, "guard: KL", 8)
    assert made.start == "low", "a version of the start is restored"


def test_imported_adapters_and_users_with_many_pairs_are_left_alone() -> None:
    made = choice(8, 8)
    made.take_version(3, "imported", None)
    assert not made.due(STARTS)
    made.take_version(4, "rollback to 2", 2)
    assert made.due(STARTS)
    made.learned = 257
    assert not made.due(STARTS)


def test_beyond_32_pairs_starts_are_scored_once() -> None:
    made = choice(32, 32)
    assert made.due(STARTS)
    made.judge(STARTS)
    made.take_scores([scored(100, 1.0)])
    assert not made.due(STARTS)
    assert made.due([*STARTS, Start("new", 1, "", 1.0)])
    assert len(made.margins) == 32
    assert not StartChoice().due(STARTS)
    assert not made.due([Start("broken", 1, "", 0.0)]), "nothing to score"
