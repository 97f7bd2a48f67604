"""Norm-based K/V pruning of decoding sequences (MACE 4.3), carried out on pages."""

import logging
from collections.abc import Iterable, Iterator

import numpy as np
import torch

from edged.cache.pruning_budget import SINK_PAGES, Pressure, PruningRule, head_budgets
from edged.engine.attention.attention_stats import AttentionStats
from edged.engine.kv.pruned_layout import HeadTables, PrunedLayout
from edged.engine.kv.store import KvStore
from edged.engine.kv_pages import KvPages
from edged.engine.sequence import Sequence
from edged.settings.load import CacheSettings
from edged.tensors.device_copy import upload

log = logging.getLogger("edged.engine")
_UNUSED_ITERATIONS = 256
"""W of MACE 4.3: tokens that were unused for so many iterations go first."""
_MIN_NORM = 0.0
"""tau of MACE 4.3: a head whose output's mean L2 norm is less keeps a page; with 0 all share by their norms."""
_MAX_FAILURES = 3
"""Number of failures after which no more prunings are tried."""
_FIRST_LOOKS, _LOOK_EVERY = 4, 8
"""A sequence's attention is observed in its first `_FIRST_LOOKS` iterations, then in every `_LOOK_EVERY`-th. These are
the same for all sequences, because captured iterations cannot be observed."""
_LATEST_LOOK = 2 * _LOOK_EVERY
"""Tokens after which a sequence is observed anyway if it took part in none of these iterations."""


