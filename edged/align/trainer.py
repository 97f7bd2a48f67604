"""Who learns what, and when a version is published: queues of pairs, steps, tests, versions of all adapters.

Owns the life of a pair from submission to its outcome. Must not know when its steps run (the scheduler's matter) nor
how a version reaches the packed batch (the engine's). Not thread-safe: the engine thread alone uses it.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Collection, KeysView, Mapping, Sequence
from dataclasses import replace
from itertools import islice

import numpy as np
import torch

from edged.align.adapter import AdapterError, AdapterState
from edged.align.decoder import Decoder
from edged.align.dpo import DpoStep
from edged.align.guard import HeldOutScore, judge
from edged.align.held_out import HeldOutTest
from edged.align.learner import FIRST_LOSS, FineTuneStep, Learner, joint_draws
from edged.align.member import Member
from edged.align.pair import PairRetired, PairState, Record, StepSkipped, TokenPair, VersionPublished
from edged.align.shelf import Shelf
from edged.config import AlignSettings, GuardSettings

log = logging.getLogger("edged.align")
_MOST_ASKED = 64
"""Adapters that are asked whether their pairs fit into another's step."""


class UnknownAdapter(KeyError):
    """No adapter of that name."""


class UnknownVersion(KeyError):
    """The adapter has no such version on disk."""


