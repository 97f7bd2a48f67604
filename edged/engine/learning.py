"""Fine-tuning as the engine asks for it: pairs in, steps opened when they are due, versions made and taken back.

Owns whether steps are opened, and what other threads may read of it all. Must not know what a step does in an
iteration, nor how an adapter gets from disk and back.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from itertools import islice
from typing import Any

import torch

from edged.align.adapter import AdapterState
from edged.align.dpo import DpoStep
from edged.align.pair import Record, StepSkipped, TokenPair, VersionPublished
from edged.align.suspicion import Past
from edged.config import Settings
from edged.engine.budget import open_steps
from edged.engine.fetching import Fetcher
from edged.engine.parts import EngineParts
from edged.engine.saving import Saver
from edged.engine.steps import Steps

log = logging.getLogger("edged.align")
_MOST_TRIED = 256
"""Adapters of which one iteration asks whether a step of theirs finds a slot."""


class Learning:
    """Used by the engine thread alone, but for `versions` and `report`."""

    def __init__(
        self,
        parts: EngineParts,
        steps: Steps,
        on_publish: Callable[[AdapterState, int], None],
        on_fetched: Callable[[str, str, float], None],
        post: Callable[[Callable[[], None]], None],
        journal: Callable[[list[Record]], Future[None] | None],
    ) -> None:
        """`post` has the engine thread run something; `on_fetched(adapter, why not or "", now)` answers `fetcher`."""
        self._parts, self._steps, self._journal = parts, steps, journal
        self._on_publish, self._on_fetched = on_publish, on_fetched
        self._trainer, self._scheduler = parts.trainer, parts.scheduler
        self._settings = parts.settings
        self.versions: dict[str, int] = self._trainer.versions()
        self.pairs_queued = self.pairs_waiting = 0
        self.alarms: tuple[str, ...] = ()
        """Users whose new pairs are quarantined unseen, for a burst."""
        self.trains = not parts.model.trainable_error and parts.scheduler.policy.trains
        """Whether pairs can ever be learnt here; where not, they stay in the store."""
        self._paused = False
        self._held = False
        """Governors allow no step."""
        self._slotless, self._slotless_s = "", math.inf
        """The adapter whose step waits longest for a LoRA slot, and since when."""
        self._most_open = open_steps(parts.settings.align.max_loaded_adapters)
        self.fetcher = Fetcher(self._trainer, self._fetched, post)
        self._saver = Saver(self._trainer.shelf, parts.settings.store, post, journal)
        self._trainer.on_publish(self._published)
        self._trainer.on_copied(self._saver.bring)

    # -- pairs -------------------------------------------------------------------------------------------------------

    def submit(self, pairs: list[TokenPair]) -> None:
        """Hand pairs to the trainer."""
        if not self.trains:
            return
        self._trainer.roster.tick(time.monotonic())
        self._trainer.submit(pairs)
        self.versions = self._trainer.versions()

    def recall(self, pasts: dict[str, Past]) -> None:
        """See `Roster.recall`."""
        self._trainer.roster.tick(time.monotonic())
        for adapter, past in pasts.items():
            self._trainer.roster.recall(adapter, past)

    def test_with(self, neutral: list[TokenPair]) -> None:
        """Test versions with this neutral text, too."""
        self._trainer.roster.neutral = neutral

    def examine(self, adapter: str) -> None:
        """See `Trainer.examine`."""
        self._trainer.examine(adapter)

    def calm(self, adapter: str) -> None:
        """See `Roster.calm`."""
        self._trainer.roster.calm(adapter)

    # -- when steps are opened ---------------------------------------------------------------------------------------

    def pause(self, paused: bool) -> None:
        """Open no new steps, or go on."""
        self._paused = paused

    def configure(self, settings: Settings) -> None:
        """Take over other settings; steps under way end as they began."""
        self._settings = settings
        self._trainer.configure(settings.align, settings.guard)
        self._steps.configure(settings.align)
        self._saver.configure(settings.store)

    @property
    def _opens(self) -> bool:
        """Whether steps are opened at all."""
        return self._settings.align.enabled and not (self._paused or self._held)

    def hold(self, held: bool) -> None:
        """Open no new steps and drop those under way, whose pairs stay queued; or go on."""
        if held and not self._held:
            self._steps.abandon_all()
        self._held = held

    def feed(self, now: float, slots_wanted: bool) -> None:
        """Open the steps that are due and give them to the scheduler; few at once, since each holds memory.

        While requests wait for LoRA slots (`slots_wanted`) only those that need no more of them, and the one that waits
        longest, once it has waited for as long as serving may starve fine-tuning.
        """
        self._trainer.roster.tick(now)
        if self._scheduler.degraded:
            self._steps.abandon_all()
        rested = self._steps.rested(now)
        if not self._opens or self._scheduler.degraded or not rested:
            return
        ready = self._trainer.roster.ready()
        if self._slotless not in ready:
            self._slotless, self._slotless_s = "", math.inf
        if len(self._steps.jobs) >= self._most_open:
            return
        for adapter in list(islice(ready, _MOST_TRIED)):
            if len(self._steps.jobs) >= self._most_open or not self._steps.rested(now):
                return
            # One may have joined another's step meanwhile.
            if adapter in ready:
                self._begin(adapter, now, slots_wanted)

    def _begin(self, adapter: str, now: float, slots_wanted: bool) -> None:
        """Open an adapter's step, or have the adapter read before, few at once; note who waits longest for a slot."""
        overdue = adapter == self._slotless and now - self._slotless_s >= self._settings.scheduler.finetune_max_wait_s
        # A request that waits for a slot gets the next one, unless fine-tuning has waited too long for it.
        spare = self._parts.slots.count if slots_wanted and not overdue else 0
        if self._trainer.shelf.resident(adapter):
            slot = self._steps.open(adapter, now, spare)
        else:
            slot = overdue or self._parts.slots.idle > spare
            if slot and self.fetcher.count < self._most_open:
                self.fetcher.fetch(adapter)
        if not slot and not self._slotless:
            self._slotless, self._slotless_s = adapter, now

    @property
    def wanted(self) -> set[str]:
        """Who stays in memory until there is a LoRA slot for its step."""
        return {self._slotless} if self._slotless else set()

    def close_finished(self, now: float) -> None:
        """Take finished steps in; bring the others' tasks up to date."""
        if self._steps.close_finished(now):
            self.versions = self._trainer.versions()

    # -- adapters ----------------------------------------------------------------------------------------------------

    def _published(self, state: AdapterState, previous: int) -> None:
        self._on_publish(state, previous)
        self.versions = self._trainer.versions()

    def _fetched(self, adapter: str, problem: str, now: float) -> None:
        if not problem:
            self.versions = self._trainer.versions()
        self._on_fetched(adapter, problem, now)

    def introduce(self, adapter: str) -> None:
        """See `Trainer.introduce`."""
        self._trainer.introduce(adapter)

    def saved(self, adapter: str, version: int) -> Future[None]:
        """See `Saver.saved`."""
        return self._saver.saved(adapter, version)

    def rollback(self, adapter: str, version: int) -> int:
        """Publish an earlier version again. Raises UnknownAdapter, UnknownVersion."""
        self._steps.abandon(adapter)
        return self._trainer.rollback(adapter, version)

    def import_adapter(self, adapter: str, weights: dict[str, torch.Tensor], reason: str) -> int:
        """See `Trainer.import_adapter`."""
        self._steps.abandon(adapter)
        return self._trainer.import_adapter(adapter, weights, reason)

    def suspect(self, adapter: str, version: int) -> None:
        """A version answered with numbers that are not finite; where it is the cause, an earlier one is served."""
        if self._trainer.suspect(adapter, version):
            log.error("version %d of %s answers with numbers that are not finite: it goes back", version, adapter)
            self._steps.abandon(adapter)
            self._trainer.withdraw(adapter, f"guard: version {version} answered with numbers that are not finite")

    def release(self, busy: Collection[str]) -> bool:
        """Let the adapters that answer nobody (not `busy`) leave memory; unsaved ones are saved first. True if any did.

        One that cannot be saved stays, and is tried again as often as ever.
        """
        shelf = self._trainer.shelf
        before = shelf.count
        self._trainer.tidy(busy, 0)
        return shelf.count < before

    def forget(self, adapter: str, pair_ids: Collection[int]) -> Future[None]:
        """Remove an adapter, and the pairs of these ids from all adapters; the future resolves when its files are gone.

        Raises UnknownAdapter.
        """
        self.fetcher.forget(adapter)
        for name in self._trainer.roster.holding(pair_ids):
            self._steps.abandon(name)
        self._trainer.roster.drop(pair_ids)
        self._steps.abandon(adapter)
        if self._parts.executor.trie is not None:
            self._parts.executor.trie.expire_all(adapter)
        self._trainer.forget(adapter)
        self._parts.slots.forget(adapter)
        self.versions = self._trainer.versions()
        return self._saver.forget(adapter)

    # -- the record --------------------------------------------------------------------------------------------------

    def flush(self, now: float) -> None:
        """Hand records to the journal and a due version to the saver."""
        self.pairs_queued, self.pairs_waiting = self._trainer.roster.pairs_queued, self._trainer.roster.waiting()
        self.alarms = self._trainer.roster.alarms()
        if self._trainer.records:
            records, self._trainer.records = self._trainer.records, []
            self._count(records)
            self._journal(records)
        self._saver.save_due(now)

    def _count(self, records: list[Record]) -> None:
        totals = self._parts.stats.totals
        for record in records:
            if isinstance(record, StepSkipped):
                totals.steps_skipped += 1
            elif isinstance(record, VersionPublished):
                totals.rollbacks += record.reason.startswith("rollback")
                totals.guard_rollbacks += record.reason.startswith("guard")

    def next_due_s(self) -> float | None:
        """When the next version is due to be saved, or the next pair that waits for its time to be learned."""
        dues_s = (self._saver.next_save_s(), self._trainer.roster.next_pair_s())
        return min((due for due in dues_s if due is not None), default=None)

    def close(self) -> None:
        """Abandon steps, save every unsaved version."""
        try:
            self._steps.abandon_all()
            self.flush(float("inf"))
            self.fetcher.close()
        finally:
            self._saver.close()

    def progress(self) -> tuple[int, int]:
        """(optimizer steps, pairs trained) since start."""
        return self._trainer.steps, self._trainer.pairs_trained

    def _reason(self) -> str:
        if self._scheduler.degraded:
            return self._scheduler.degraded
        if self._steps.resumes_s < math.inf:
            return "memory ran out in a step: it is tried again in a moment, with fewer pairs"
        policy = self._scheduler.policy
        return "" if policy.trains else f"the policy {policy.name} does not train"

    def report(self) -> dict[str, Any]:
        """The finetune part of the status."""
        jobs = list(self._steps.jobs.values())
        return {
            "enabled": self.trains
            and self._settings.align.enabled
            and not self._paused
            and not self._scheduler.degraded,
            "held": self._held,
            "reason": self._parts.model.trainable_error or self._reason(),
            "pairs_queued": self.pairs_queued,
            "pairs_waiting": self.pairs_waiting,
            "pairs_trained": self._trainer.pairs_trained,
            "steps": self._trainer.steps,
            "active_adapters": list(jobs[0].step.adapters) if jobs else [],
            "testing": any(not isinstance(job.step, DpoStep) for job in jobs),
            "alarms": list(self.alarms),
            "adapters_active": self._parts.slots.adapters,
            "adapters_loaded": self._trainer.shelf.count,
        }
