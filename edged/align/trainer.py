"""Who learns what, and when a version is published: queues of pairs, steps, tests, versions of all adapters.

Owns the life of a pair from submission to its outcome. Must not know when its steps run (the scheduler's matter) nor
how a version reaches the packed batch (the engine's). Not thread-safe: the engine thread alone uses it.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Collection, KeysView, Mapping, Sequence
from itertools import islice

import numpy as np
import torch

from edged.align import outcomes
from edged.align.adapter import AdapterError, AdapterState
from edged.align.decoder import Decoder
from edged.align.dpo import DpoStep
from edged.align.guard import HeldOutScore, judge
from edged.align.held_out import HeldOutTest
from edged.align.learner import FIRST_LOSS, FineTuneStep, Learner, joint_draws
from edged.align.member import Member
from edged.align.memory import StepSize, out_of_memory
from edged.align.pair import PairRetired, PairState, Record, StepSkipped, TokenPair, VersionPublished
from edged.align.rate import PairRate
from edged.align.shelf import Shelf
from edged.align.suspicion import Past, Suspicion
from edged.config import AlignSettings, FeedbackSettings, GuardSettings

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
        feedback: FeedbackSettings | None = None,
    ) -> None:
        """`cache_tokens` is the whole K/V cache: a group's forwards, by adapter and base, must fit in half of it.

        Without `feedback` settings no pair is suspicious and none has to wait for its time.
        """
        self.shelf, self._align, self._guard, self._feedback = shelf, align, guard, feedback
        self.size = StepSize(align)
        self._now = 0.0
        self._waiting: dict[str, None] = {}
        """Adapters with pairs beyond `feedback.pairs_per_hour`."""
        self._alarmed: set[str] = set()
        """Adapters whose alarm was raised; it may have ended since."""
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
        self.size.configure(align)

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
        if adapter not in self._learners:
            rate = PairRate(self._feedback.pairs_per_hour if self._feedback else 0)
            self._learners[adapter] = Learner(adapter, Suspicion(self._feedback), rate)
        return self._learners[adapter]

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

    def _earlier_weights(self, learner: Learner) -> Mapping[str, torch.Tensor] | None:
        """Of the best tested version, else of the newest on disk before the present one; None: untrained."""
        if learner.best is not None and learner.best.version != self.version(learner.name):
            return self._best_weights(learner)
        for version in reversed(self.shelf.files.versions(learner.name)):
            if version < self.version(learner.name) and version not in learner.withdrawn:
                with contextlib.suppress(AdapterError):
                    weights = self.shelf.files.load(learner.name, version).weights
                    if all(bool(tensor.isfinite().all()) for tensor in weights.values()):
                        return weights
        return None

    # -- pairs in ----------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """It is `now` (seconds): pairs that waited for their time are queued."""
        self._now = now
        for name in list(self._waiting):
            self._learners[name].admit(now)
            self._note(self._learners[name])

    def next_pair_s(self) -> float | None:
        """When the next waiting pair may be queued; None when none waits."""
        return min((self._learners[name].rate.next_s() for name in self._waiting), default=None)

    def submit(self, pairs: Sequence[TokenPair]) -> None:
        """Take pairs in: new ones are queued, held out or quarantined; earlier ones go where their state says."""
        for pair in pairs:
            learner = self._learner(pair.adapter)
            if pair.tokens > self._most_tokens:
                reason = f"{pair.tokens} tokens do not fit: the K/V cache has room for pairs of {self._most_tokens}"
                self._retire(pair, "skipped", self.version(pair.adapter), pair.epochs_done, reason)
            elif (taken := learner.take_in(pair, self._guard, self._now)) is not None:
                state, reason = taken
                self._retire(pair, state, self.version(pair.adapter), 0, reason)
            self._note(learner)

    def recall(self, adapter: str, past: Past) -> None:
        """What is usual for an adapter, as an earlier run left it."""
        self._learner(adapter).suspicion.recall(past, self._now)
        if past.alarm_left_s:
            self._alarmed.add(adapter)

    def calm(self, adapter: str) -> None:
        """Somebody decided about a burst: what comes is learned from again."""
        if adapter in self._learners:
            self._learners[adapter].suspicion.calm()
            self._alarmed.discard(adapter)

    def waiting(self) -> int:
        """Pairs that wait for their time."""
        return sum(len(self._learners[name].waiting) for name in self._waiting)

    def alarms(self) -> tuple[str, ...]:
        """Users whose new pairs are quarantined unseen."""
        return tuple(name for name in self._alarmed if self._learners[name].suspicion.alarm_left_s(self._now))

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
        if learner.waiting:
            self._waiting[learner.name] = None
        else:
            self._waiting.pop(learner.name, None)
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
        draws = joint_draws(learner, (x for x in others if not self._test_due(x)), self.size.align, admit)
        for name, draw in draws.items():
            self._learners[name].begin(draw)
        try:
            members = [
                Member(self.shelf.get(name), draw.fresh, draw.replay, self._learners[name].suspicion)
                for name, draw in draws.items()
            ]
            step = DpoStep(members, self._decoder, self._align, self._release, self._most_tokens, keep_graph)
        except Exception as error:
            if out_of_memory(error) and not self.size.exhausted:
                self._put_back(draws)
            else:
                self._failed(draws, f"{type(error).__name__}: {error}")
                self.size.give_up()
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
        if member.starved and not self.size.exhausted:
            learner.queue.extendleft(reversed(member.fresh))
            self.size.shrink()
            return
        if member.burst:
            self.records += outcomes.of_burst(learner, member, member.version, self._now)
            self._alarmed.add(learner.name)
            return
        if member.error and (sick := outcomes.of_sick(learner, member, member.version)):
            self.records += sick
            return
        if member.error:
            self._skipped(learner, member.fresh, member.error)
            self.size.give_up()
            if not math.isfinite(member.loss) and member.version > 0:
                # Weights that answer with NaN or infinity must not be served a moment longer.
                self._restore(learner, self._earlier_weights(learner), f"guard: {member.error}")
            return
        ended = outcomes.of_step(learner, member, state.version, self._align.epochs)
        self.records += ended
        self.pairs_trained += sum(record.state in ("trained", "learnt") for record in ended)
        if member.trained and not member.strange:
            self.steps += 1
            self.size.grow()
            self._publish(learner, member.version, "trained", member, seconds)

    def _close_test(self, learner: Learner, test: HeldOutTest) -> None:
        learner.tested_version = test.version
        scores, records = outcomes.of_test(learner, test)
        self.records += records
        if not scores or test.version != self.version(learner.name):
            return
        score = HeldOutScore.of(test.version, scores)
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
        self.records.append(outcomes.retired(pair, state, version, epochs, reason))

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

    def suspect(self, adapter: str, version: int) -> bool:
        """A version answered with numbers that are not finite. True when it is the cause, so that it must go: its
        weights are not finite either, or it did so before."""
        if adapter not in self.shelf.versions or version != self.version(adapter):
            return False
        learner = self._learner(adapter)
        again, learner.suspected = learner.suspected == version, version
        return again or not self.shelf.get(adapter).finite

    def withdraw(self, adapter: str, reason: str) -> None:
        """Publish earlier weights in the place of the present version's, which is not served again."""
        learner = self._learner(adapter)
        weights = self._earlier_weights(learner)
        learner.withdrawn.add(self.version(adapter))
        self._restore(learner, weights, reason)

    def import_adapter(self, adapter: str, weights: Mapping[str, torch.Tensor], reason: str) -> int:
        """Publish weights (PEFT's names) that were learnt elsewhere as a new version; returns its number."""
        learner = self._learner(adapter)
        self.abandon(adapter)
        self._restore(learner, weights, reason)
        learner.best, learner.best_weights = None, None
        return self.version(adapter)

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
        learner.step.free()
        self._put_back(learner.step.adapters)

    def _put_back(self, adapters: Collection[str]) -> None:
        for name in adapters:
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
        """Remove the adapter and its pairs; its files wait for `files.forget`. Raises UnknownAdapter."""
        if adapter not in self.shelf.versions:
            raise UnknownAdapter(adapter)
        self.abandon(adapter)
        self._learners.pop(adapter, None)
        self._ready.pop(adapter, None)
        self._waiting.pop(adapter, None)
        self._alarmed.discard(adapter)
        self.pairs_queued -= self._counted.pop(adapter, 0)
        self.shelf.forget(adapter)
