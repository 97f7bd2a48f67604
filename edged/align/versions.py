"""The versions that adapters serve: publishing, rollback, and the judgement that takes a version back."""

import contextlib
import logging
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from edged.align.adapters.adapter import AdapterError, AdapterState
from edged.align.adapters.adapter_cache import AdapterCache
from edged.align.adapters.loader import OnRead
from edged.align.feedback.pair import START_REASON, VersionPublished
from edged.align.guard import AdapterHealth, TestScore, broken_language, lost_accuracy, lr_scale_margin
from edged.align.pair_queues import AdapterQueue, PairQueues
from edged.settings.load import GuardSettings
from edged.tensors.host_copy import HostCopies

_CALM_TESTS = 32
"""Tests passed in a row after which a reduced step size is doubled."""
Read = Callable[[str, Callable[[], Any], OnRead], object]
"""`AdapterLoader.read`."""
log = logging.getLogger("edged.align")


class UnknownVersion(KeyError):
    """A version that the adapter does not have on disk."""


class VersionsDiffer(ValueError):
    """Versions of one number, or an older one, that another node made; `newest` is the greatest number here."""

    def __init__(self, newest: int) -> None:
        super().__init__(f"version {newest} is here, and is another one or newer")
        self.newest = newest


class Versions:
    """The current version of each adapter in a cache, and the operations that change it."""

    def __init__(
        self,
        adapter_cache: AdapterCache,
        pair_queues: PairQueues,
        announce: Callable[[AdapterState, VersionPublished], None],
        bring: Callable[[HostCopies], object],
        read: Read,
    ) -> None:
        """`announce` gets every version that takes the place of another; `bring` copies a good one to the host.

        `read` reads what takes a version's place on another thread.
        """
        self._adapter_cache, self._pair_queues = adapter_cache, pair_queues
        self._announce, self._bring, self._read = announce, bring, read

    def publish(self, queue: AdapterQueue, parent: int, reason: str, **figures: Any) -> None:
        """Publish the adapter's state as its current version, which follows `parent`.

        `figures` are further fields of its `VersionPublished`.
        """
        state = self._adapter_cache.get(queue.name)
        self._adapter_cache.versions[queue.name] = state.version
        scale = queue.guard.lr_scale
        self._announce(state, VersionPublished(queue.name, state.version, parent, reason, step_scale=scale, **figures))

    # -- weights that no step made -----------------------------------------------------------------------------------

    def read(self, adapter: str, version: int) -> AdapterState:
        """Read an earlier version to be published again, 0 the untrained one; any thread may. Raises UnknownVersion."""
        files = self._adapter_cache.files
        try:
            found = files.load(adapter, version) if version else None
        except AdapterError as error:
            there = files.versions(adapter)
            known = f"on disk {'is' if len(there) == 1 else 'are'} {', '.join(map(str, there))}" if there else "none is"
            problem = f" that can be read ({error})" if version in there else " on disk"
            raise UnknownVersion(
                f'adapter "{adapter}" has no version {version}{problem}: {known}, and 0 is the untrained one; '
                f"`edged adapters show {adapter}` tells what they are worth"
            ) from None
        if found is None:
            return self._adapter_cache.build(adapter)
        return self._adapter_cache.build(adapter, found.weights, form=found.form)

    def replace(self, state: AdapterState, reason: str, restored: int | None = None) -> int:
        """Publish a state that was built of weights which this run did not learn; returns its number.

        `restored` is the version that it was. Its quality is unknown: no earlier test is compared with it. The adapter
        has no step under way.
        """
        adapter = state.name
        queue = self._pair_queues[adapter]
        self._restore(queue, state, reason, restored)
        guard = queue.guard
        guard.best = guard.last_good = guard.change = None
        guard.withdrawn.clear()
        if (restored or 0) < guard.baseline_version:
            guard.baseline_version, guard.baseline_nll_change, guard.baseline_kl_nats = 0, None, None
        guard.lr_scale_margin, queue.detector.tolerant = 1.0, False
        # What was learned before may be what this version is to be without: it must not return by replay, or by passes.
        queue.replay.clear()
        self._adapter_cache.files.protect(adapter, guard.baseline_version)
        if reason.startswith(START_REASON):
            # Nobody has tested it with this user's pairs.
            guard.request_test()
        return self._adapter_cache.version(adapter)

    def adopt(self, state: AdapterState, after: int, reason: str) -> int:
        """Publish a state with its AdamW under the number that follows `after`, or this node's greatest, if that is
        greater; returns the number.

        Another node of a fleet made it, or it was made here and is to be newer than what was told elsewhere.
        """
        adapter = state.name
        parent = self._adapter_cache.version(adapter)
        self._adapter_cache.replace(state, after)
        queue = self._pair_queues[adapter]
        if queue.guard.health is AdapterHealth.WITHDRAWN:
            queue.guard.health = AdapterHealth.SOUND
        self.publish(queue, parent, reason)
        return state.version

    def publish_untrained(self, adapter: str) -> None:
        """Publish the untrained weights of an adapter without a version: the base's answers at an adapter's cost."""
        if not self._adapter_cache.version(adapter):
            self._restore(self._pair_queues[adapter], self._adapter_cache.build(adapter), "introduced")

    def _restore(self, queue: AdapterQueue, state: AdapterState, reason: str, version: int | None = None) -> None:
        """Publish a built state, which `version` had, as a new version."""
        parent, before = self._adapter_cache.version(queue.name), self._adapter_cache.peek(queue.name)
        if before is None or before.form != state.form:
            queue.detector.forget_norms()
        self._adapter_cache.replace(state)
        guard = queue.guard
        guard.health, guard.tested_version = AdapterHealth.SOUND, state.version
        guard.restored_version, guard.restored_at_step = version or 0, queue.steps
        queue.practice_versions = 0
        self.publish(queue, parent, reason, restored=version)

    # -- the guard ---------------------------------------------------------------------------------------------------

    def judge(self, queue: AdapterQueue, score: TestScore, settings: GuardSettings) -> str:
        """Take the current version back, or keep it as one to restore, by its test's score; returns the reason, or "".

        A loss of accuracy counts only where most pairs trained on since the best version are not direct.
        """
        guard = queue.guard
        restored = guard.restored_version if queue.steps == guard.restored_at_step else 0
        if guard.baseline_version and guard.baseline_version in (score.version, restored):
            guard.measure_baseline(score)
        score = guard.relative(score)
        known = broken_language(guard.comparable(score), settings)
        broken = known or broken_language(score, settings)
        if known and guard.baseline_version:
            broken += f", beyond version {guard.baseline_version}, which a job left"
        problem = broken or (lost_accuracy(score, guard.best) if guard.third_party_since_best > 0 else "")
        if problem:
            guard.passed_in_a_row = 0
            if known and queue.steps > guard.restored_at_step:
                # A restored version that fails says nothing of the current step size, nor does what a job asked for.
                guard.lr_scale /= 2
            self.withdraw(queue.name, f"guard: {problem}", first=guard.baseline_version if broken and not known else 0)
            return problem
        guard.passed_in_a_row += 1
        if guard.passed_in_a_row >= _CALM_TESTS:
            guard.lr_scale, guard.passed_in_a_row = min(1.0, 2 * guard.lr_scale), 0
        guard.lr_scale_margin = lr_scale_margin(score, settings)
        queue.detector.tolerant = guard.lr_scale_margin < 1
        guard.last_good = self._adapter_cache.get(queue.name).copied()
        for copies in (guard.last_good.weights, guard.last_good.optimizer):
            self._bring(copies)
        self._adapter_cache.files.protect(
            queue.name, score.version, guard.version_before_change, guard.baseline_version
        )
        if guard.fully_tested == score.version and score.better_than(guard.best):
            guard.best, guard.third_party_since_best = score, 0
        return ""

    def keep_before_change(self, queue: AdapterQueue) -> None:
        """Keep the version before a possible change of preferences on disk, so that it can be restored."""
        good = queue.guard.last_good
        if good is not None:
            self._adapter_cache.keep(good)
        before = good.version if good is not None else self._adapter_cache.version(queue.name)
        queue.guard.version_before_change = before
        self._adapter_cache.files.protect(queue.name, before, queue.guard.baseline_version)

    def suspect(self, adapter: str, version: int) -> bool:
        """Take in that a version answered with numbers that are not finite; returns whether it must be taken back.

        It must where its weights are not finite either. Where they are, the prompt or the base may be the cause: the
        version is tested once, and its test decides.
        """
        if version != self._adapter_cache.versions.get(adapter):
            return False
        if not self._adapter_cache.get(adapter).finite:
            return True
        guard = self._pair_queues[adapter].guard
        if guard.not_finite_version != version:
            guard.not_finite_version = version
            guard.request_test()
        return False

    def withdraw(self, adapter: str, reason: str, then: Callable[[], None] = lambda: None, first: int = 0) -> None:
        """Withdraw the current version: nothing begins with it, and the newest good version is read to take its place.

        Where none was found good, or one is to be tried `first`, the newest on disk before it is restored, else the
        untrained weights; the baseline's files stay, so that it is the last. A restored version is tested next. `then`
        is called when it is published, unless the adapter is forgotten before.
        """
        queue, bad = self._pair_queues[adapter], self._adapter_cache.version(adapter)
        guard = queue.guard
        if guard.health is AdapterHealth.WITHDRAWN:
            return
        guard.withdrawn.add(bad)
        if queue.steps == guard.restored_at_step:
            # The current version still has the weights of the restored one.
            guard.withdrawn.add(guard.restored_version)
        guard.restored_version, guard.restored_at_step = 0, queue.steps
        guard.change = guard.best = None
        guard.third_party_since_best = 0
        # Pairs of the versions taken back are queued again, or quarantined: they must not return by replay.
        queue.replay.clear()
        good, withdrawn = guard.last_good, frozenset(guard.withdrawn)

        def read() -> tuple[AdapterState, int]:
            if good is None or good.version in withdrawn or first not in (0, good.version):
                return self._read_earlier(adapter, bad, withdrawn, first)
            found = good.snapshot()
            return self._adapter_cache.build(adapter, found.weights, found.optimizer, found.form), found.version

        def take(done: Future[tuple[AdapterState, int]] | None) -> None:
            if done is None:
                return
            if self._adapter_cache.version(adapter) == bad:
                # Asked for anew: what changes here may make work due.
                queue = self._pair_queues[adapter]
                if (error := done.exception()) is not None:
                    log.error("version %d of %s stays, though %s: %s", bad, adapter, reason, error)
                    guard.withdrawn.discard(bad)
                    queue.guard.health = AdapterHealth.SUSPECT
                    return
                self._restore_good(queue, *done.result(), reason)
            then()

        guard.health = AdapterHealth.WITHDRAWN
        self._read(adapter, read, take)

    def _restore_good(self, queue: AdapterQueue, state: AdapterState, version: int, reason: str) -> None:
        self._restore(queue, state, reason, version)
        guard = queue.guard
        if version:
            # It may have passed with other held-out pairs than the current ones: only one that passes all is trained
            # on.
            guard.health, guard.fully_tested = AdapterHealth.SUSPECT, 0

    def _read_earlier(
        self, adapter: str, before: int, withdrawn: frozenset[int], first: int
    ) -> tuple[AdapterState, int]:
        """The version `first`, or the newest on disk, `before` one that was not withdrawn and is finite, else the
        untrained one (0)."""
        for version in (first, *reversed(self._adapter_cache.files.versions(adapter))):
            if 0 < version < before and version not in withdrawn:
                with contextlib.suppress(AdapterError):
                    found = self._adapter_cache.files.load(adapter, version)
                    if all(bool(tensor.isfinite().all()) for tensor in found.weights.values()):
                        state = self._adapter_cache.build(adapter, found.weights, found.optimizer, found.form)
                        return state, version
        return self._adapter_cache.build(adapter), 0