class Trainer:
    """All adapters of one base model."""

    def __init__(
        self,
        shelf: Shelf,
        align: AlignSettings,
        guard: GuardSettings,
        decoder: Decoder,
        release: Callable[[np.ndarray], None],
        cache_tokens: int,
    ) -> None:
        """`cache_tokens` is the whole K/V cache: a group's forwards, by adapter and base, must fit in half of it."""
        self.shelf, self._align, self._guard = shelf, align, guard
        self._decoder, self._release = decoder, release
        self._published: Callable[[AdapterState, int], None] = lambda state, parent: None
        self._learners: dict[str, Learner] = {}
        self._most_tokens = cache_tokens // 4
        self._ready: dict[str, None] = {}
        self.pairs_queued = 0
        """Pairs that wait for training or are in a step."""
        self._counted: dict[str, int] = {}
        """How many of them are each adapter's."""
        self.records: list[Record] = []
        self.pairs_trained = 0
        self.steps = 0

    def on_publish(self, published: Callable[[AdapterState, int], None]) -> None:
        """Whom to tell of a new version: called with its state and the version that it follows."""
        self._published = published

    def configure(self, align: AlignSettings, guard: GuardSettings) -> None:
        """Take over other settings for the steps and judgements to come."""
        self._align, self._guard = align, guard
        self.shelf.configure(align)

    # -- what is there -----------------------------------------------------------------------------------------------

    def versions(self) -> dict[str, int]:
        """Current version by adapter; 0 is an adapter that has not learnt yet."""
        return dict(self.shelf.versions)

    def version(self, adapter: str | None) -> int:
        """The adapter's current version; 0 when it has not learnt, or is not there at all."""
        return self.shelf.versions.get(adapter or "", 0)

    def state(self, adapter: str) -> AdapterState:
        """The current weights. Raises UnknownAdapter."""
        if adapter not in self.shelf.versions:
            raise UnknownAdapter(adapter)
        return self.shelf.get(adapter)

    def loss(self, step: FineTuneStep) -> float:
        """Mean loss of its adapters' latest steps; ln 2 stands for one that has had none."""
        return sum(self._learners[name].loss for name in step.adapters) / len(step.adapters)

    def _learner(self, adapter: str) -> Learner:
        self.shelf.versions.setdefault(adapter, 0)
        return self._learners.setdefault(adapter, Learner(adapter))

    def adopt(self, state: AdapterState, problems: list[str]) -> None:
        """Take in a state that was read from disk; what is due may follow from the version that was found there."""
        self.shelf.adopt(state, problems)
        self.set_unreadable(state.name, False)

    def set_unreadable(self, adapter: str, unreadable: bool = True) -> None:
        """The adapter's files could not be read: nothing of it is ready until `adopt` has it after all."""
        if adapter in self._learners:
            self._learners[adapter].unreadable = unreadable
            self._note(self._learners[adapter])

    def tidy(self, busy: Collection[str], most: int | None = None) -> None:
        """Drop idle states from memory when there are more than `most`, or than is set; `busy` ones answer somebody."""
        working = {name for name, learner in self._learners.items() if learner.step is not None}
        for name in self.shelf.tidy(working.union(busy), most):
            if name in self._learners:
                self._learners[name].best_weights = None

    def _best_weights(self, learner: Learner) -> Mapping[str, torch.Tensor] | None:
        """Of the best tested version, from disk when they left memory; None (untrained) when they are nowhere."""
        if learner.best_weights is None and learner.best is not None and learner.best.version:
            with contextlib.suppress(AdapterError):
                return self.shelf.files.load(learner.name, learner.best.version).weights
        return learner.best_weights

    # -- pairs in ----------------------------------------------------------------------------------------------------

    def submit(self, pairs: Sequence[TokenPair]) -> None:
        """Take pairs in: new ones are queued or held out; earlier ones go where their state says."""
        for pair in pairs:
            learner = self._learner(pair.adapter)
            if pair.tokens > self._most_tokens:
                reason = f"{pair.tokens} tokens do not fit: the K/V cache has room for pairs of {self._most_tokens}"
                self._retire(pair, "skipped", self.version(pair.adapter), pair.epochs_done, reason)
            elif pair.state == "held_out":
                learner.held_out[pair.pair_id] = pair
            elif pair.state != "queued":
                learner.replay.append(pair)
            elif learner.hold_out(pair, self._guard):
                learner.held_out[pair.pair_id] = replace(pair, state="held_out")
                learner.unscored.add(pair.pair_id)
                self._retire(pair, "held_out", self.version(pair.adapter), 0)
            else:
                learner.queue.append(pair)
            self._note(learner)

    # -- work out ----------------------------------------------------------------------------------------------------

    def ready(self) -> KeysView[str]:
        """Adapters that have work, can be read and have no step under way, in the order in which they became so."""
        return self._ready.keys()

    def _note(self, learner: Learner) -> None:
        """Bring `ready` and `pairs_queued` up to date after anything of a learner changed."""
        idle = learner.step is None and not learner.unreadable
        if idle and (learner.queue or self._test_due(learner)):
            self._ready.setdefault(learner.name)
        else:
            self._ready.pop(learner.name, None)
        self.pairs_queued += learner.pairs - self._counted.get(learner.name, 0)
        self._counted[learner.name] = learner.pairs

    def _test_due(self, learner: Learner) -> bool:
        if not learner.held_out:
            return False
        behind = self.version(learner.name) - learner.tested_version
        return behind >= self._guard.evaluate_every or (not learner.queue and (behind > 0 or bool(learner.unscored)))

    def open(self, adapter: str, keep_graph: bool, admit: Callable[[str], bool]) -> FineTuneStep:
        """Begin the adapter's next step or test; `close` ends it. Its state should be resident.

        A step may keep its graph, which takes memory and saves time, where `keep_graph` is set. It is shared with
        other adapters whose pairs fit the same window, as far as `admit` lets each of them in.
        """
        learner = self._learner(adapter)
        if self._test_due(learner):
            return self._open_test(learner)
        others = (self._learners[name] for name in islice(self._ready, _MOST_ASKED))
        draws = joint_draws(learner, (x for x in others if not self._test_due(x)), self._align, admit)
        for name, draw in draws.items():
            self._learners[name].begin(draw)
        try:
            members = [Member(self.shelf.get(name), draw.fresh, draw.replay) for name, draw in draws.items()]
            step = DpoStep(members, self._decoder, self._align, self._release, self._most_tokens, keep_graph)
        except Exception as error:
            self._failed(draws, f"{type(error).__name__}: {error}")
            raise
        for name in draws:
            self._learners[name].step = step
            self._note(self._learners[name])
        return step

    def _open_test(self, learner: Learner) -> HeldOutTest:
        version, pairs = self.version(learner.name), list(learner.held_out.values())
        try:
            test = HeldOutTest(learner.name, version, pairs, self._decoder, self._align, self._release)
        except Exception:
            # Not again at once: the next versions will be tested.
            learner.tested_version = version
            learner.unscored.clear()
            self._note(learner)
            raise
        learner.step = test
        self._note(learner)
        return test

    def close(self, step: FineTuneStep, seconds: float) -> None:
        """Take in a step that finished `seconds` after it was opened: outcomes, new versions, a judgement.

        What fails for one adapter is on record and leaves the others their outcomes.
        """
        learners = [self._learners[name] for name in step.adapters]
        for learner in learners:
            learner.end()
        for learner in learners:
            begun = len(self.records)
            try:
                if isinstance(step, HeldOutTest):
                    self._close_test(learner, step)
                else:
                    self._close_step(learner, step.members[learner.name], seconds)
            except Exception as error:
                log.exception("a step or test of %s ended, and its outcome could not be taken in", learner.name)
                if isinstance(step, DpoStep):
                    self._stranded(learner, step.members[learner.name], begun, f"{type(error).__name__}: {error}")
            self._note(learner)

    def _stranded(self, learner: Learner, member: Member, begun: int, reason: str) -> None:
        """Skip those of a member's pairs that got no outcome among the records since `begun`."""
        told = {record.pair_id for record in self.records[begun:] if isinstance(record, PairRetired)}
        self._skipped(learner, [pair for pair in member.fresh if pair.pair_id not in told], reason)

    def _close_step(self, learner: Learner, member: Member, seconds: float) -> None:
        state = self.shelf.get(learner.name)
        self.records += member.scores
        learner.loss = member.loss if math.isfinite(member.loss) else FIRST_LOSS
        if member.error:
            self._skipped(learner, member.fresh, member.error)
            if not math.isfinite(member.loss) and member.version > 0:
                # Weights that answer with NaN or infinity must not be served a moment longer.
                self._restore(learner, self._best_weights(learner), f"guard: {member.error}")
            return
        for pair, loss, trained in member.outcomes:
            epochs = pair.epochs_done + int(trained)
            if trained and epochs < self._align.epochs:
                learner.queue.append(replace(pair, epochs_done=epochs))
                self._retire(pair, "queued", state.version, epochs)
                continue
            ended: PairState = "trained" if trained else "learnt"
            learner.replay.append(replace(pair, epochs_done=epochs, state=ended))
            reason = "" if trained else f"loss {loss:.4f} is under align.loss_threshold"
            self._retire(pair, ended, state.version, epochs, reason)
            self.pairs_trained += 1
        if member.trained:
            self.steps += 1
            self._publish(learner, member.version, "trained", member, seconds)

    def _close_test(self, learner: Learner, test: HeldOutTest) -> None:
        score = HeldOutScore.of(test.version, test.scores)
        learner.tested_version = test.version
        for scored in test.scores:
            self.records.append(scored)
            if scored.pair_id in learner.unscored:
                self.records.append(replace(scored, split="prequential", kl_nats=None))
        learner.unscored -= {scored.pair_id for scored in test.scores}
        if test.version != self.version(learner.name):
            return
        reason = judge(score, learner.best, self._guard)
        if reason:
            self._restore(learner, self._best_weights(learner), reason)
        elif score.better_than(learner.best, self._guard):
            learner.best, learner.best_weights = score, self.shelf.get(learner.name).tensors()

    def _publish(
        self, learner: Learner, parent: int, reason: str, member: Member | None = None, seconds: float = 0.0
    ) -> None:
        state = self.shelf.get(learner.name)
        self.shelf.versions[state.name] = state.version
        self.records.append(
            VersionPublished(
                adapter=state.name,
                version=state.version,
                parent=parent,
                reason=reason,
                pairs=member.trained if member else 0,
                loss=member.loss if member else None,
                grad_norm=member.grad_norm if member else None,
                step_s=seconds,
            )
        )
        self._note(learner)
        self._published(state, parent)

    def _retire(self, pair: TokenPair, state: PairState, version: int, epochs: int, reason: str = "") -> None:
        self.records.append(PairRetired(pair.pair_id, pair.adapter, state, version, epochs, reason))

    # -- versions ----------------------------------------------------------------------------------------------------

    def rollback(self, adapter: str, version: int) -> int:
        """Publish an earlier version's weights as a new version; returns its number.

        Version 0 is the untrained adapter. Raises UnknownAdapter, UnknownVersion.
        """
        if adapter not in self.shelf.versions:
            raise UnknownAdapter(adapter)
        learner = self._learner(adapter)
        snapshot = None
        if version == self.version(adapter):
            return version
        if version:
            try:
                snapshot = self.shelf.files.load(adapter, version)
            except AdapterError as error:
                raise UnknownVersion(f"version {version} of {adapter} is not on disk: {error}") from None
        self.abandon(adapter)
        self._restore(learner, snapshot.weights if snapshot else None, f"rollback to {version}")
        learner.best, learner.best_weights = None, None
        return self.version(adapter)

    def introduce(self, adapter: str) -> None:
        """Publish the untrained weights of an adapter without a version: the base's answers at an adapter's cost."""
        if not self.version(adapter):
            self._restore(self._learner(adapter), None, "introduced")

    def _restore(self, learner: Learner, weights: Mapping[str, torch.Tensor] | None, reason: str) -> None:
        """Publish `weights` (None: the untrained ones) as a new version."""
        parent = self.version(learner.name)
        if weights is None:
            state = self.shelf.reset(learner.name)
            state.version = state.newest_number = max(parent, state.newest_number) + 1
        else:
            state = self.shelf.get(learner.name)
            state.restore(weights, max(parent, state.newest_number) + 1)
        learner.tested_version = state.version
        self._publish(learner, parent, reason)

    def abandon(self, adapter: str) -> None:
        """Drop the adapter's step under way; its pairs go back to the head of the queue.

        So do those of all who share the step: nothing of it has become anyone's yet, so they are stepped again as if
        it had not begun.
        """
        learner = self._learners.get(adapter)
        if learner is None or learner.step is None:
            return
        step = learner.step
        step.free()
        for name in step.adapters:
            self._learners[name].put_back()
            self._note(self._learners[name])

    def skip(self, step: FineTuneStep, reason: str) -> None:
        """Drop a step under way because it failed."""
        step.free()
        if isinstance(step, DpoStep):
            self._failed(step.adapters, reason)
            return
        learner = self._learners[step.adapters[0]]
        learner.end()
        learner.tested_version = step.version
        learner.unscored.clear()
        self._note(learner)

    def _failed(self, adapters: Collection[str], reason: str) -> None:
        """Retire the pairs that a failed step took as skipped; but those of several adapters are first tried apart,
        for one of them alone may be at fault."""
        for name in adapters:
            learner = self._learners[name]
            if len(adapters) > 1:
                learner.put_back()
                learner.alone = True
            else:
                pairs = learner.taken
                learner.end()
                self._skipped(learner, pairs, reason)
            self._note(learner)

    def _skipped(self, learner: Learner, fresh: Sequence[TokenPair], reason: str) -> None:
        version = self.version(learner.name)
        self.records.append(StepSkipped(learner.name, version, tuple(pair.pair_id for pair in fresh), reason))
        for pair in fresh:
            self._retire(pair, "skipped", version, pair.epochs_done, reason)

    def learners_of(self, pair_ids: Collection[int]) -> list[str]:
        """Adapters whose step under way holds any of these pairs."""
        return [
            name
            for name, learner in self._learners.items()
            if isinstance(learner.step, DpoStep) and learner.step.members[name].holds(pair_ids)
        ]

    def drop_pairs(self, pair_ids: Collection[int]) -> None:
        """Learn nothing more from these pairs, whoever learns from them."""
        for learner in self._learners.values():
            learner.drop(pair_ids)
            self._note(learner)

    def forget(self, adapter: str) -> None:
        """Remove the adapter, its pairs and its files. Raises UnknownAdapter."""
        if adapter not in self.shelf.versions:
            raise UnknownAdapter(adapter)
        self.abandon(adapter)
        self._learners.pop(adapter, None)
        self._ready.pop(adapter, None)
        self.pairs_queued -= self._counted.pop(adapter, 0)
        self.shelf.forget(adapter)
