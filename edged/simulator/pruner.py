"""K/V pruning in virtual time: when and how many pages go are the engine's own rule, which rows stay is nobody's.

Owns what stands for norms and attention, of which there are none. Must not know devices. Pruning itself takes no time.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from edged.cache.page_pool import PagePool
from edged.engine.kv.pruned_layout import PrunedLayout
from edged.engine.pruner import Pruner
from edged.engine.sequence import Sequence
from edged.settings.load import CacheSettings


class VirtualPruner(Pruner):
    """The engine's pruner over pages without contents: heads share each budget evenly."""

    def __init__(
        self,
        settings: CacheSettings,
        pool: PagePool,
        evictable_pages: Callable[[], int],
        allocate: Callable[[int], list[int]],
    ) -> None:
        """As `Pruner`."""
        kv = cast(Any, SimpleNamespace(page_size=pool.page_size))
        super().__init__(settings, kv, pool, evictable_pages, allocate)

    def look(self, sequence: Sequence) -> None:
        """A decode of `sequence` is observed, if it is time for that."""
        if self._pressure.near and self._rule.nears(sequence.rows):
            if sequence.watch is None:
                sequence.watch = cast(Any, SimpleNamespace(observations=0))
            cast(Any, sequence.watch).observations += 1

    def prune(self, sequence: Sequence) -> None:
        """Compact the old pages of a sequence that is `due`: nothing is in them."""
        slabs, old = self._rule.budget_pages, self._rule.old_pages(sequence.rows)
        free = self._free_pages
        before = sequence.compacted or PrunedLayout(0, np.zeros((0, 0), np.int64), 0)
        self._pool.release(sequence.pages[:old])
        own = self._allocate(slabs)
        removed = before.removed + (old - slabs) * self._pool.page_size
        sequence.compact(own, old, PrunedLayout(slabs, before.counts, removed))
        self._count(before, self._free_pages - free)
