"""The weights that an adapter answers with: publishing, going back, and the judgement that has a version taken back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping

import torch

from edged.align.adapters.adapter import AdapterError, AdapterState, Snapshot, UnknownAdapter
from edged.align.adapters.adapter_cache import AdapterCache
from edged.align.dpo.adapter_step import AdapterStep
from edged.align.feedback.pair import VersionPublished
from edged.align.guard import TestScore, broken_language, caution, lost_accuracy
from edged.align.pair_queues import AdapterQueue
from edged.settings.load import GuardSettings
from edged.tensors.host_copy import HostCopies

_CALM_TESTS = 32
"""Tests passed in a row after which a reduced step size is doubled."""
Weights = Mapping[str, torch.Tensor]
"""By PEFT's names."""


class UnknownVersion(KeyError):
    """The adapter has no such version on disk."""


class Versions:
    """The current version of each adapter on a shelf, and the ways to another one."""

    def __init__(
        self,
        adapter_cache: AdapterCache,
        announce: Callable[[AdapterState, VersionPublished], None],
        bring: Callable[[HostCopies], object],
    ) -> None:
        """`announce` gets every version that takes the place of another; `bring` copies a good one to the host."""
        self._adapter_cache, self._announce, self._bring = adapter_cache, announce, bring

    def current(self, adapter: str | None) -> int:
        """The adapter's current version; 0 when it has not learnt, or is not there at all."""
        return self._adapter_cache.versions.get(adapter or "", 0)

    def demand(self, adapter: str) -> None:
        """Raises UnknownAdapter when there is no such one."""
        if adapter not in self._adapter_cache.versions:
            raise UnknownAdapter(adapter)

    def weights(self, adapter: str, version: int) -> Weights | None:
        """Of a version on disk; None, the untrained ones, for version 0. Raises UnknownVersion."""
        if not version:
            return None
        try:
            return self._adapter_cache.files.load(adapter, version).weights
        except AdapterError as error:
            there = self._adapter_cache.files.versions(adapter)
            known = f"on disk {'is' if len(there) == 1 else 'are'} {', '.join(map(str, there))}" if there else "none is"
            problem = f" that can be read ({error})" if version in there else " on disk"
            raise UnknownVersion(
                f'adapter "{adapter}" has no version {version}{problem}: {known}, and 0 is the untrained one; '
                f"`edged adapters show {adapter}` tells what they are worth"
            ) from None

    def publish(
        self,
        learner: AdapterQueue,
        parent: int,
        reason: str,
        member: AdapterStep | None = None,
        seconds: float = 0.0,
        restored: int | None = None,
    ) -> None:
        """The adapter's state is a version from here on, which follows `parent`: that of a step of `seconds`, if any,
        in which the adapter was `member`, or the one `restored`."""
        state = self._adapter_cache.get(learner.name)
        self._adapter_cache.versions[learner.name] = state.version
        record = VersionPublished(
            adapter=learner.name,
            version=state.version,
            parent=parent,
            reason=reason,
            pairs=member.trained if member else 0,
            loss=member.loss if member else None,
            grad_norm=member.grad_norm if member else None,
            step_s=seconds,
            restored=restored,
            step_scale=learner.step_scale,
        )
        self._announce(state, record)

    def restore(
        self,
        learner: AdapterQueue,
        weights: Weights | None,
        reason: str,
        moments: Weights | None = None,
        version: int | None = None,
    ) -> None:
        """Publish `weights` (None: the untrained ones), which `version` had, as a new version.

        `moments` are AdamW's; without them it begins anew.
        """
        parent = self.current(learner.name)
        if weights is None:
            state = self._adapter_cache.reset(learner.name)
            state.version = state.newest_number = max(parent, state.newest_number) + 1
        else:
            state = self._adapter_cache.get(learner.name)
            state.restore(weights, max(parent, state.newest_number) + 1)
            if moments:
                state.restore_optimizer(moments)
        # Until it is on disk a power cut would bring back what it takes the place of.
        self._adapter_cache.hurry(learner.name)
        learner.tested_version = state.version
        self.publish(learner, parent, reason, restored=version)

    # -- which must go -----------------------------------------------------------------------------------------------

    def judge(self, learner: AdapterQueue, score: TestScore, guard: GuardSettings) -> str:
        """Take the present version back, or keep it as one to go back to, as its test came out; why it is taken back.

        A loss of accuracy is held against it only where most of what it learned was not the user's own word.
        """
        broken = broken_language(score, guard)
        problem = broken or (lost_accuracy(score, learner.best, guard) if learner.foreign > learner.own else "")
        if problem:
            learner.calm_tests = 0
            if broken and learner.steps > learner.restored_at_step:
                # A version from disk that fails says nothing of the present steps.
                learner.step_scale /= 2
            self.take_back(learner, f"guard: {problem}")
            return problem
        learner.calm_tests += 1
        if learner.calm_tests >= _CALM_TESTS:
            learner.step_scale, learner.calm_tests = min(1.0, 2 * learner.step_scale), 0
        learner.caution = caution(score, guard)
        learner.suspicion.lenient = learner.caution < 1
        learner.good = self._adapter_cache.get(learner.name).copied()
        for copies in (learner.good.weights, learner.good.optimizer):
            self._bring(copies)
        self._adapter_cache.files.spare(learner.name, score.version, learner.undo)
        if learner.fully_tested == score.version and score.better_than(learner.best, guard):
            learner.best, learner.foreign, learner.own = score, 0, 0
        return ""

    def keep_before_turn(self, learner: AdapterQueue) -> None:
        """Preferences seem to change: the version before is kept on disk, to be gone back to."""
        if learner.good is not None:
            self._adapter_cache.keep(learner.good)
        learner.undo = learner.good.version if learner.good is not None else self.current(learner.name)
        self._adapter_cache.files.spare(learner.name, learner.undo)

    def suspect(self, learner: AdapterQueue, version: int) -> bool:
        """A version answered with numbers that are not finite. True when it is the cause, so that it must go: its
        weights are not finite either, or it did so before."""
        if version != self.current(learner.name):
            return False
        again, learner.suspected = learner.suspected == version, version
        return again or not self._adapter_cache.get(learner.name).finite

    def take_back(self, learner: AdapterQueue, reason: str) -> None:
        """Publish the newest good version's weights in the place of the present one's, which is not served again.

        Where none was found good, the newest on disk before it; what was gone back to is tested then. Else, the
        untrained weights.
        """
        present = self.current(learner.name)
        learner.withdrawn.add(present)
        if learner.steps == learner.restored_at_step:
            # These are its very weights.
            learner.withdrawn.add(learner.source)
        learner.restored_at_step = learner.steps
        learner.turn = learner.best = None
        learner.own = learner.foreign = 0
        # What the versions taken back had learned is queued again, or held: it is not to come by the way of replay.
        learner.replay.clear()
        good, learner.source = learner.good, 0
        if good is not None and good.version not in learner.withdrawn:
            learner.source = good.version
            self.restore(learner, good.weights.on_host(), reason, good.optimizer.on_host(), good.version)
        elif (earlier := self._earlier(learner)) is not None:
            learner.source = earlier.version
            self.restore(learner, earlier.weights, reason, earlier.optimizer, earlier.version)
        else:
            self.restore(learner, None, reason, version=0)
            return
        # It may have passed with other held-out pairs than those of now: only a version that passes all is built upon.
        learner.tested_version, learner.doubted, learner.fully_tested = -1, True, 0

    def _earlier(self, learner: AdapterQueue) -> Snapshot | None:
        """The newest version on disk before the present one that was not withdrawn, and whose weights are finite."""
        for version in reversed(self._adapter_cache.files.versions(learner.name)):
            if version < self.current(learner.name) and version not in learner.withdrawn:
                with contextlib.suppress(AdapterError):
                    found = self._adapter_cache.files.load(learner.name, version)
                    if all(bool(tensor.isfinite().all()) for tensor in found.weights.values()):
                        return found
        return None
