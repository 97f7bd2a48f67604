"""Sequences that are held back until another one has computed the beginning of their prompt.

Owns them until they are scheduled. Must not know how an iteration is packed or run. Who waits for whom is
`edged.cache.inflight_prefixes`'s decision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from edged.cache import InflightPrefixes, Key
from edged.engine.build import EngineParts
from edged.engine.request import Request
from edged.engine.sequence import Sequence


class PrefixWait:
    """Between the requests that come and the scheduler. Without a prefix trie nobody waits."""

    def __init__(self, parts: EngineParts, running: dict[int, Sequence], schedule: Callable[[Sequence], None]) -> None:
        """`running` are the sequences that `schedule` was called with and that have not ended, by task id."""
        self._runner, self._trainer, self._totals = parts.runner, parts.trainer, parts.stats.totals
        self._order = parts.scheduler.policy.order
        self._running, self._schedule = running, schedule
        trie = parts.runner.trie
        self._pending = InflightPrefixes(parts.runner.pool.page_size, trie.covered) if trie is not None else None
        self._held: dict[int, Sequence] = {}

    @property
    def waiting(self) -> int:
        """Sequences that are held back."""
        return len(self._held)

    def enter(self, sequence: Sequence) -> None:
        """Schedule a sequence, now or when the one that it shares most with has computed that."""
        if self._pending is None:
            self._schedule(sequence)
            return
        task, prompt = sequence.task, sequence.request.prompt_ids
        leader = self._pending.enter(task.task_id, self._key(sequence), prompt, self._order(task))
        if leader is None:
            self._schedule(sequence)
            return
        self._held[task.task_id] = sequence
        self._totals.followers += 1
        if leader in self._running:
            self.advanced(self._running[leader])

    def lead(self, sequence: Sequence) -> None:
        """A sequence that the scheduler has will compute all its tokens, under the version known now."""
        if self._pending is not None and not sequence.forgotten:
            task = sequence.task
            self._pending.enter(
                task.task_id, self._key(sequence), tuple(sequence.tokens), self._order(task), waits=False
            )

    def advanced(self, sequence: Sequence) -> None:
        """A part of a sequence's prompt is computed: whoever waited for no more goes on."""
        task_id = sequence.task.task_id
        if self._pending is not None and self._pending.followed(task_id):
            self._runner.share(sequence)
            self._go_on(self._pending.computed(task_id, sequence.computed))

    def leave(self, sequence: Sequence) -> None:
        """A sequence's prompt is computed and shared, or it ended or lost its pages: nobody waits for it any more."""
        if self._pending is not None:
            self._held.pop(sequence.task.task_id, None)
            self._go_on(self._pending.leave(sequence.task.task_id))

    def renew(self, adapter: str) -> None:
        """An adapter has a new version: its prompts that have not begun will be computed, and shared, under that."""
        held = self._withdraw(lambda request: request.adapter == adapter)
        for sequence in self._running.values():
            if sequence.request.adapter == adapter and not sequence.admitted:
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
        version = sequence.version if sequence.pinned or adapter is None else self._trainer.version(adapter)
        return sequence.key_under(version)

    def _go_on(self, task_ids: Iterable[int]) -> None:
        for task_id in task_ids:
            self._schedule(self._held.pop(task_id))

    def _withdraw(self, chosen: Callable[[Request], bool]) -> list[Sequence]:
        """Nothing of the chosen requests is pending any more. Returns their sequences that were held back."""
        if self._pending is None:
            return []
        held = [sequence for sequence in self._held.values() if chosen(sequence.request)]
        for sequence in held:
            del self._held[sequence.task.task_id]
        running = [sequence for sequence in self._running.values() if chosen(sequence.request)]
        for sequence in held + running:
            # Others can have waited for it: all untrained adapters answer as the base.
            self._go_on([task_id for task_id in self._pending.leave(sequence.task.task_id) if task_id in self._held])
        return held
