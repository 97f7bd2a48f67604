"""What one user may take: counts by the minute with a clock that the test turns."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edged.api import admission as module
from edged.api.admission import LimitReached, UserLimits
from edged.runtime.token_bucket import TokenBucket
from edged.settings.load import LimitSettings


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def make(clock: Clock, **settings: int) -> UserLimits:
    return UserLimits(LimitSettings.model_validate(settings), clock)


def test_requests_come_back_with_the_minute(clock: Clock) -> None:
    limits = make(clock, requests_per_minute=2)
    limits.begin("ann", 1, 10)
    limits.begin("ann", 1, 10)
    with pytest.raises(LimitReached, match=r'user "ann" has reached limits.requests_per_minute = 2') as reached:
        limits.begin("ann", 1, 10)
    assert reached.value.retry_after_s == pytest.approx(30.0)
    limits.begin("bob", 1, 10)
    clock.now += 30.0
    limits.begin("ann", 1, 10)
    with pytest.raises(LimitReached):
        limits.begin("ann", 1, 10)


def test_tokens_are_taken_for_the_longest_answer_and_what_was_not_used_comes_back(clock: Clock) -> None:
    limits = make(clock, tokens_per_minute=600)
    limits.begin("ann", 1, 1000)
    with pytest.raises(LimitReached) as reached:
        limits.begin("ann", 1, 1)
    assert reached.value.retry_after_s == pytest.approx(40.1)
    limits.end("ann", 1, unused_tokens=500)
    limits.begin("ann", 1, 50)
    assert limits.headers("ann")["x-ratelimit-remaining-tokens"] == "50"


def test_answers_at_once_are_bounded_but_one_request_may_always_go(clock: Clock) -> None:
    limits = make(clock, concurrent_requests=4)
    limits.begin("ann", 8, 1)
    with pytest.raises(LimitReached, match="concurrent_requests"):
        limits.begin("ann", 1, 1)
    limits.end("ann", 8, 0)
    limits.begin("ann", 3, 1)
    limits.begin("ann", 1, 1)


def test_a_refused_request_counts_for_nothing(clock: Clock) -> None:
    limits = make(clock, requests_per_minute=1, concurrent_requests=2)
    limits.begin("ann", 1, 0)
    for _ in range(5):
        with pytest.raises(LimitReached):
            limits.begin("ann", 1, 0)
    limits.end("ann", 1, 0)
    clock.now += 60
    limits.begin("ann", 2, 0)


def test_asking_whether_a_request_may_begin_counts_nothing(clock: Clock) -> None:
    limits = make(clock, requests_per_minute=2, concurrent_requests=2, tokens_per_minute=10)
    for _ in range(5):
        limits.demand("ann", 1)
    limits.begin("ann", 2, 1)
    with pytest.raises(LimitReached, match="concurrent_requests"):
        limits.demand("ann", 1)
    limits.end("ann", 2, 0)
    limits.demand("ann", 1)
    limits.begin("ann", 1, 100)
    with pytest.raises(LimitReached, match="requests_per_minute"):
        limits.demand("ann", 1)
    clock.now += 60
    with pytest.raises(LimitReached, match="tokens_per_minute"):
        limits.demand("ann", 1)


def test_feedback_has_its_own_count(clock: Clock) -> None:
    limits = make(clock, feedback_per_minute=1, requests_per_minute=1)
    limits.begin("ann", 1, 1)
    limits.feedback("ann")
    with pytest.raises(LimitReached, match="feedback_per_minute"):
        limits.feedback("ann")


def test_feedback_that_did_not_come_about_is_given_back(clock: Clock) -> None:
    limits = make(clock, feedback_per_minute=1)
    limits.feedback("ann")
    limits.no_feedback("ann")
    limits.no_feedback("ann")
    limits.feedback("ann")
    with pytest.raises(LimitReached):
        limits.feedback("ann")


def test_without_settings_nothing_is_limited(clock: Clock) -> None:
    limits = make(clock)
    for _ in range(10_000):
        limits.begin("ann", 100, 10**9)
        limits.feedback("ann")
    assert limits.headers("ann") == {}


def test_many_users_are_not_all_remembered_and_those_with_open_requests_are(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MAX_USERS", 100)
    limits = make(clock, requests_per_minute=1)
    limits.begin("first", 1, 1)
    for i in range(1000):
        limits.feedback(f"user{i}")
    assert len(limits) <= 101
    with pytest.raises(LimitReached):
        limits.begin("first", 1, 1)


def test_a_clock_that_goes_backwards_gives_nothing_away() -> None:
    bucket = TokenBucket(60, 60.0)
    bucket.take(100.0, 60)
    assert bucket.level(now=50.0) == 0.0
    assert bucket.level(now=101.0) == pytest.approx(1.0)


@given(st.lists(st.tuples(st.floats(0, 30), st.floats(-20, 50)), max_size=50))
def test_a_bucket_never_holds_more_than_a_minute(steps: list[tuple[float, float]]) -> None:
    bucket, now = TokenBucket(60, 60.0), 0.0
    for passed, amount in steps:
        now += passed
        bucket.take(now, amount)
        assert bucket.level(now) <= 60
        now += bucket.wait_s(now, 30.0)
        assert bucket.level(now) >= 30.0 - 1e-6
