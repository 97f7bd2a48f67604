"""Sequences that are held back until another one has computed the beginning of their prompt.

`edged.cache.inflight_prefixes` decides which waits for which.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from edged.cache.inflight_prefixes import InflightPrefixes
from edged.cache.prefix_trie import Key
from edged.engine.kv_pages import KvPages
from edged.engine.request import Request
from edged.engine.sequence import Sequence, SequenceStatus
from edged.engine.stats.counters import Totals
from edged.scheduler.scheduler import Scheduler


class PrefixWait:
    """Holds requests back for a prefix on their way to the scheduler; without a prefix trie none is."""

    def __init__(
        self,
        pages: KvPages,
        scheduler: Scheduler,
        version: Callable[[str], int],
        by_task: Mapping[int, Sequence],
        move: Callable[[Sequence, SequenceStatus], None],
        schedule: Callable[[Sequence], None],
        totals: Totals,
    ) -> None:
        """`by_task` are all open sequences; `version` is an adapter's current one; `schedule` ends the wait."""
        self._pages, self._scheduler, self._version, self._totals = pages, scheduler, version, totals
        self._by_task, self._move, self._schedule = by_task, move, schedule
        trie = pages.trie
        self._pending = InflightPrefixes(pages.page_size, trie.covered) if trie is not None else None

    def enter(self, sequence: Sequence) -> None:
        """Schedule a sequence, now or when the one that it shares most with has computed that."""
        if self._pending is None:
            self._schedule(sequence)
            return
        task, prompt = sequence.task, sequence.request.prompt_ids
        leader = self._pending.enter(task.task_id, self._key(sequence), prompt, self._scheduler.order(task))
        if leader is None:
            self._schedule(sequence)
            return
        self._move(sequence, SequenceStatus.WAITING_PREFIX)
        self._totals.followers += 1
        if not _held(self._by_task[leader]):
            self.advanced(self._by_task[leader])

    def lead(self, sequence: Sequence) -> None:
        """A sequence that the scheduler has will compute all its tokens, under the version known now."""
        if self._pending is not None and not sequence.forgotten:
            task = sequence.task
            self._pending.enter(
                task.task_id,
                self._key(sequence),
                tuple(sequence.tokens),
                self._scheduler.order(task),
                waits=False,
            )

    def advanced(self, sequence: Sequence) -> None:
        """A part of a sequence's prompt is computed: whoever waited for no more goes on."""
        task_id = sequence.task.task_id
        if self._pending is not None and self._pending.followed(task_id):
            self._pages.share(sequence)
            self._go_on(self._pending.computed(task_id, sequence.computed))

    def leave(self, sequence: Sequence) -> None:
        """A sequence's prompt is computed and shared, or it ended or lost its pages: nobody waits for it any more."""
        if self._pending is not None:
            self._go_on(self._pending.leave(sequence.task.task_id))

    def renew(self, adapter: str) -> None:
        """An adapter has a new version: its prompts that have not begun will be computed, and shared, under that."""
        held = self._withdraw(lambda request: request.adapter == adapter)
        for sequence in self._by_task.values():
            if sequence.request.adapter == adapter and sequence.status in _TO_BEGIN:
                self.lead(sequence)
        for sequence in held:
            self.enter(sequence)

    def forget(self, name: str) -> None:
        """What running sequences of a user or an adapter compute is nobody else's, so nobody waits for it."""
        for sequence in self._withdraw(lambda request: request.is_of(name)):
            self._schedule(sequence)

    def _key(self, sequence: Sequence) -> Key:
        """The key that a sequence will have if it is admitted now."""
        adapter = sequence.request.adapter
        version = sequence.version if sequence.pinned or adapter is None else self._version(adapter)
        return sequence.key_under(version)

    def _go_on(self, task_ids: Iterable[int]) -> None:
        for task_id in task_ids:
            self._schedule(self._by_task[task_id])

    def _withdraw(self, chosen: Callable[[Request], bool]) -> list[Sequence]:
        """Nothing of the chosen requests is pending any more. Returns their sequences that were held back."""
        if self._pending is None:
            return []
        mine = [sequence for sequence in self._by_task.values() if chosen(sequence.request)]
        held = [sequence for sequence in mine if _held(sequence)]
        withdrawn = {sequence.task.task_id for sequence in held}
        for sequence in sorted(mine, key=lambda sequence: not _held(sequence)):
            # Others can have waited for it: all untrained adapters answer as the base.
            freed = self._pending.leave(sequence.task.task_id)
            self._go_on(task_id for task_id in freed if task_id not in withdrawn)
        return held


_TO_BEGIN = (SequenceStatus.WAITING, SequenceStatus.WAITING_SLOT, SequenceStatus.SLOT_OFFERED)


def _held(sequence: Sequence) -> bool:
    return sequence.status is SequenceStatus.WAITING_PREFIX
