"""Pairs are judged by the adapter's own latest ones; a burst of suspicious ones is found, a single one is not."""

from __future__ import annotations

import math
import pickle
from dataclasses import replace

import pytest

from edged.align.feedback import outliers
from edged.align.feedback.outliers import OutlierDetector, OutlierHistory, Verdict
from edged.align.feedback.pair import TokenPair
from edged.align.pair_queues import AdapterQueue
from edged.runtime.token_bucket import TokenBucket
from edged.settings.load import FeedbackSettings, GuardSettings

USUAL = [0.1, 0.2, 0.3, 0.2] * 16
GUARD = GuardSettings(held_out_share=0.5)


def pair(number: int = 1, chosen: int = 5, rejected: int = 9, length: int = 12, **more: object) -> TokenPair:
    return TokenPair(number, "ann", (1, number), (chosen,) * length, (rejected,) * length, **more)  # type: ignore[arg-type]


def suspicion(losses: list[float] = USUAL, norms: list[float] | None = None, **settings: object) -> OutlierDetector:
    made = OutlierDetector(FeedbackSettings(**settings))  # type: ignore[arg-type]
    made.restore(OutlierHistory(losses, norms or []), 0.0)
    return made


@pytest.mark.parametrize(
    ("loss", "suspicious", "left_out"),
    [(0.69, False, False), (0.99, False, False), (1.2, True, False), (3.9, True, False), (4.5, True, True)],
)
def test_a_loss_is_judged_by_the_latest_ones(loss: float, suspicious: bool, left_out: bool) -> None:
    verdict = suspicion().judge(pair(), loss)
    assert (verdict.suspicious, bool(verdict.why)) == (suspicious, left_out)


def test_where_losses_scatter_more_is_usual() -> None:
    assert not suspicion([0.1, 1.0, 2.0, 3.0] * 16).judge(pair(), 5.0).suspicious


def test_nobody_is_judged_before_enough_is_known() -> None:
    assert suspicion(USUAL[:31]).judge(pair(), 50.0) == Verdict()
    assert suspicion(USUAL[:32]).judge(pair(), 50.0).why


def test_released_later_and_not_finite_pairs_are_not_judged() -> None:
    judge = suspicion().judge
    assert judge(pair(trusted=True), 50.0) == judge(pair(epochs_done=1), 50.0) == judge(pair(), math.nan) == Verdict()
    assert suspicion(quarantine=False).judge(pair(), 50.0) == Verdict()


def test_the_opposite_of_what_was_said_is_contradictory() -> None:
    made = suspicion([])
    assert not made.note(pair(1))
    assert not made.note(pair(1)), "the same again is no contradiction"
    assert made.note(pair(2, 9, 5)), "the same two answers to another prompt are long enough to mean the same"
    assert made.judge(pair(2, 9, 5), 0.1) == Verdict(True)
    assert not made.note(pair(3, 4, 5)), "another answer that is better than the better one"
    assert not made.note(pair(4, length=3))
    assert not made.note(pair(5, 9, 5, length=3)), '"yes" and "no" depend on the question'


def test_what_was_said_takes_little_memory_however_long_it_was() -> None:
    made = suspicion([])
    for number in range(300):
        made.note(pair(number, number, number + 1000, length=2000))
    assert len(pickle.dumps(made)) < 64 << 10
    assert made.note(pair(400, 1299, 299, length=2000)), "and is remembered"
    assert not made.note(pair(401, 1000, 0, length=2000)), "but not for ever"


def test_half_of_eight_make_a_burst_whoever_came_first() -> None:
    made = suspicion()
    made.learn([(pair(i), 0.2, Verdict(i < 2)) for i in range(4)], None)
    assert not made.burst([Verdict(True), Verdict()])
    assert made.burst([Verdict(True)] * 2).startswith("burst: 4 of the latest 6 pairs")
    made.learn([(pair(i), 0.2, Verdict()) for i in range(10, 18)], None)
    assert not made.burst([Verdict(True)] * 3), "the earlier ones are long ago"


def test_none_of_the_users_own_signals_is_left_out_by_itself() -> None:
    assert suspicion().judge(pair(first_party=True), 50.0) == Verdict(True)


