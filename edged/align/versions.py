"""Which weights an adapter answers with: publishing, going back, and the judgement that has a version taken back.

Owns every change of a current version. Must not know pairs or steps, nor how a version reaches the packed batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping

import torch

from edged.align.adapter import AdapterError, AdapterState
from edged.align.copies import Copies
from edged.align.guard import HeldOutScore, judge
from edged.align.learner import Learner
from edged.align.member import Member
from edged.align.pair import VersionPublished
from edged.align.shelf import Shelf
from edged.config import GuardSettings

Weights = Mapping[str, torch.Tensor]
"""By PEFT's names."""


class UnknownAdapter(KeyError):
    """No adapter of that name."""


class UnknownVersion(KeyError):
    """The adapter has no such version on disk."""


class Versions:
    """The current version of each adapter on a shelf, and the ways to another one."""

    def __init__(self, shelf: Shelf, announce: Callable[[AdapterState, VersionPublished], None]) -> None:
        """`announce` is told of every version that takes the place of another."""
        self._shelf, self._announce = shelf, announce
        self.bring: Callable[[Copies], object] = Copies.on_host
        """Has the best version's weights brought to the host."""

    def current(self, adapter: str | None) -> int:
        """The adapter's current version; 0 when it has not learnt, or is not there at all."""
        return self._shelf.versions.get(adapter or "", 0)

    def demand(self, adapter: str) -> None:
        """Raises UnknownAdapter when there is no such one."""
        if adapter not in self._shelf.versions:
            raise UnknownAdapter(adapter)

    def weights(self, adapter: str, version: int) -> Weights | None:
        """Of a version on disk; None, the untrained ones, for version 0. Raises UnknownVersion."""
        if not version:
            return None
        try:
            return self._shelf.files.load(adapter, version).weights
        except AdapterError as error:
            there = self._shelf.files.versions(adapter)
            known = f"on disk {'is' if len(there) == 1 else 'are'} {', '.join(map(str, there))}" if there else "none is"
            problem = f" that can be read ({error})" if version in there else " on disk"
            raise UnknownVersion(
                f'adapter "{adapter}" has no version {version}{problem}: {known}, and 0 is the untrained one; '
                f"`edged adapters show {adapter}` tells what they are worth"
            ) from None

    def publish(
        self, adapter: str, parent: int, reason: str, member: Member | None = None, seconds: float = 0.0
    ) -> None:
        """The adapter's state is a version from here on, which follows `parent`: that of a step of `seconds`, if any,
        in which the adapter was `member`."""
        state = self._shelf.get(adapter)
        self._shelf.versions[adapter] = state.version
        record = VersionPublished(
            adapter=adapter,
            version=state.version,
            parent=parent,
            reason=reason,
            pairs=member.trained if member else 0,
            loss=member.loss if member else None,
            grad_norm=member.grad_norm if member else None,
            step_s=seconds,
        )
        self._announce(state, record)

    def restore(self, learner: Learner, weights: Weights | None, reason: str) -> None:
        """Publish `weights` (None: the untrained ones) as a new version."""
        parent = self.current(learner.name)
        if weights is None:
            state = self._shelf.reset(learner.name)
            state.version = state.newest_number = max(parent, state.newest_number) + 1
        else:
            state = self._shelf.get(learner.name)
            state.restore(weights, max(parent, state.newest_number) + 1)
        # Until it is on disk a power cut would bring back what it takes the place of.
        self._shelf.hurry(learner.name)
        learner.tested_version = state.version
        self.publish(learner.name, parent, reason)

    # -- which must go -----------------------------------------------------------------------------------------------

    def judge(self, learner: Learner, score: HeldOutScore, guard: GuardSettings) -> None:
        """Go back to the best tested version, or have the present one take that place, as its test came out."""
        if reason := judge(score, learner.best, guard):
            # Without a best one no earlier version was found good.
            self.restore(learner, self._earlier_weights(learner) if learner.best is not None else None, reason)
        elif score.better_than(learner.best, guard):
            learner.best, learner.best_weights = score, self._shelf.get(learner.name).copied_weights()
            self.bring(learner.best_weights)
            self._shelf.files.spare(learner.name, score.version)

    def suspect(self, learner: Learner, version: int) -> bool:
        """A version answered with numbers that are not finite. True when it is the cause, so that it must go: its
        weights are not finite either, or it did so before."""
        if version != self.current(learner.name):
            return False
        again, learner.suspected = learner.suspected == version, version
        return again or not self._shelf.get(learner.name).finite

    def withdraw(self, learner: Learner, reason: str) -> None:
        """Publish earlier weights in the place of the present version's, which is not served again."""
        weights = self._earlier_weights(learner)
        learner.withdrawn.add(self.current(learner.name))
        self.restore(learner, weights, reason)

    def fall_back(self, learner: Learner, reason: str) -> None:
        """Publish earlier weights in the place of the present version's."""
        self.restore(learner, self._earlier_weights(learner), reason)

    def _earlier_weights(self, learner: Learner) -> Weights | None:
        """Of the best tested version, from disk when they left memory; where they are nowhere, of the newest on disk
        before the present one; None: untrained."""
        if learner.best is not None and learner.best.version != self.current(learner.name):
            if learner.best_weights is not None:
                return learner.best_weights.on_host()
            if not learner.best.version:
                return None
            with contextlib.suppress(AdapterError):
                return self._shelf.files.load(learner.name, learner.best.version).weights
        for version in reversed(self._shelf.files.versions(learner.name)):
            if version < self.current(learner.name) and version not in learner.withdrawn:
                with contextlib.suppress(AdapterError):
                    weights = self._shelf.files.load(learner.name, version).weights
                    if all(bool(tensor.isfinite().all()) for tensor in weights.values()):
                        return weights
        return None