class Pruner:
    """Prunes K/V when memory is short; the engine thread alone uses it, except `report`."""

    def __init__(self, settings: CacheSettings, kv: KvStore | None, pages: KvPages) -> None:
        """`kv` is None where pages have no contents."""
        assert settings.pruning != "off"
        self._mode = settings.pruning
        self._rule = PruningRule.of(settings.page_size)
        self.pressure = Pressure(settings.pruning)
        self._kv, self._pages, self._pool = kv, pages, pages.pool
        self.prunings = self.pages_returned = 0
        """Counts since the start; pages that other sequences still hold are not counted as returned."""
        self._failures = self._iteration = 0

    def begin_iteration(self) -> None:
        """Begin an iteration: following calls of `observer` belong to it."""
        self._iteration += 1

    # -- when --------------------------------------------------------------------------------------------------------

    def due(self, sequences: Iterable[Sequence]) -> Iterator[Sequence]:
        """Yield those of `sequences` that are to be pruned before an iteration, the longest first.

        Each must be pruned before the next is asked for. One is enough, unless the next iterations may find no page.
        """
        if self._failures >= _MAX_FAILURES:
            return
        decoding = [sequence for sequence in sequences if sequence.decoding]
        pressure = self.pressure
        pressure.update(self._pages.available, self._pool.pages, len(decoding))
        if not pressure.pressed:
            return
        for sequence in sorted(decoding, key=lambda sequence: -sequence.rows):
            if self._worth(sequence):
                yield sequence
                pressure.update(self._pages.available, self._pool.pages, len(decoding))
                if not (pressure.pressed and pressure.urgent):
                    return

    def _worth(self, sequence: Sequence) -> bool:
        """Whether the sequence was observed often enough and pruning it gains enough."""
        watch, rows = sequence.watch, sequence.rows
        looks = 1 if self.pressure.urgent else _FIRST_LOOKS
        if watch is None or watch.observations < looks or not self._rule.returned_pages(rows):
            return False
        references, adopted = self._pool.references, self._pool.is_adopted
        # Which of its old pages no other sequence holds.
        alone = (references(page) - adopted(page) == 1 for page in sequence.pages[: self._rule.old_pages(rows)])
        freed = sum(alone) - self._rule.budget_pages
        # Under "on" pruning speeds decoding up, even where others hold the same pages and no memory is freed.
        return freed > 0 or (self._mode == "on" and self._pages.available + freed >= self.pressure.wanted_pages)

    def observer(self, sequence: Sequence) -> AttentionStats | None:
        """Return the statistics that are to observe the next decode of `sequence`; None if it need not be observed."""
        if not self.pressure.near or not self._rule.nears(sequence.rows) or self._failures >= _MAX_FAILURES:
            return None
        watch, iteration = sequence.watch, sequence.computed
        if watch is None:
            assert self._kv is not None
            watch = sequence.watch = AttentionStats(self._kv, iteration)
        least = 1 if self._iteration % _LOOK_EVERY == 0 else _LATEST_LOOK
        if watch.observations >= _FIRST_LOOKS and iteration - watch.iteration < least:
            return None
        part = sequence.compacted
        more = 0 if part is None else int(part.counts.max()) - part.slabs
        watch.begin(iteration, (sequence.rows // self._pool.page_size + 1 + more) * self._pool.page_size)
        return watch

    # -- how ---------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def prune(self, sequence: Sequence) -> None:
        """Compact the old pages of a sequence that is `due`. If it raises, the sequence's page table is still valid,
        but perhaps not the pages' contents."""
        kv, slabs, watch = self._kv, self._rule.budget_pages, sequence.watch
        assert watch is not None
        assert kv is not None
        old, free = self._rule.old_pages(sequence.rows), self._pages.available
        recent = sequence.rows - old * kv.page_size
        before = sequence.compacted or PrunedLayout(0, np.zeros((kv.layers, kv.kv_heads), np.int64), 0)
        have = before.counts + (old - before.slabs)
        counts = head_budgets(watch.mean_norms().cpu().numpy(), slabs * kv.kv_heads, have, _MIN_NORM)
        watch.reserve(int(have.max()) * kv.page_size + recent)
        stale_before = sequence.computed - _UNUSED_ITERATIONS
        keep = rows_to_keep(watch, torch.from_numpy(have), torch.from_numpy(counts), kv.page_size, stale_before)
        # Pages that others hold, the trie included, stay unchanged. Released pages can still be read below, since
        # nothing else runs meanwhile: so the kept rows may go into some of them.
        pages = list(sequence.pages)
        self._pool.release(pages[:old])
        own = self._pages.allocate(slabs)
        if self._pages.offload is not None:
            # Pages that were evicted for these must be copied away before they are overwritten.
            self._pages.offload.settle()
        sequence.compact(own, old, PrunedLayout(slabs, counts, before.removed + (old - slabs) * kv.page_size))
        self.prunings += 1
        self.pages_returned += max(0, self._pages.available - free)
        self._move(pages[:old], before, keep, own)
        _rearrange(watch, keep, have * kv.page_size, recent)

    def _move(self, old: list[int], before: PrunedLayout, keep: torch.Tensor, own: list[int]) -> None:
        """Copy the rows to `keep` of each layer over the pages `own`, head by head."""
        kv = self._kv
        assert kv is not None
        device = kv.keys.device
        context = len(old) * kv.page_size - 1
        before_pages, after_pages, contexts = upload([np.array(pages) for pages in (old, own, [context])], device)
        heads = HeadTables.of([before], [context], before_pages[None], contexts, kv)
        in_page = torch.arange(kv.page_size, device=device)
        blocks = kv.block_index(after_pages[:, None])
        to = (blocks[:, None] * kv.page_size + in_page).flatten()
        # Stable: the rows of a head after those of the one before it, in their order.
        kept = (~keep).flatten(1).to(torch.uint8).argsort(dim=1, stable=True)[:, : len(to)]
        for layer in range(kv.layers):
            rows = (heads.blocks(layer)[0][..., None] * kv.page_size + in_page).flatten(1)
            kv.move(layer, rows[kept[layer] // keep.shape[2], kept[layer] % keep.shape[2]], to)

    def failed(self) -> None:
        """Count a pruning that raised; after a few no more are tried, since each costs a recomputation."""
        self._failures += 1
        if self._failures == _MAX_FAILURES:
            log.error("K/V is not pruned any more: it failed %d times", _MAX_FAILURES)

    def report(self, sequences: Iterable[Sequence]) -> dict[str, object]:
        """Return the status' part; `tokens_kept` sums the pruned sequences' compacted parts, on the mean of heads."""
        compacted = [part for part in (sequence.compacted for sequence in sequences) if part is not None]
        return {
            "mode": self._mode,
            "pressed": self.pressure.pressed,
            "sequences": len(compacted),
            "tokens_kept": sum(part.slabs for part in compacted) * self._pool.page_size,
            "prunings": self.prunings,
            "pages_returned": self.pages_returned,
        }


def rows_to_keep(
    watch: AttentionStats, have: torch.Tensor, keep: torch.Tensor, page_size: int, stale_before: int
) -> torch.Tensor:
    """Choose the old rows of each head to keep: boolean [layers, kv_heads, rows]; `have` and `keep` [layers, kv_heads]
    are blocks.

    The sinks are kept. Rows last used before the iteration `stale_before` (t - t_last_used > W of MACE 4.3) are dropped
    first, then those with the least attention, the earlier of equals.
    """
    device = watch.shares.device
    rows = int(have.max()) * page_size
    row = torch.arange(rows, device=device).expand(*have.shape, rows)
    shares, last_used = watch.shares[..., :rows], watch.last_used[..., :rows]
    rank = (last_used >= stale_before).to(torch.int8)
    rank = rank.masked_fill(row < SINK_PAGES * page_size, 2)
    rank = rank.masked_fill(row >= (have * page_size).to(device)[..., None], -1)
    order = row.flip(-1)
    for key in (shares, rank):
        order = order.gather(-1, key.gather(-1, order).argsort(dim=-1, descending=True, stable=True))
    first = row < (keep * page_size).to(device)[..., None]
    return torch.zeros_like(first).scatter_(-1, order, first)


def _rearrange(watch: AttentionStats, keep: torch.Tensor, old_rows: np.ndarray, recent: int) -> None:
    """Reorder the watch's rows as pruning does: the kept rows, then the `recent` ones behind each head's `old_rows`."""
    device = keep.device
    old = torch.from_numpy(old_rows).to(device)[..., None]
    row = torch.arange(watch.shares.shape[2], device=device)
    stay = (row >= old) & (row < old + recent)
    stay[..., : keep.shape[2]] |= keep
    watch.rearrange((~stay).to(torch.uint8).argsort(dim=2, stable=True), stay.sum(2))
