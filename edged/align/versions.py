"""The versions that adapters serve: publishing, rollback, and the judgement that takes a version back."""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from edged.align.adapters.adapter import AdapterError, AdapterState, Snapshot, UnknownAdapter
from edged.align.adapters.adapter_cache import AdapterCache
from edged.align.feedback.pair import VersionPublished
from edged.align.guard import TestScore, broken_language, caution, lost_accuracy
from edged.align.pair_queues import AdapterQueue, PairQueues
from edged.settings.load import GuardSettings
from edged.tensors.host_copy import HostCopies

_CALM_TESTS = 32
"""Tests passed in a row after which a reduced step size is doubled."""
Weights = Mapping[str, torch.Tensor]
"""Weights by PEFT's names."""


class UnknownVersion(KeyError):
    """A version that the adapter does not have on disk."""


class Versions:
    """The current version of each adapter in a cache, and the operations that change it."""

    def __init__(
        self,
        adapter_cache: AdapterCache,
        pair_queues: PairQueues,
        announce: Callable[[AdapterState, VersionPublished], None],
        bring: Callable[[HostCopies], object],
    ) -> None:
        """`announce` gets every version that takes the place of another; `bring` copies a good one to the host."""
        self._adapter_cache, self._pair_queues = adapter_cache, pair_queues
        self._announce, self._bring = announce, bring

    def publish(self, queue: AdapterQueue, parent: int, reason: str, **figures: Any) -> None:
        """Publish the adapter's state as its current version, which follows `parent`.

        `figures` are further fields of its `VersionPublished`.
        """
        state = self._adapter_cache.get(queue.name)
        self._adapter_cache.versions[queue.name] = state.version
        scale = queue.guard.step_scale
        self._announce(state, VersionPublished(queue.name, state.version, parent, reason, step_scale=scale, **figures))

    # -- weights that no step made -----------------------------------------------------------------------------------

    def rollback(self, adapter: str, version: int) -> int:
        """Publish an earlier version's weights as a new version; returns its number.

        Version 0 is the untrained adapter. Raises UnknownAdapter, UnknownVersion.
        """
        files = self._adapter_cache.files
        if adapter not in self._adapter_cache.versions:
            raise UnknownAdapter(adapter)
        if version == self._adapter_cache.version(adapter):
            return version
        try:
            weights = files.load(adapter, version).weights if version else None
        except AdapterError as error:
            there = files.versions(adapter)
            known = f"on disk {'is' if len(there) == 1 else 'are'} {', '.join(map(str, there))}" if there else "none is"
            problem = f" that can be read ({error})" if version in there else " on disk"
            raise UnknownVersion(
                f'adapter "{adapter}" has no version {version}{problem}: {known}, and 0 is the untrained one; '
                f"`edged adapters show {adapter}` tells what they are worth"
            ) from None
        return self.import_adapter(adapter, weights, f"rollback to {version}", version)

    def import_adapter(self, adapter: str, weights: Weights | None, reason: str, restored: int | None = None) -> int:
        """Publish weights that this run did not learn (None: the untrained ones) as a new version; returns its number.

        Their quality is unknown: no earlier test is compared with theirs. The adapter has no step under way.
        """
        queue = self._pair_queues[adapter]
        self._restore(queue, weights, reason, version=restored)
        guard = queue.guard
        guard.best = guard.last_good = guard.change = None
        guard.withdrawn.clear()
        guard.caution, queue.detector.lenient = 1.0, False
        self._adapter_cache.files.spare(adapter, 0)
        return self._adapter_cache.version(adapter)

    def introduce(self, adapter: str) -> None:
        """Publish the untrained weights of an adapter without a version: the base's answers at an adapter's cost."""
        if not self._adapter_cache.version(adapter):
            self._restore(self._pair_queues[adapter], None, "introduced")

    def _restore(
        self,
        queue: AdapterQueue,
        weights: Weights | None,
        reason: str,
        moments: Weights | None = None,
        version: int | None = None,
    ) -> None:
        """Publish `weights` (None: the untrained ones), which `version` had, as a new version.

        `moments` are AdamW's; without them the optimizer is new.
        """
        parent = self._adapter_cache.version(queue.name)
        if weights is None:
            state = self._adapter_cache.reset(queue.name)
            state.version = state.newest_number = max(parent, state.newest_number) + 1
        else:
            state = self._adapter_cache.get(queue.name)
            state.restore(weights, max(parent, state.newest_number) + 1, moments)
        # Until it is on disk a power cut would bring back the version that it replaces.
        self._adapter_cache.hurry(queue.name)
        queue.guard.tested_version = state.version
        self.publish(queue, parent, reason, restored=version)

    # -- the guard ---------------------------------------------------------------------------------------------------

    def judge(self, queue: AdapterQueue, score: TestScore, settings: GuardSettings) -> str:
        """Take the current version back, or keep it as one to restore, by its test's score; returns the reason, or "".

        A loss of accuracy counts only where most pairs trained on since the best version are not direct.
        """
        guard = queue.guard
        broken = broken_language(score, settings)
        problem = broken or (lost_accuracy(score, guard.best, settings) if guard.foreign_since_best > 0 else "")
        if problem:
            guard.passed_in_a_row = 0
            if broken and queue.steps > guard.restored_at_step:
                # A restored version that fails says nothing of the current step size.
                guard.step_scale /= 2
            self.take_back(queue.name, f"guard: {problem}")
            return problem
        guard.passed_in_a_row += 1
        if guard.passed_in_a_row >= _CALM_TESTS:
            guard.step_scale, guard.passed_in_a_row = min(1.0, 2 * guard.step_scale), 0
        guard.caution = caution(score, settings)
        queue.detector.lenient = guard.caution < 1
        guard.last_good = self._adapter_cache.get(queue.name).copied()
        for copies in (guard.last_good.weights, guard.last_good.optimizer):
            self._bring(copies)
        self._adapter_cache.files.spare(queue.name, score.version, guard.version_before_change)
        if guard.fully_tested == score.version and score.better_than(guard.best, settings):
            guard.best, guard.foreign_since_best = score, 0
        return ""

    def keep_before_change(self, queue: AdapterQueue) -> None:
        """Keep the version before a possible change of preferences on disk, so that it can be restored."""
        good = queue.guard.last_good
        if good is not None:
            self._adapter_cache.keep(good)
        before = good.version if good is not None else self._adapter_cache.version(queue.name)
        queue.guard.version_before_change = before
        self._adapter_cache.files.spare(queue.name, before)

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
            guard.not_finite_version, guard.tested_version, guard.test_soon = version, -1, True
        return False

    def take_back(self, adapter: str, reason: str) -> None:
        """Replace the current version, which is not served again, by the newest good version's weights.

        Where none was found good, the newest on disk before it is restored, else the untrained weights. A restored
        version is tested next.
        """
        queue = self._pair_queues[adapter]
        guard = queue.guard
        guard.withdrawn.add(self._adapter_cache.version(adapter))
        if queue.steps == guard.restored_at_step:
            # The current version still has the weights of the restored one.
            guard.withdrawn.add(guard.restored_version)
        guard.restored_at_step = queue.steps
        guard.change = guard.best = None
        guard.foreign_since_best = 0
        # Pairs of the versions taken back are queued again, or quarantined: they must not return by replay.
        queue.replay.clear()
        good = guard.last_good
        if good is not None and good.version not in guard.withdrawn:
            found: Snapshot | None = good.snapshot()
        else:
            found = self._earlier(queue)
        guard.restored_version = found.version if found is not None else 0
        if found is None:
            self._restore(queue, None, reason, version=0)
            return
        self._restore(queue, found.weights, reason, found.optimizer, found.version)
        # It may have passed with other held-out pairs than the current ones: only one that passes all is trained on.
        guard.tested_version, guard.test_soon, guard.fully_tested = -1, True, 0

    def _earlier(self, queue: AdapterQueue) -> Snapshot | None:
        """The newest version on disk before the current one that was not withdrawn and whose weights are finite."""
        for version in reversed(self._adapter_cache.files.versions(queue.name)):
            if version < self._adapter_cache.version(queue.name) and version not in queue.guard.withdrawn:
                with contextlib.suppress(AdapterError):
                    found = self._adapter_cache.files.load(queue.name, version)
                    if all(bool(tensor.isfinite().all()) for tensor in found.weights.values()):
                        return found
        return None
