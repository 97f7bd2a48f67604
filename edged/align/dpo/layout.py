"""The layout of a prompt and its answers as one sequence: the prompt once, then each answer as a branch.

The flat order is [prompt | first answer | second answer | ...]. A token of an answer sees the prompt and its own
answer: the rows of the answers before are hidden from it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from edged.align.dpo.loss import scores_prompt
from edged.align.feedback.pair import TokenPair
from edged.settings.load import AlignSettings


@dataclass(frozen=True, slots=True)
class Piece:
    """A run [start, stop) of one layout's flat tokens that attend alike.

    `position` is the first token's position id; `hidden` are the flat rows [start, stop) that it does not attend to.
    """

    start: int
    stop: int
    position: int
    hidden: tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class Layout:
    """The lengths of a prompt and of its answers, any of which may be 0, and the flat token ids."""

    prompt: int
    answers: tuple[int, ...]
    ids: np.ndarray
    with_prompt: bool = False
    """Whether the prompt's own predictions are scored, too, after those of the answers."""

    @classmethod
    def of(cls, pair: TokenPair, align: AlignSettings) -> Layout:
        """The layout of a tokenised pair, for the loss of these settings."""
        flat = np.array((*pair.prompt, *pair.chosen, *pair.rejected), np.int64)
        answers = (len(pair.chosen), len(pair.rejected))
        return cls(len(pair.prompt), answers, flat, scores_prompt(align, pair))

    @property
    def num_tokens(self) -> int:
        """Tokens that one forward computes."""
        return self.prompt + sum(self.answers)

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Flat rows [start, stop) of each answer."""
        return list(pairwise(accumulate(self.answers, initial=self.prompt)))

    def pieces(self, start: int, stop: int, forks: bool = False) -> Iterator[Piece]:
        """Flat tokens [start, stop), cut where an answer begins that others are hidden from.

        Prompt and first answer are one run, unless the state after the prompt is needed for its `forks`.
        """
        if forks and start < min(stop, self.prompt):
            yield Piece(start, min(stop, self.prompt), start, None)
        for index, (fork, end) in enumerate(self.spans):
            first, last = max(start, fork if index or forks else 0), min(stop, end)
            if first < last:
                hidden = (self.prompt, fork) if fork > self.prompt else None
                yield Piece(first, last, first - (fork - self.prompt), hidden)

    @property
    def scored_tokens(self) -> list[int]:
        """Number of `scored_rows` of each text."""
        skip = 0 if self.prompt else 1
        answers = [max(length - skip, 0) for length in self.answers]
        return [*answers, max(self.prompt - 1, 0)] if self.with_prompt else answers

    def scored_rows(self) -> list[np.ndarray]:
        """Flat rows whose next-token prediction is scored, by text: the answers and, where it is scored, the prompt.

        Row i of an answer predicts its token i; without a prompt an answer's first token has no predictor and is left
        out, as in any causal LM loss.
        """
        first = [self.prompt - 1] if self.prompt else []
        rows = [np.array([*first, *range(start, stop - 1)][: stop - start], np.int64) for start, stop in self.spans]
        return [*rows, np.arange(max(self.prompt - 1, 0))] if self.with_prompt else rows

    def targets(self) -> list[np.ndarray]:
        """The token ids that `scored_rows` predict."""
        skip = 0 if self.prompt else 1
        targets = [self.ids[start + skip : stop] for start, stop in self.spans]
        return [*targets, self.ids[1 : self.prompt]] if self.with_prompt else targets
