"""Sampling parameters of a completion, and its token counts for penalties."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from edged.text.grammar import Grammar, GrammarMatcher


@dataclass(frozen=True, slots=True)
class Sampling:
    """The sampling parameters of one completion. Defaults are OpenAI's; `top_k` 0 and `min_p` 0 switch those off.

    `logprobs` is the number of alternatives to report beside the drawn token's log-probability (0-20),
    None to report nothing. Log-probabilities are the model's own, before penalties and temperature.
    `repetition_penalty` is 0.01 to 100, so that float32 scores stay finite.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    prompt_logprobs: bool = False
    """Whether to report those of the prompt's tokens, too, with as many alternatives: no prefix is shared then."""
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    grammar: Grammar | None = None
    """The grammar that the answer follows, with neither `min_tokens` nor `ignore_eos`."""

    @property
    def penalizes(self) -> bool:
        """Whether the sequence's own tokens change its scores."""
        return self.repetition_penalty != 1.0 or bool(self.presence_penalty or self.frequency_penalty)


class TokenCounts:
    """The distinct tokens of one sequence with their numbers of occurrences in its answer; grows with the answer."""

    def __init__(self, prompt: Iterable[int]) -> None:
        ids = np.unique(np.fromiter(prompt, np.int64))
        self._ids, self._counts = ids, np.zeros(ids.size, np.int64)
        self._places = {token: place for place, token in enumerate(ids.tolist())}
        self.generated = 0
        """Number of the answer's tokens counted so far."""

    def extend(self, token_ids: Sequence[int]) -> None:
        """Count the answer's next tokens."""
        for token in token_ids:
            place = self._places.setdefault(token, len(self._places))
            if place == self._ids.size:
                room = np.zeros(64 + place // 2, np.int64)
                self._ids, self._counts = np.concatenate([self._ids, room]), np.concatenate([self._counts, room])
            self._ids[place] = token
            self._counts[place] += 1
        self.generated += len(token_ids)

    @property
    def ids(self) -> np.ndarray:
        """The distinct tokens, int64."""
        return self._ids[: len(self._places)]

    @property
    def counts(self) -> np.ndarray:
        """Occurrences of each of `ids` in the answer; 0 for tokens of the prompt alone."""
        return self._counts[: len(self._places)]


@dataclass(slots=True)
class SamplingRow:
    """One row to sample; `step` is the number of the draw."""

    sampling: Sampling
    seed: int
    step: int
    counts: TokenCounts | None = None
    """Token counts of the row's sequence, if penalties need them."""
    forbidden: Sequence[int] = ()
    """Tokens that cannot be drawn now (end tokens before min_tokens)."""
    matcher: GrammarMatcher | None = None
    """The state of the row's grammar before `draft`."""
    draft: Sequence[int] = ()
    """Drafted tokens before the row's, where it has a `matcher`."""
