"""KV pruning in virtual time: when and how many pages go are the engine's own rule, no rows are chosen.

Pruning itself takes no time.
"""

from __future__ import annotations

import numpy as np

from edged.engine.kv.attention_stats import AttentionStats
from edged.engine.kv.pruned_layout import PrunedLayout
from edged.engine.kv_pages import KvPages
from edged.engine.pruner import Pruner
from edged.engine.sequence import Sequence
from edged.settings.load import CacheSettings


class _Observations(AttentionStats):
    """How often a sequence was observed, without what was seen."""

    def __init__(self) -> None:
        self.observations = 0


class SimulatedPruner(Pruner):
    """The engine's pruner over pages without contents: heads share each budget evenly."""

    def __init__(self, settings: CacheSettings, pages: KvPages) -> None:
        super().__init__(settings, None, pages)

    def look(self, sequence: Sequence) -> None:
        """A decode of `sequence` is observed, if it is time for that."""
        if self.pressure.near and self._rule.nears(sequence.rows):
            if sequence.watch is None:
                sequence.watch = _Observations()
            sequence.watch.observations += 1

    def prune(self, sequence: Sequence) -> None:
        """Compact the old pages of a sequence that is `due`: nothing is in them."""
        slabs, old = self._rule.budget_pages, self._rule.old_pages(sequence.rows)
        free = self._pages.available
        before = sequence.compacted or PrunedLayout(0, np.zeros((0, 0), np.int64), 0)
        self._pool.release(sequence.pages[:old])
        own = self._pages.allocate(slabs)
        removed = before.removed + (old - slabs) * self._pool.page_size
        sequence.compact(own, old, PrunedLayout(slabs, before.counts, removed))
        self.prunings += 1
        self.pages_returned += max(0, self._pages.available - free)
