"""What one user may take in a minute, and at once: token buckets."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from edged.settings.load import LimitSettings

_MINUTE_S = 60.0
_MOST_USERS = 10_000
"""Users who are remembered. The one who was away longest goes first: in a minute a bucket is full again anyhow."""


class LimitReached(Exception):
    """A user has taken what the settings allow; `retry_after_s` says when there is more."""

    def __init__(self, user: str, setting: str, limit: int, retry_after_s: float) -> None:
        super().__init__(f'user "{user}" has reached limits.{setting} = {limit}: come again in {retry_after_s:.0f} s')
        self.user, self.retry_after_s = user, retry_after_s


class Bucket:
    """Holds at most `per_minute` and gains as much in a minute. It may be overdrawn by what is asked for at once."""

    __slots__ = ("_level", "_per_minute", "_seen_s")

    def __init__(self, per_minute: int, now: float) -> None:
        self._per_minute, self._level, self._seen_s = per_minute, float(per_minute), now

    def level(self, now: float) -> float:
        """What is in it."""
        gained = max(0.0, now - self._seen_s) * self._per_minute / _MINUTE_S
        self._level, self._seen_s = min(self._per_minute, self._level + gained), max(now, self._seen_s)
        return self._level

    def take(self, amount: float, now: float) -> None:
        """Take something out, or put it back where it is negative."""
        self._level = min(self._per_minute, self.level(now) - amount)

    def wait_s(self, wanted: float, now: float) -> float:
        """How long until `wanted` is in it."""
        return max(0.0, wanted - self.level(now)) * _MINUTE_S / self._per_minute


@dataclass(slots=True)
class _User:
    requests: Bucket | None
    tokens: Bucket | None
    feedback: Bucket | None
    open_choices: int = 0


@dataclass(frozen=True, slots=True)
class Remaining:
    """What is left of one limit, and in how many seconds all of it is there again."""

    limit: int
    left: int
    reset_s: float


class UserLimits:
    """Counts of all users. `begin` a request, `end` it in any case; `feedback` counts one signal or pair."""

    def __init__(self, settings: LimitSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings, self._clock = settings, clock
        self._users: OrderedDict[str, _User] = OrderedDict()

    def configure(self, settings: LimitSettings) -> None:
        """Count by other limits; everybody begins with full buckets again, and what is open stays counted."""
        self._settings = settings
        opened = [(name, user.open_choices) for name, user in self._users.items()]
        self._users.clear()
        for name, choices in opened:
            self._user(name, self._clock()).open_choices = choices

    def __len__(self) -> int:
        """Users who are remembered."""
        return len(self._users)

    def begin(self, user: str, choices: int, tokens: int) -> None:
        """Count a request of `choices` answers and at most `tokens` tokens. Raises LimitReached, and counts nothing.

        The tokens of the longest answers are taken at once, and `end` puts back what was not used: whoever has any left
        may ask for more than a minute holds, but not for several such at once.
        """
        now = self._clock()
        known = self._room(user, choices, now)
        known.open_choices += choices
        for bucket, amount in ((known.requests, 1), (known.tokens, tokens)):
            if bucket is not None:
                bucket.take(amount, now)

    def demand(self, user: str, choices: int) -> None:
        """What `begin` would refuse now, before the work of finding out how many tokens it has. Raises LimitReached."""
        self._room(user, choices, self._clock())

    def _room(self, user: str, choices: int, now: float) -> _User:
        """The user's counts, where one more request may begin. Raises LimitReached."""
        settings, known = self._settings, self._user(user, now)
        most = settings.concurrent_requests
        if most and known.open_choices and known.open_choices + choices > most:
            raise LimitReached(user, "concurrent_requests", most, 1.0)
        if known.requests is not None and (wait_s := known.requests.wait_s(1.0, now)):
            raise LimitReached(user, "requests_per_minute", settings.requests_per_minute, wait_s)
        if known.tokens is not None and (wait_s := known.tokens.wait_s(1.0, now)):
            raise LimitReached(user, "tokens_per_minute", settings.tokens_per_minute, wait_s)
        return known

    def end(self, user: str, choices: int, unused_tokens: int) -> None:
        """A request is over; `unused_tokens` of those that `begin` took were never made."""
        now = self._clock()
        known = self._user(user, now)
        known.open_choices = max(0, known.open_choices - choices)
        if known.tokens is not None:
            known.tokens.take(-unused_tokens, now)

    def feedback(self, user: str) -> None:
        """Count one signal or pair. Raises LimitReached."""
        now = self._clock()
        bucket = self._user(user, now).feedback
        if bucket is None:
            return
        if wait_s := bucket.wait_s(1.0, now):
            raise LimitReached(user, "feedback_per_minute", self._settings.feedback_per_minute, wait_s)
        bucket.take(1, now)

    def no_feedback(self, user: str) -> None:
        """What `feedback` counted did not come about."""
        now = self._clock()
        bucket = self._user(user, now).feedback
        if bucket is not None:
            bucket.take(-1, now)

    def remaining(self, user: str) -> dict[str, Remaining]:
        """What is left of `requests` and `tokens`, where they are limited."""
        now, settings = self._clock(), self._settings
        known = self._user(user, now)
        buckets = {
            "requests": (known.requests, settings.requests_per_minute),
            "tokens": (known.tokens, settings.tokens_per_minute),
        }
        return {
            name: Remaining(limit, max(0, int(bucket.level(now))), bucket.wait_s(limit, now))
            for name, (bucket, limit) in buckets.items()
            if bucket is not None
        }

    def _user(self, name: str, now: float) -> _User:
        known = self._users.get(name)
        if known is None:
            self._make_room()
            known = self._users[name] = _User(*self._buckets(now))
        self._users.move_to_end(name)
        return known

    def _buckets(self, now: float) -> tuple[Bucket | None, Bucket | None, Bucket | None]:
        """Of requests, tokens and feedback; None where there is no limit."""
        settings = self._settings
        rates = (settings.requests_per_minute, settings.tokens_per_minute, settings.feedback_per_minute)
        requests, tokens, feedback = (Bucket(rate, now) if rate else None for rate in rates)
        return requests, tokens, feedback

    def _make_room(self) -> None:
        """Forget whoever was away longest and has nothing open."""
        if len(self._users) >= _MOST_USERS:
            idle = next((name for name, user in self._users.items() if not user.open_choices), None)
            if idle is not None:
                del self._users[idle]
