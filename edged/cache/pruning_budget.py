"""Budgets of norm-based K/V pruning (MACE 4.3): when to prune, how many pages, and how much each head keeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

SINK_PAGES = 1
"""Number of pages at a sequence's beginning that every head keeps: attention sinks (Xiao et al. 2024)."""
PRUNED_TOKENS = 512
"""Old tokens that a KV head keeps, on the mean: C_total of MACE 4.3 over the KV heads."""
RECENT_TOKENS = 128
"""Latest tokens, which every head keeps."""
_STEP_SHARE = 0.25
"""A sequence is pruned when its old pages exceed the budget by this share of it, since pruning copies all kept rows."""
_PRESSED, _RELIEVED, _NEAR = 0.10, 0.20, 0.30
"""Shares of free pages: pruning begins below the first and ends at the second; below the third the sequences that could
be pruned are observed."""


@dataclass(frozen=True, slots=True)
class PruningRule:
    """The rule for a decoding sequence's pages; the unit is the page, over all layers and heads.

    Of its rows of K/V the latest `recent_tokens` are kept by every head. Of the full pages before, as much is kept as
    fits into `budget_pages`: in every layer the heads share these pages' blocks (`head_budgets`).
    """

    page_size: int
    budget_pages: int
    recent_tokens: int

    @classmethod
    def of(cls, page_size: int) -> PruningRule:
        """Make the rule for pages of that size: PRUNED_TOKENS are rounded up, to one page at least behind sinks."""
        return cls(page_size, max(SINK_PAGES + 1, -(-PRUNED_TOKENS // page_size)), RECENT_TOKENS)

    def old_pages(self, rows: int) -> int:
        """Return the number of full pages before the recent tokens of a sequence that holds `rows` rows."""
        return max(0, rows - self.recent_tokens) // self.page_size

    def returned_pages(self, rows: int) -> int:
        """Return how many pages pruning takes from a sequence of `rows` rows; 0 while not worth its copies."""
        over = self.old_pages(rows) - self.budget_pages
        return over if over >= max(1, round(_STEP_SHARE * self.budget_pages)) else 0

    def nears(self, rows: int) -> bool:
        """Whether a sequence of `rows` rows fills its budget, so that it may be pruned soon."""
        return self.old_pages(rows) >= self.budget_pages


class Pressure:
    """The shortage of memory, with hysteresis: pruning costs accuracy, so it begins late and then frees enough."""

    def __init__(self, mode: Literal["auto", "on"]) -> None:
        """Under the mode "on" sequences are pruned to their budgets however many pages are free."""
        self._always = mode == "on"
        self.pressed = self._always
        """Whether sequences are to be pruned."""
        self.near = self._always
        """Whether they are to be observed, because memory may become short."""
        self.urgent = False
        """Whether the next iterations may find no page."""
        self.forced = False
        """Whether another process needs memory, so that sequences are pruned however many pages are free."""
        self.wanted_pages = 0
        """Number of pages that the next two iterations may want."""

    def update(self, free_pages: int, total_pages: int, decoding: int) -> None:
        """Update the state before an iteration; `free_pages` includes evictable ones, `decoding` counts sequences."""
        share = free_pages / total_pages
        self.wanted_pages = 2 * decoding
        self.urgent = free_pages < self.wanted_pages
        if self._always:
            return
        self.pressed = self.forced or self.urgent or share < (_RELIEVED if self.pressed else _PRESSED)
        self.near = self.pressed or share < _NEAR


def head_budgets(norms: np.ndarray, blocks: int, most: np.ndarray, min_norm: float) -> np.ndarray:
    """Share out each layer's `blocks` of a page: int64 [layers, kv_heads], those that a head keeps (C_h of MACE 4.3).

    `norms` [layers, kv_heads] are the means of the attention outputs' L2 norms, a_h; w_h = a_h / sum_j a_j and
    C_h = floor(w_h * blocks), the remainder going to the heads of the largest w_h, a block each in turn. No head gets
    more than the `most` [layers, kv_heads] that it has, nor less than the sinks' page. A head whose norm is below
    `min_norm` (tau) gets no more than that unless the others are full. ValueError if the blocks cannot be shared so.
    """
    sums = most.sum(axis=1)
    if most.shape[1] * SINK_PAGES > blocks or (sums < blocks).any():
        raise ValueError(f"{blocks} blocks cannot be shared by {most.shape[1]} heads that have {most.tolist()}")
    return np.stack([_shared(*layer, blocks, min_norm) for layer in zip(norms, most, strict=True)])


def _shared(norms: np.ndarray, most: np.ndarray, blocks: int, min_norm: float) -> np.ndarray:
    """Compute `head_budgets` of one layer."""
    norms = np.nan_to_num(norms.astype(np.float64), posinf=0.0)
    informative = np.where(norms < min_norm, 0.0, norms)
    total = informative.sum()
    weights = informative / total if total > 0 else np.full(len(norms), 1.0 / len(norms))
    shares = np.clip(np.floor(weights * blocks + 1e-9), SINK_PAGES, most).astype(np.int64)
    heaviest = np.argsort(-weights, kind="stable")
    rest = blocks - int(shares.sum())
    while rest:
        # Sinks of light heads may have exceeded the sum: the lightest heads with more than sinks give blocks back.
        open_heads = (
            [h for h in heaviest if shares[h] < most[h] and weights[h] > 0]
            or [h for h in heaviest if shares[h] < most[h]]
            if rest > 0
            else [h for h in heaviest[::-1] if shares[h] > SINK_PAGES]
        )
        for head in open_heads[: abs(rest)]:
            shares[head] += np.sign(rest)
        rest = blocks - int(shares.sum())
    return shares
