"""Keeps the engine within the limits that governors set: pages, pruning, fine-tuning, sequences.

Owns how each is carried out between iterations. Must not know why a limit is set.
"""

from __future__ import annotations

import logging

import torch

from edged.engine.build import EngineParts
from edged.engine.finetuning import FinetuneJobs, FinetuneSteps
from edged.engine.model.memory_plan import has_own_memory
from edged.engine.sequences import SequenceTable
from edged.governors.limits import EngineLimits, Use
from edged.runtime.process import give_back_memory
from edged.scheduler.task import Resources
from edged.tensors.oom import out_of_memory

log = logging.getLogger("edged.engine")
_MOST_MOVED = 64 << 20
"""Bytes of K/V that are copied between two iterations, at most."""


class ResourceLimits:
    """Used by the engine thread alone, but for `use`, which only reads numbers."""

    def __init__(
        self, parts: EngineParts, serving: SequenceTable, learning: FinetuneJobs, steps: FinetuneSteps
    ) -> None:
        self._parts, self._serving, self._learning, self._steps = parts, serving, learning, steps
        self._runner, self._pool, self._kv = parts.runner, parts.runner.pool, parts.runner.kv
        page_size = self._pool.page_size
        self._page_bytes = parts.model.page_bytes(page_size)
        self._most_moved = max(1, _MOST_MOVED // self._page_bytes)
        self._longest = -(-parts.max_context_tokens // page_size)
        """Pages of the longest request that may come."""
        self._gives_back = self._kv.gives_back and not has_own_memory(parts.model.device)
        self.limits = EngineLimits()
        self._full = False
        """The system had no memory for the pages that may be taken: not asked again before there are new limits."""
        self._starved = False
        """The latest `settle` found no memory."""

    def use(self) -> Use:
        """What the engine holds and has done."""
        stats, settings = self._parts.stats, self._parts.settings
        resident = self._pool.touched if self._parts.model.device.type == "cpu" else self._pool.capacity
        return Use(
            page_bytes=self._page_bytes,
            pages=self._parts.pages,
            resident_pages=min(resident, self._parts.pages),
            live_pages=self._live_pages,
            running=self._serving.admitted,
            max_sequences=settings.serving.max_sequences,
            gives_back=self._gives_back,
            prunes=self._runner.pruner is not None,
            drift=self._parts.cost.drift,
            serving_s=stats.busy.prefill_s + stats.busy.decode_s,
            finetune_s=stats.busy.finetune_s,
            output_tokens=stats.totals.output_tokens,
            pairs_trained=stats.totals.pairs_trained,
        )

    # -- limits ------------------------------------------------------------------------------------------------------

    def take(self, limits: EngineLimits) -> None:
        """New limits; pages follow in `settle`."""
        self.limits, self._full = limits, False
        self._parts.scheduler.throttle.share = limits.finetune_share
        self._learning.hold(limits.finetune_share == 0.0)
        if self._runner.pruner is not None:
            self._runner.pruner.force(limits.prune)
        if limits.release:
            self._return_heap()

    def resources(self) -> Resources:
        """What the next bin may use."""
        limits, pool, serving = self.limits, self._pool, self._parts.settings.serving
        free, usable = pool.free_pages + self._runner.evictable_pages(), self._parts.pages
        if limits.pages is not None or pool.capacity < pool.pages:
            usable = min(self._usable_pages(), pool.capacity - 1)
            free = min(free, usable + 1 - self._live_pages)
            if limits.sequences is None:
                # Who runs is preempted only when fewer may run: before, the cache is as full as it may be.
                free = max(0, free)
        # Half of the tokens stay for prompts and pairs: decodes alone must not fill every iteration.
        most = min(serving.max_sequences, serving.max_batch_tokens // 2)
        return Resources(
            free_pages=free,
            total_pages=usable,
            page_size=pool.page_size,
            max_tokens=serving.max_batch_tokens,
            max_sequences=most if limits.sequences is None else min(most, limits.sequences),
        )

    @property
    def _live_pages(self) -> int:
        """Pages that sequences and steps hold, and the one for padding."""
        return self._pool.capacity - self._pool.free_pages - self._runner.evictable_pages()

    def _usable_pages(self) -> int:
        """As limited, but enough for the largest request at hand: somebody can always be answered."""
        pages = self._parts.pages if self.limits.pages is None else self.limits.pages
        if pages < min(self._longest, self._parts.pages):
            pages = max(pages, min(self._serving.largest_pages(), self._parts.pages), 1)
        return min(pages, self._parts.pages)

    # -- pages -------------------------------------------------------------------------------------------------------

    def settle(self) -> bool:
        """Between two iterations: give back pages and what is idle, or take pages again.

        True when pages changed: what was planned with the earlier ones is void. Want of memory is told and tried again.
        """
        self._starved = False
        try:
            return self._settle()
        except (MemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
            log.warning("pages stay where they are for now: there was no memory to move them (%s)", error)
            self._starved = True
            self._return_heap()
            return True

    def _settle(self) -> bool:
        if self.limits.release and self._learning.release(self._serving.adapters):
            self._return_heap()
        wanted = self._usable_pages() + 1
        if wanted == self._pool.capacity:
            return False
        if wanted > self._pool.capacity:
            return not self._full and self._grow(wanted)
        return self._shrink(wanted)

    @property
    def unsettled(self) -> bool:
        """Whether `settle` has more to give back, and is not to wait for memory."""
        return not self._starved and max(self._usable_pages() + 1, self._live_pages) < self._pool.capacity

    def _grow(self, capacity: int) -> bool:
        try:
            self._kv.take_back(capacity)
        except (MemoryError, RuntimeError) as error:
            log.warning("pages stay given back: %s", error)
            self._full = True
            return False
        self._pool.resize(capacity)
        return True

    def _shrink(self, wanted: int) -> bool:
        """Evict what nobody uses, move what lies above the pages that stay, give the rest back: a part each time."""
        pool, runner, before = self._pool, self._runner, self._pool.capacity
        wanted = max(wanted, self._live_pages)
        if runner.trie is not None:
            runner.trie.evict(before - pool.free_pages - wanted)
        self._steps.restart_above(wanted)
        held = pool.held_from(wanted)
        if len(held) > self._most_moved:
            held = held[-self._most_moved :]
            wanted = held[0]
        if wanted >= before:
            return False
        if held:
            self._move(held, wanted)
        pool.resize(wanted)
        if runner.spill is not None:
            runner.spill.settle()
        try:
            self._kv.give_back(wanted)
        except RuntimeError as error:
            log.warning("retired pages keep their memory: %s", error)
        self._return_heap()
        return True

    def _return_heap(self) -> None:
        """What tensors left behind goes back to the system."""
        if self._parts.model.device.type == "cuda":
            torch.cuda.empty_cache()
        give_back_memory()

    def _move(self, held: list[int], below: int) -> None:
        """Move pages below a number, and tell their holders."""
        if self._runner.spill is not None:
            self._runner.spill.settle()
        # The copy needs memory: where there is none, everything is as it was.
        with torch.inference_mode():
            self._kv.move_pages(self._pool.places(held, below))
        moved = self._pool.move(held, below)
        if self._runner.trie is not None:
            self._runner.trie.move(moved)
        self._serving.move(moved)
