"""The token bucket: limits of what may happen in an hour or a minute."""

import math

_HAIR = 1e-9
"""Most that may lack of a wanted amount, so that rounding never makes a caller wait twice."""


class TokenBucket:
    """A bucket that holds at most `most` tokens, gains as many in `period_s` seconds, and is full at first.

    `most` 0 is no limit. It may be overdrawn by what is taken at once. `now` is of any clock that counts seconds.
    """

    __slots__ = ("_level", "_period_s", "_seen_s", "most")

    def __init__(self, most: float = 0, period_s: float = 3600.0) -> None:
        self.most = most or math.inf
        self._level, self._period_s, self._seen_s = self.most, period_s, -math.inf

    def level(self, now: float) -> float:
        """Return the tokens in it."""
        if now > self._seen_s:
            gained = (now - self._seen_s) * self.most / self._period_s
            self._level, self._seen_s = min(self.most, self._level + gained), now
        return self._level

    def take(self, now: float, amount: float = 1.0) -> None:
        """Take tokens out, or put them back where `amount` is negative."""
        self._level = min(self.most, self.level(now) - amount)

    def wait_s(self, now: float, wanted: float = 1.0) -> float:
        """Return the seconds until `wanted` tokens are in it; 0.0 where they are."""
        missing = wanted - self.level(now)
        return missing * self._period_s / self.most if missing > _HAIR else 0.0