def test_chance_between_answers_that_are_liked_alike_contradicts_nothing() -> None:
    judged, queue = suspicion(), AdapterQueue("ann", suspicion())
    assert judged.judge(pair(alike=True), 50.0, -1.0) == Verdict()
    assert judged.judge(pair(), 1.2, -1.0).contrary
    judged.learn([(pair(i, alike=True), 50.0, Verdict()) for i in range(64)], None)
    assert judged.judge(pair(), 1.2).suspicious, "nor do they widen what is usual"
    assert queue.enqueue(pair(alike=True), GuardSettings(held_out_share=1.0), 0.0) is None, "no test asks chance"


def test_only_a_norm_far_beyond_the_latest_ones_is_refused() -> None:
    norms = [1.0, 1.5, 2.0, 3.0] * 8
    assert suspicion(norms=norms[:31]).max_norm() == math.inf
    assert 20 < suspicion(norms=norms).max_norm() < 1000


def test_suspicious_losses_do_not_become_usual() -> None:
    made = suspicion()
    made.learn([(pair(i), 50.0, Verdict(True)) for i in range(64)], None)
    assert made.judge(pair(), 50.0).why


def test_an_alarm_holds_new_pairs_and_ends_by_itself_or_by_a_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outliers, "ALARM_S", 100.0)
    queue = AdapterQueue("ann", suspicion())
    assert queue.enqueue(pair(1), GUARD, 0.0) is None
    held_out = queue.enqueue(pair(2), GUARD, 0.0)
    assert held_out == ("held_out", "")
    assert [gone.pair_id for gone in queue.hold_burst(10.0)] == [1, 2], "nothing of a burst is left in a test"
    assert not queue.queue
    assert not queue.held_out
    assert queue.enqueue(pair(3), GUARD, 109.0) is not None
    assert queue.enqueue(pair(4, trusted=True), GUARD, 109.0) is None
    queue.enqueue(pair(5), GUARD, 111.0)
    assert 5 in {waits.pair_id for waits in (*queue.queue, *queue.held_out.values())}
    queue.hold_burst(200.0)
    queue.detector.clear_alarm()
    queue.enqueue(pair(6), GUARD, 201.0)
    assert 6 in {waits.pair_id for waits in (*queue.queue, *queue.held_out.values())}


def test_contradictory_and_released_pairs_are_never_held_out() -> None:
    everything = GuardSettings(held_out_share=1.0)
    queue = AdapterQueue("ann", suspicion())
    assert queue.enqueue(pair(1), everything, 0.0) == ("held_out", "")
    assert queue.enqueue(pair(2, 9, 5), everything, 0.0) is None
    assert queue.enqueue(replace(pair(3), trusted=True), everything, 0.0) is None
    assert [waits.pair_id for waits in queue.queue] == [2, 3]


def test_an_hours_worth_at_once_then_one_after_the_other() -> None:
    def take(rate: TokenBucket, now: float) -> bool:
        may = not rate.wait_s(now)
        if may:
            rate.take(now)
        return may

    rate, unlimited = TokenBucket(60), TokenBucket()
    assert [take(rate, 0.0) for _ in range(61)] == [True] * 60 + [False]
    assert rate.wait_s(0.0) == pytest.approx(60.0)
    assert not take(rate, 59.0)
    assert take(rate, 59.0 + rate.wait_s(59.0))
    assert not take(rate, 60.0)
    assert all(take(unlimited, 0.0) for _ in range(5000))


def test_pairs_beyond_the_rate_wait_in_their_order() -> None:
    queue = AdapterQueue("ann", rate=TokenBucket(2))
    for number in range(4):
        queue.enqueue(pair(number), GuardSettings(held_out_share=0.0), 0.0)
    assert [waits.pair_id for waits in queue.queue] == [0, 1]
    queue.admit(1800.0)
    assert [waits.pair_id for waits in queue.queue] == [0, 1, 2]
    assert [waits.pair_id for waits in queue.waiting] == [3]


def test_single_ratings_are_neither_judged_nor_usual_but_an_alarm_holds_them() -> None:
    made = suspicion()
    up, down = pair(1, length=12), pair(2)
    up, down = replace(up, rejected=()), replace(down, chosen=())
    assert made.judge(up, 50.0, -1.0) == made.judge(down, 50.0, -1.0) == Verdict()
    assert not made.note(up)
    assert not made.note(replace(up, pair_id=3, chosen=(), rejected=up.chosen))
    made.learn([(up, 50.0, Verdict())] * 64, None)
    assert made.judge(pair(), 4.5).why, "their losses did not become usual"
    queue = AdapterQueue("ann", made)
    made.raise_alarm(0.0)
    held = queue.enqueue(up, GUARD, 1.0)
    assert held is not None
    assert held[0] == "quarantined"
