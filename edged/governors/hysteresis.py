"""Levels with hysteresis: down at once, up a level at a time.

The clock is passed in.
"""

from __future__ import annotations

from collections.abc import Sequence


class Hysteresis:
    """One of a few levels, which follows what is wanted: at once where that is less, slowly where it is more."""

    __slots__ = ("_better_since_s", "_hold_s", "_levels", "level")

    def __init__(self, levels: Sequence[float], hold_s: float) -> None:
        """`levels` from the highest, where it starts, to the lowest; `hold_s` before each level up."""
        self._levels, self._hold_s = tuple(levels), hold_s
        self._better_since_s: float | None = None
        self.level = self._levels[0]

    def follow(self, worst: float, easy: float, now: float) -> float:
        """The level after a reading: at most `worst`; higher only once every reading for `hold_s` had a higher `easy`.

        `easy` is what is wanted with a margin, so at most `worst`: a reading between the two changes nothing.
        """
        if worst < self.level:
            self.level = max(level for level in self._levels if level <= worst)
            self._better_since_s = None
        elif easy <= self.level:
            self._better_since_s = None
        elif self._better_since_s is None:
            self._better_since_s = now
        elif now - self._better_since_s >= self._hold_s:
            self.level = min(level for level in self._levels if level > self.level)
            self._better_since_s = now
        return self.level
