"""The pacer: text reaches its reader a word at a time, however unevenly it is made (Andes 2.5)."""

import math
import re
from collections import deque

LAG_S = 0.4
"""Seconds within which most of what is held back leaves, however slow the reader is."""
_UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u2e80-\ud7ff\uf900-\ufaff\uff00-\uffef\U0001f000-\U0003ffff"
"""Scripts without spaces between words, and emoji: each character is a piece."""
_MARKS = (
    "\u0e31\u0e34-\u0e3a\u0e47-\u0e4e\u0eb1\u0eb4-\u0ebc\u0ec8-\u0ece\u102b-\u103e\u17b4-\u17d3"
    "\u3099\u309a\ufe00-\ufe0f\U0001f3fb-\U0001f3ff"
)
"""What belongs to the character before it."""
_FLAG = "[\U0001f1e6-\U0001f1ff]{2}"
_PIECE = re.compile(rf"{_FLAG}|(?!\s)[{_UNSPACED}][{_MARKS}]*(?:\u200d.[{_MARKS}]*)*|[^\s{_UNSPACED}]+")
"""A piece without the white space before it: a pattern that began with that would take the square of its length."""


def count_words(text: str) -> int:
    """Return the words of a text, or characters where a script has no spaces."""
    return sum(1 for _ in _PIECE.finditer(text))


class Pacer:
    """Text on its way to a reader: words, or characters where a script has no spaces.

    What finds nobody before it leaves at once; the next ones at the reader's pace, or as much faster as keeps them from
    waiting for longer than `lag_s`.
    """

    def __init__(self, words_per_s: float, lag_s: float = LAG_S) -> None:
        self._pace, self._lag_s = words_per_s, lag_s
        self._pieces: deque[str] = deque()
        self._rest = ""
        """White space after the last piece, which leaves with the next one."""
        self._left_s = -math.inf
        """Moment at which the latest piece left, or would have."""
        self._open_s = -math.inf
        """Moment since which there are pieces."""

    def push(self, text: str, now: float) -> None:
        """Take text that was made by `now`."""
        if not self._pieces:
            self._open_s = now
        end, searched = 0, len(self._rest)
        # A piece with nothing after it may go on.
        text = (self._rest or (self._pieces.pop() if self._pieces else "")) + text
        for piece in _PIECE.finditer(text, searched):
            self._pieces.append(text[end : piece.end()])
            end = piece.end()
        self._rest = text[end:]

    @property
    def due_s(self) -> float:
        """Moment at which the next piece leaves; inf while there is none."""
        if not self._pieces:
            return math.inf
        return max(self._open_s, self._left_s + 1.0 / max(self._pace, len(self._pieces) / self._lag_s))

    def take(self, now: float) -> str:
        """Return what leaves by `now`."""
        taken = ""
        while (due_s := self.due_s) <= now:
            taken += self._pieces.popleft()
            self._left_s = due_s
        return taken

    def finish(self) -> str:
        """Return all that is left, at the end of the text."""
        left = "".join(self._pieces) + self._rest
        self._pieces.clear()
        self._rest = ""
        return left
