"""Resource limits: keeps the engine within what governors allow of pages, pruning, fine-tuning, sequences."""

import logging

import torch

from edged.engine.finetuning import StepTable
from edged.engine.kv_pages import KvPages
from edged.engine.model_runner import ModelRunner
from edged.engine.sequences import SequenceTable
from edged.governors.limits import EngineLimits, Use
from edged.scheduler.scheduler import Scheduler
from edged.scheduler.task import Resources
from edged.settings.load import ServingSettings
from edged.tensors.device_copy import has_own_memory
from edged.tensors.oom import out_of_memory

log = logging.getLogger("edged.engine")
_MAX_MOVED = 64 << 20
"""Largest number of K/V bytes that are copied between two iterations."""


def bin_resources(
    settings: ServingSettings, pages: KvPages, usable: int, free: int, sequences: int | None = None
) -> Resources:
    """Return the resources of a bin: `free` of `usable` pages, and at most `sequences` sequences, if given."""
    # Half of the tokens stay for prompts and pairs: decodes alone must not fill every iteration.
    num_tokens = settings.max_batch_tokens
    most = min(settings.max_sequences, num_tokens // 2, settings.max_sequences if sequences is None else sequences)
    return Resources(
        free_pages=free, total_pages=usable, page_size=pages.page_size, max_tokens=num_tokens, max_sequences=most
    )


class ResourceLimits:
    """Applies governors' limits. Used by the engine thread alone, except `use`, which only reads numbers."""

    def __init__(
        self,
        settings: ServingSettings,
        runner: ModelRunner,
        scheduler: Scheduler,
        sequences: SequenceTable,
        finetuning: StepTable,
    ) -> None:
        self._settings, self._runner, self._scheduler = settings, runner, scheduler
        self._sequences, self._finetuning = sequences, finetuning
        self._pages, self._pool, self._kv = runner.pages, runner.pages.pool, runner.kv
        self._all_pages = self._pool.pages - 1
        page_size = self._pool.page_size
        self._page_bytes = runner.model.page_bytes(page_size)
        self._max_moved = max(1, _MAX_MOVED // self._page_bytes)
        self._longest = -(-runner.max_context_tokens // page_size)
        """Pages of the longest request that can be submitted."""
        self._gives_back = self._kv.gives_back and not has_own_memory(runner.model.device)
        self.limits = EngineLimits()
        self._full = False
        """Whether the system had no memory for more pages: it is not asked again before there are new limits."""
        self._starved = False
        """Whether the latest `apply` ran out of memory."""

    def use(self) -> Use:
        """Return what the engine holds and has done."""
        stats = self._sequences.stats
        resident = self._pool.touched if self._runner.model.device.type == "cpu" else self._pool.capacity
        return Use(
            page_bytes=self._page_bytes,
            pages=self._all_pages,
            resident_pages=min(resident, self._all_pages),
            live_pages=self._live_pages,
            running=self._sequences.admitted,
            max_sequences=self._settings.max_sequences,
            gives_back=self._gives_back,
            prunes=self._runner.pruner is not None,
            drift=self._scheduler.cost.drift,
            serving_s=stats.busy.prefill_s + stats.busy.decode_s,
            finetune_s=stats.busy.finetune_s,
            output_tokens=stats.totals.output_tokens,
            pairs_trained=stats.totals.pairs_trained,
        )

    # -- limits ------------------------------------------------------------------------------------------------------

    def take(self, limits: EngineLimits) -> None:
        """Take new limits; the number of pages follows in `apply`."""
        self.limits, self._full = limits, False
        self._scheduler.throttle.share = limits.finetune_share
        self._finetuning.hold(limits.finetune_share == 0.0)
        if self._runner.pruner is not None:
            self._runner.pruner.pressure.forced = limits.prune
        if limits.release:
            self._runner.return_memory()

    def resources(self) -> Resources:
        """Return the resources that the next bin may use."""
        limits, pool = self.limits, self._pool
        free, usable = self._pages.available, self._all_pages
        if limits.pages is not None or pool.capacity < pool.pages:
            usable = min(self._usable_pages(), pool.capacity - 1)
            free = min(free, usable + 1 - self._live_pages)
            if limits.sequences is None:
                # Running sequences are preempted only where governors limit their number; else no more pages are given.
                free = max(0, free)
        return bin_resources(self._settings, self._pages, usable, free, limits.sequences)

    @property
    def _live_pages(self) -> int:
        """Number of pages that sequences and steps hold, and the one for padding."""
        return self._pool.capacity - self._pages.available

    def _usable_pages(self) -> int:
        """Return the limit of pages, but enough for the largest open request: one can always be answered."""
        pages = self._all_pages if self.limits.pages is None else self.limits.pages
        if pages < min(self._longest, self._all_pages):
            open_ = (each for each in self._sequences.by_task.values() if each.request.delivery != "none")
            largest = max((len(sequence.table) for sequence in open_), default=0)
            pages = max(pages, min(largest, self._all_pages), 1)
        return min(pages, self._all_pages)

    # -- pages -------------------------------------------------------------------------------------------------------

    def apply(self) -> bool:
        """Give back pages and idle memory, or take pages again, between two iterations.

        True when pages changed, which makes earlier plans void. Where memory runs out it is tried again later.
        """
        self._starved = False
        try:
            if self.limits.release and self._finetuning.release(self._sequences.adapters):
                self._runner.return_memory()
            wanted = self._usable_pages() + 1
            if wanted > self._pool.capacity:
                return not self._full and self._grow(wanted)
            return wanted < self._pool.capacity and self._shrink(wanted)
        except (MemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
            log.warning("pages stay where they are for now: there was no memory to move them (%s)", error)
            self._starved = True
            self._runner.return_memory()
            return True

    @property
    def unsettled(self) -> bool:
        """Whether `apply` has more to give back and did not run out of memory."""
        return not self._starved and max(self._usable_pages() + 1, self._live_pages) < self._pool.capacity

    def _grow(self, capacity: int) -> bool:
        try:
            self._kv.reclaim(capacity)
        except (MemoryError, RuntimeError) as error:
            log.warning("pages stay given back: %s", error)
            self._full = True
            return False
        self._pool.resize(capacity)
        return True

    def _shrink(self, wanted: int) -> bool:
        """Evict unused pages, move held ones below the new end, give the rest back: a part of them each time."""
        pool, pages, before = self._pool, self._pages, self._pool.capacity
        wanted = max(wanted, self._live_pages)
        pages.trie.evict(before - pool.free_pages - wanted)
        self._finetuning.restart_above(wanted)
        held = pool.held_from(wanted)
        if len(held) > self._max_moved:
            held = held[-self._max_moved :]
            wanted = held[0]
        if wanted >= before:
            return False
        if pages.offload is not None:
            pages.offload.settle()
        if held:
            moved = pool.places(held, wanted)
            # The copy needs memory: if there is none, this raises before anything has changed.
            with torch.inference_mode():
                self._kv.move_pages(moved)
            pool.move(moved)
            pages.trie.move(moved)
            for sequence in self._sequences.by_task.values():
                sequence.move_pages(moved)
        pool.resize(wanted)
        try:
            self._kv.give_back(wanted)
        except RuntimeError as error:
            log.warning("retired pages keep their memory: %s", error)
        self._runner.return_memory()
        return True
