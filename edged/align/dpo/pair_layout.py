"""The layout of a preference pair as one sequence: the prompt once, then both answers as two branches.

The flat order is [prompt | chosen | rejected]. A token of the chosen branch sees everything before it; a token of the
rejected branch sees the prompt and its own branch, so the chosen rows are hidden from it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from edged.align.feedback.pair import TokenPair


@dataclass(frozen=True, slots=True)
class Piece:
    """A run [start, stop) of one pair's flat tokens that attend alike.

    `position` is the first token's position id; `hidden` are the flat rows [start, stop) that it does not attend to.
    """

    start: int
    stop: int
    position: int
    hidden: tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class PairLayout:
    """The lengths of prompt, chosen and rejected, and the flat token ids [prompt + chosen + rejected]."""

    prompt: int
    chosen: int
    rejected: int
    ids: np.ndarray

    @classmethod
    def of(cls, pair: TokenPair) -> PairLayout:
        """The layout of a tokenised pair."""
        flat = np.array((*pair.prompt, *pair.chosen, *pair.rejected), np.int64)
        return cls(len(pair.prompt), len(pair.chosen), len(pair.rejected), flat)

    @property
    def tokens(self) -> int:
        """Tokens that one forward computes."""
        return self.prompt + self.chosen + self.rejected

    def pieces(self, start: int, stop: int) -> Iterator[Piece]:
        """Flat tokens [start, stop), cut where the rejected branch begins."""
        fork = self.prompt + self.chosen
        if start < fork:
            yield Piece(start, min(stop, fork), start, None)
        if stop > fork:
            first = max(start, fork)
            yield Piece(first, stop, first - self.chosen, (self.prompt, fork) if self.chosen else None)

    def scored_rows(self) -> tuple[np.ndarray, np.ndarray]:
        """Flat rows whose next-token prediction is scored: (rows of chosen, rows of rejected).

        Row i of either predicts that answer's token i; without a prompt an answer's first token has no predictor and
        is left out, as in any causal LM loss.
        """
        first = [self.prompt - 1] if self.prompt else []
        chosen = np.array([*first, *range(self.prompt, self.prompt + self.chosen - 1)], np.int64)
        fork = self.prompt + self.chosen
        rejected = np.array([*first, *range(fork, fork + self.rejected - 1)], np.int64)
        return chosen, rejected

    def targets(self) -> tuple[np.ndarray, np.ndarray]:
        """The token ids that `scored_rows` predict."""
        fork = self.prompt + self.chosen
        skip = 0 if self.prompt else 1
        return self.ids[self.prompt + skip : fork], self.ids[fork + skip :]
