"""The wait of sequences whose prompt begins like one that another sequence is computing.

`edged.cache.inflight_prefixes` decides which waits for which.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from edged.cache.inflight_prefixes import InflightPrefixes
from edged.cache.prefix_trie import Key
from edged.engine.interfaces import Sequences
from edged.engine.kv_pages import KvPages
from edged.engine.request import Request
from edged.engine.sequence import Sequence, SequenceStatus
from edged.scheduler.scheduler import Scheduler


class PrefixWait:
    """Holds sequences of `table` back from the scheduler while another computes the beginning of their prompt."""

    def __init__(self, table: Sequences, pages: KvPages, scheduler: Scheduler) -> None:
        self._table, self._pages, self._scheduler = table, pages, scheduler
        self._inflight = InflightPrefixes(pages.page_size, pages.trie.covered)

    def enter(self, sequence: Sequence) -> None:
        """Schedule a sequence now, or when the one that it shares most tokens with has computed these."""
        task, prompt = sequence.task, sequence.request.prompt_ids
        leader = None
        if self._pages.waits_for_prefixes:
            leader = self._inflight.enter(task.task_id, self._key(sequence), prompt, self._scheduler.order(task))
        if leader is None:
            self._table.schedule(sequence)
            return
        self._table.move(sequence, SequenceStatus.WAITING_PREFIX)
        self._table.stats.totals.followers += 1
        if not _held(self._table.by_task[leader]):
            self.advanced(self._table.by_task[leader])

    def lead(self, sequence: Sequence) -> None:
        """Let others wait for a scheduled sequence, which computes all its tokens under the version known now."""
        if self._pages.waits_for_prefixes and not sequence.forgotten:
            task, token_ids = sequence.task, tuple(sequence.token_ids)
            order = self._scheduler.order(task)
            self._inflight.enter(task.task_id, self._key(sequence), token_ids, order, waits=False)

    def advanced(self, sequence: Sequence) -> None:
        """Schedule the sequences that waited for the part of this prompt that is computed now."""
        task_id = sequence.task.task_id
        if self._inflight.followed(task_id):
            self._pages.share(sequence)
            self._go_on(self._inflight.computed(task_id, sequence.computed))

    def reorder(self, now: float) -> None:
        """End the waits for prompts that would now go after one of those that wait for them, as late ones do."""
        by_task = self._table.by_task
        for leader, followers in self._inflight.waits():
            task = by_task[leader].task
            if self._scheduler.rank([task, *(by_task[each].task for each in followers)], now)[0] is not task:
                self._go_on(self._inflight.put_last(leader))

    def leave(self, sequence: Sequence) -> None:
        """End the wait for a sequence: its prompt is computed and shared, or it ended or lost its pages."""
        self._go_on(self._inflight.leave(sequence.task.task_id))

    def renew(self, adapter: str) -> None:
        """Enter an adapter's prompts that have not begun again, since its new version will compute and share them."""
        held = self._withdraw(lambda request: request.adapter == adapter)
        for sequence in self._table.by_task.values():
            if sequence.request.adapter == adapter and sequence.status in _TO_BEGIN:
                self.lead(sequence)
        for sequence in held:
            self.enter(sequence)

    def forget(self, name: str) -> None:
        """End all waits for sequences of a forgotten user or adapter, whose K/V must not be shared."""
        for sequence in self._withdraw(lambda request: request.is_of(name)):
            self._table.schedule(sequence)

    def _key(self, sequence: Sequence) -> Key:
        """Return the key that a sequence's K/V will have if it is admitted now."""
        adapter = sequence.request.adapter
        pinned = sequence.pinned or adapter is None
        return sequence.key_under(sequence.version if pinned else self._table.adapter_cache.version(adapter))

    def _go_on(self, task_ids: Iterable[int]) -> None:
        for task_id in task_ids:
            self._table.schedule(self._table.by_task[task_id])

    def _withdraw(self, chosen: Callable[[Request], bool]) -> list[Sequence]:
        """Remove the chosen requests' prompts from those in flight. Returns their sequences that were held back."""
        mine = [sequence for sequence in self._table.by_task.values() if chosen(sequence.request)]
        held = [sequence for sequence in mine if _held(sequence)]
        withdrawn = {sequence.task.task_id for sequence in held}
        for sequence in sorted(mine, key=lambda sequence: not _held(sequence)):
            # Other adapters' sequences may wait for it: all untrained adapters answer as the base.
            freed = self._inflight.leave(sequence.task.task_id)
            self._go_on(task_id for task_id in freed if task_id not in withdrawn)
        return held


_TO_BEGIN = (SequenceStatus.WAITING, SequenceStatus.WAITING_SLOT, SequenceStatus.SLOT_OFFERED)


def _held(sequence: Sequence) -> bool:
    return sequence.status is SequenceStatus.WAITING_PREFIX
