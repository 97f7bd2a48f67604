"""What lowers or raises single tokens' scores: bias, forbidden tokens, and penalties on those that occurred."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch

from edged.engine.sampling.params import Sampling


def is_penalized(sampling: Sampling) -> bool:
    """Whether what a sequence holds changes its scores."""
    return sampling.repetition_penalty != 1.0 or bool(sampling.presence_penalty or sampling.frequency_penalty)


class TokenCounts:
    """The distinct tokens of one sequence and how often its answer holds each; it grows with the answer."""

    def __init__(self, prompt: Iterable[int]) -> None:
        ids = np.unique(np.fromiter(prompt, np.int64))
        self._ids, self._counts = ids, np.zeros(ids.size, np.int64)
        self._places = {token: place for place, token in enumerate(ids.tolist())}
        self.generated = 0
        """Tokens of the answer that are counted."""

    def extend(self, tokens: Sequence[int]) -> None:
        """The answer's next tokens."""
        for token in tokens:
            place = self._places.setdefault(token, len(self._places))
            if place == self._ids.size:
                room = np.zeros(64 + place // 2, np.int64)
                self._ids, self._counts = np.concatenate([self._ids, room]), np.concatenate([self._counts, room])
            self._ids[place] = token
            self._counts[place] += 1
        self.generated += len(tokens)

    @property
    def ids(self) -> np.ndarray:
        """The distinct tokens, int64."""
        return self._ids[: len(self._places)]

    @property
    def counts(self) -> np.ndarray:
        """How often the answer holds each of `ids`; 0 for what is in the prompt alone."""
        return self._counts[: len(self._places)]


class Changes:
    """All that is to be done to the scores of some rows, gathered on the host."""

    def __init__(self, vocab: int) -> None:
        self._vocab = vocab
        self._seen: list[np.ndarray] = []
        self._counts: list[np.ndarray] = []
        self._penalties: list[tuple[float, float, float]] = []
        self._added: list[int] = []
        self._amounts: list[float] = []

    @property
    def any(self) -> bool:
        """Whether there is anything to do."""
        return bool(self._added or self._seen)

    def add(self, row: int, amounts: Mapping[int, float]) -> None:
        """Add to the scores of some tokens of a row."""
        self._added += [row * self._vocab + token for token in amounts]
        self._amounts += amounts.values()

    def penalize(self, row: int, sampling: Sampling, counts: TokenCounts) -> None:
        """Penalties on what a row's sequence holds."""
        self._seen.append(counts.ids + row * self._vocab)
        self._counts.append(counts.counts)
        s = sampling
        self._penalties.append((s.repetition_penalty, s.presence_penalty, s.frequency_penalty))

    def tables(self) -> list[np.ndarray]:
        """What `apply` needs on the device, for `upload`."""
        # Doubles travel as the integers that they look like.
        tables = [np.array(self._added, np.int64), np.array(self._amounts, np.float64).view(np.int64)]
        if self._seen:
            owners = np.repeat(np.arange(len(self._seen)), [ids.size for ids in self._seen])
            penalties = np.array(self._penalties, np.float64).reshape(-1).view(np.int64)
            tables += [np.concatenate(self._seen), np.concatenate(self._counts), owners, penalties]
        return tables

    def apply(self, scores: torch.Tensor, tables: Sequence[torch.Tensor]) -> None:
        """Change `scores` [rows, vocab], contiguous, by the `tables` on their device.

        Repetition (CTRL, Keskar et al. 2019) counts prompt and answer; presence and frequency (OpenAI) the answer
        alone.
        """
        flat = scores.view(-1)
        if self._seen:
            seen, counts, owners, penalties = tables[2:]
            repetition, presence, frequency = penalties.view(torch.float64).view(-1, 3).index_select(0, owners).T
            values, factor = flat.index_select(0, seen), repetition.float()
            values = torch.where(values > 0, values / factor, values * factor)
            flat.index_copy_(0, seen, values - (presence * (counts > 0) + frequency * counts).float())
        if self._added:
            flat.scatter_add_(0, tables[0], tables[1].view(torch.float64).float())
