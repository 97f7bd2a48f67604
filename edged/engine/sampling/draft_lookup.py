"""Prompt lookup: what followed the latest tokens of a text when they came before in it."""

from __future__ import annotations

from dataclasses import dataclass, field

NGRAM = 3
"""Number of latest tokens that must have come before."""
MOST = 16
"""The most tokens of a draft."""
LENGTHS = (NGRAM, 4, 6, 9, 13)
"""The least numbers of tokens that came before, from which on drafts are as likely as others of their kind."""
_EXPECTED = (0.3, 0.4, 0.5, 0.6, 0.7)
"""Share of such drafts' tokens that are right, before any was tried, and how many tokens that weighs as much as."""
_WEIGHT = 12.0
_INDEXED = 4096
"""The most tokens that one call takes into its index."""
_MEMORY = 0.97
"""What is left, at each try, of the weight of those before it."""


@dataclass(slots=True)
class Draft:
    """Tokens that may follow, and the place in LENGTHS of how many before them are alike."""

    tokens: list[int]
    kind: int


@dataclass(slots=True)
class DraftLookup:
    """The places where each run of NGRAM tokens of a sequence came last, and how often its drafts were right."""

    seen: dict[tuple[int, ...], int] = field(default_factory=dict)
    """Number of tokens up to the end of each run."""
    known: int = NGRAM - 1
    """Number of tokens up to which runs are in `seen`; the latest run is not, for it would find itself."""
    right: list[float] = field(default_factory=lambda: [share * _WEIGHT for share in _EXPECTED])
    tried: list[float] = field(default_factory=lambda: [_WEIGHT] * len(LENGTHS))

    def find(self, tokens: list[int], most: int) -> Draft | None:
        """Return what followed the latest tokens when they came before, at most `most` tokens of it."""
        count, seen = len(tokens), self.seen
        # Some at a time: a long prompt must not hold up everybody's decodes.
        last = min(count, self.known + 1 + _INDEXED)
        for end in range(self.known + 1, last):
            seen[tuple(tokens[end - NGRAM : end])] = end
        self.known = max(self.known, last - 1)
        end = seen.get(tuple(tokens[-NGRAM:]), 0)
        if not end:
            return None
        alike = NGRAM
        while alike < LENGTHS[-1] and alike < end and tokens[end - alike - 1] == tokens[count - alike - 1]:
            alike += 1
        kind = sum(alike >= least for least in LENGTHS) - 1
        return Draft(tokens[end : min(end + most, count)], kind)

    def share(self, kind: int) -> float:
        """Return the share of drafted tokens of a kind that is expected to be right."""
        return self.right[kind] / self.tried[kind]

    def learn(self, kind: int, right: int, tried: int) -> None:
        """Take in how many tokens of a draft were right, of those that were tried up to the first wrong one."""
        self.right[kind] = _MEMORY * self.right[kind] + right
        self.tried[kind] = _MEMORY * self.tried[kind] + tried
