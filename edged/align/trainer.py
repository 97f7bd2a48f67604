"""Steps and tests of all adapters: opened with the pairs that are next, closed with what became of each.

Not thread-safe: the engine thread alone uses it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import islice

import numpy as np

from edged.align import pair_outcomes
from edged.align.adapters.adapter import AdapterState
from edged.align.adapters.adapter_cache import AdapterCache
from edged.align.dpo.adapter_step import AdapterStep
from edged.align.dpo.decoder import Decoder
from edged.align.dpo.evaluation import HeldOutEvaluation
from edged.align.dpo.step import DpoStep
from edged.align.feedback.pair import (
    PairRetired,
    PairState,
    Record,
    StepSkipped,
    TokenPair,
    VersionPublished,
    VersionTested,
)
from edged.align.guard import TestScore
from edged.align.pair_queues import FIRST_LOSS, AdapterQueue, FineTuneStep, PairQueues, StepBatch, joint_draws
from edged.align.versions import Versions, Weights
from edged.runtime import logs
from edged.settings.load import AlignSettings, FeedbackSettings, GuardSettings
from edged.tensors.host_copy import HostCopies
from edged.tensors.oom import StepSize, out_of_memory

log = logging.getLogger("edged.align")
_MOST_ASKED = 64
"""Adapters that are asked whether their pairs fit into another's step."""


class Trainer:
    """All adapters of one base model."""

    def __init__(
        self,
        adapter_cache: AdapterCache,
        align: AlignSettings,
        guard: GuardSettings,
        decoder: Decoder,
        release: Callable[[np.ndarray], None],
        cache_tokens: int,
        feedback: FeedbackSettings | None = None,
        published: Callable[[AdapterState, int], None] = lambda _state, _parent: None,
        bring: Callable[[HostCopies], object] = HostCopies.on_host,
    ) -> None:
        """`cache_tokens` is the whole KV cache: a group's forwards, by adapter and base, must fit in half of it.

        `feedback`: see `PairQueues`. `published` gets a new version's state and the version that it follows; `bring`
        has copies of weights brought to the host.
        """
        self.adapter_cache, self._align, self._guard = adapter_cache, align, guard
        self.size = StepSize(align)
        self.pair_queues = PairQueues(adapter_cache.versions, guard, feedback)
        """Who has work. Pairs come in by `submit`, and leave by steps, or by the roster's own word."""
        self._versions = Versions(adapter_cache, self._announce, bring)
        self._decoder, self._release = decoder, release
        self._published = published
        self._most_tokens = cache_tokens // 4
        self.records: list[Record] = []
        self.pairs_trained = 0
        self.steps = 0

    def _announce(self, state: AdapterState, record: VersionPublished) -> None:
        self.records.append(record)
        self.pair_queues.note(self.pair_queues.learner(state.name))
        self._published(state, record.parent)

    def configure(self, align: AlignSettings, guard: GuardSettings) -> None:
        """Take over other settings for the steps and judgements to come."""
        self._align, self._guard = align, guard
        self.adapter_cache.configure(align)
        self.size.configure(align)
        self.pair_queues.configure(guard)

    # -- what is there -----------------------------------------------------------------------------------------------

    def versions(self) -> dict[str, int]:
        """Current version by adapter; 0 is an adapter that has not learnt yet."""
        return dict(self.adapter_cache.versions)

    def version(self, adapter: str | None) -> int:
        """The adapter's current version; 0 when it has not learnt, or is not there at all."""
        return self._versions.current(adapter)

    def state(self, adapter: str) -> AdapterState:
        """The current weights. Raises UnknownAdapter."""
        self._versions.demand(adapter)
        return self.adapter_cache.get(adapter)

    def loss(self, step: FineTuneStep) -> float:
        """Mean loss of its adapters' latest steps; ln 2 stands for one that has had none."""
        return sum(self.pair_queues.learners[name].loss for name in step.adapters) / len(step.adapters)

    def adopt(self, state: AdapterState, problems: list[str]) -> None:
        """Take in a state that was read from disk; what is due may follow from the version that was found there."""
        self.adapter_cache.adopt(state, problems)
        self.set_unreadable(state.name, False)

    def set_unreadable(self, adapter: str, unreadable: bool = True) -> None:
        """The adapter's files could not be read: nothing of it is ready until `adopt` has it after all."""
        self.pair_queues.set_unreadable(adapter, unreadable)

    def tidy(self, busy: Collection[str], most: int | None = None) -> None:
        """Drop idle states from memory when there are more than `most`, or than is set; `busy` ones answer somebody."""
        working = {learner.name for learner in self.pair_queues.with_step()}
        for name in self.adapter_cache.tidy(working.union(busy), most):
            if name in self.pair_queues.learners:
                self.pair_queues.learners[name].good = None

    # -- pairs in ----------------------------------------------------------------------------------------------------

    def submit(self, pairs: Sequence[TokenPair]) -> None:
        """Take pairs in: new ones are queued, held out or quarantined; earlier ones go where their state says."""
        for pair in pairs:
            learner, version = self.pair_queues.learner(pair.adapter), self.version(pair.adapter)
            if pair.tokens > self._most_tokens:
                reason = f"{pair.tokens} tokens do not fit: the K/V cache has room for pairs of {self._most_tokens}"
                self._retire(pair, "skipped", version, pair.epochs_done, reason)
            elif (taken := self.pair_queues.take_in(learner, pair)) is not None:
                state, reason = taken
                self._retire(pair, state, version, 0, reason)
                if state == "held_out":
                    self.records += pair_outcomes.of_age(learner, version, self._guard)
                    self.pair_queues.note(learner)

    def examine(self, adapter: str) -> None:
        """Have the adapter's present version tested as soon as can be."""
        learner = self.pair_queues.learner(adapter)
        learner.tested_version, learner.doubted = -1, True
        self.pair_queues.note(learner)

    # -- work out ----------------------------------------------------------------------------------------------------

    def open(self, adapter: str, keep_graph: bool, admit: Callable[[str], bool]) -> FineTuneStep:
        """Begin the adapter's next step or test; `close` ends it. Its state should be resident.

        A step may keep its graph, which takes memory and saves time, where `keep_graph` is set. It is shared with
        other adapters whose pairs fit the same window, as far as `admit` lets each of them in.
        """
        learner = self.pair_queues.learner(adapter)
        if self.pair_queues.test_due(learner):
            return self._open_test(learner)
        others = (self.pair_queues.learners[name] for name in islice(self.pair_queues.ready(), _MOST_ASKED))
        draws = joint_draws(learner, (x for x in others if not self.pair_queues.test_due(x)), self.size.align, admit)
        for name, draw in draws.items():
            self.pair_queues.learners[name].begin(draw)
        try:
            members = [self._member(self.pair_queues.learners[name], draw) for name, draw in draws.items()]
            step = DpoStep(members, self._decoder, self._align, self._release, self._most_tokens, keep_graph)
        except Exception as error:
            reason = logs.first_line(error, with_kind=True)
            if out_of_memory(error):
                self._starved(draws, _alone(draws), reason)
            else:
                self._failed(draws, reason)
            raise
        for name in draws:
            self.pair_queues.learners[name].step = step
            self.pair_queues.note(self.pair_queues.learners[name])
        return step

    def _member(self, learner: AdapterQueue, draw: StepBatch) -> AdapterStep:
        state = self.adapter_cache.get(learner.name)
        scale = learner.step_scale * learner.caution
        untested = 0 < state.version != learner.tested_version and self.pair_queues.testable(learner)
        return AdapterStep(state, draw.fresh, draw.replay, learner.suspicion, scale, untested)

    def _open_test(self, learner: AdapterQueue) -> HeldOutEvaluation:
        version, pairs = self.version(learner.name), learner.to_test(self.version(learner.name), self._guard)
        neutral = self.pair_queues.neutral if version else ()
        try:
            test = HeldOutEvaluation(learner.name, version, pairs, self._decoder, self._align, self._release, neutral)
        except Exception:
            # Not again at once: the next versions will be tested.
            learner.tested_version, learner.doubted = version, False
            learner.unscored.clear()
            self.pair_queues.note(learner)
            raise
        learner.step = test
        self.pair_queues.note(learner)
        return test

    def close(self, step: FineTuneStep, seconds: float) -> None:
        """Take in a step that finished `seconds` after it was opened: outcomes, new versions, a judgement.

        What fails for one adapter is on record and leaves the others their outcomes.
        """
        learners = [self.pair_queues.learners[name] for name in step.adapters]
        for learner in learners:
            learner.end()
        for learner in learners:
            begun = len(self.records)
            try:
                if isinstance(step, HeldOutEvaluation):
                    self._close_test(learner, step)
                else:
                    self._close_step(learner, step, seconds)
            except Exception as error:
                log.exception("a step or test of %s ended, and its outcome could not be taken in", learner.name)
                if isinstance(step, DpoStep):
                    self._stranded(learner, step.members[learner.name], begun, logs.first_line(error, with_kind=True))
            self.pair_queues.note(learner)

    def _stranded(self, learner: AdapterQueue, member: AdapterStep, begun: int, reason: str) -> None:
        """Skip those of a member's pairs that got no outcome among the records since `begun`."""
        told = {record.pair_id for record in self.records[begun:] if isinstance(record, PairRetired)}
        self._skipped(learner, [pair for pair in member.fresh if pair.pair_id not in told], reason)

    def _close_step(self, learner: AdapterQueue, step: DpoStep, seconds: float) -> None:
        state, member = self.adapter_cache.get(learner.name), step.members[learner.name]
        if member.doubted:
            # The version is tested before anybody is accused: where it is broken, every pair looks strange to it.
            learner.taken, learner.doubted = member.fresh, True
            learner.put_back()
            return
        self.records += member.scores
        learner.loss = member.loss if math.isfinite(member.loss) else FIRST_LOSS
        if member.starved:
            learner.taken = member.fresh
            self._starved([learner.name], _alone(step.members), member.error)
            self.size.shrink()
            return
        if member.burst:
            self.records += pair_outcomes.of_burst(learner, member, member.version, self.pair_queues.now)
            self.pair_queues.alarmed(learner.name)
            return
        if member.error and (sick := pair_outcomes.of_sick(learner, member, member.version)):
            self.records += sick
            return
        if member.error:
            self._skipped(learner, member.fresh, member.error)
            if not math.isfinite(member.loss) and member.version > 0:
                # Weights that answer with NaN or infinity must not be served a moment longer.
                learner.step_scale /= 2
                self._versions.take_back(learner, f"guard: {member.error}")
            return
        if member.turned and learner.turn is None:
            self._versions.keep_before_turn(learner)
            for pair in learner.begin_turn():
                self._retire(pair, "skipped", member.version, 0, "kept as a test until the preferences changed")
        pair_outcomes.of_turn(learner, member)
        ended = pair_outcomes.of_step(learner, member, state.version, self._align.epochs)
        self.records += ended
        for pair in member.fresh:
            self.size.forgive(pair.pair_id)
        self.pairs_trained += sum(record.state in ("trained", "learnt") for record in ended)
        if member.trained and not member.strange:
            self.steps += 1
            self.size.grow()
            own = sum(outcome.pair.direct for outcome in member.outcomes)
            learner.own, learner.foreign = learner.own + own, learner.foreign + len(member.outcomes) - own
            verdict = learner.turn.verdict if learner.turn is not None else ""
            told = f"trained: {learner.turn.told}" if learner.turn is not None and verdict == "change" else "trained"
            self._versions.publish(learner, member.version, told, member, seconds)
            drops = [score.drop_nats for score in member.scores]
            # New pairs tell for nothing that the language may be broken; the test tells for sure.
            learner.doubted |= bool(drops) and sum(drops) / len(drops) > self._guard.max_kl_nats / 2
            if verdict:
                self._end_turn(learner, verdict)

    def _end_turn(self, learner: AdapterQueue, verdict: str) -> None:
        """A change of preferences was recognised, or was none: then what it taught is taken back and held."""
        turn, learner.turn = learner.turn, None
        assert turn is not None
        if verdict == "change":
            return
        # Every version since then knows some of them.
        learner.withdrawn |= set(range(turn.since + 1, self.version(learner.name) + 1))
        learner.good = None
        told = f"guard: {len(turn.pair_ids)} pairs contradict what was learned before, and each other"
        self._versions.take_back(learner, told)
        learner.drop(turn.pair_ids)
        reason = "burst: the user's own signals contradict what was learned before, and each other"
        for pair_id in turn.pair_ids:
            self.records.append(
                PairRetired(pair_id, learner.name, "quarantined", self.version(learner.name), 0, reason)
            )

    def _close_test(self, learner: AdapterQueue, test: HeldOutEvaluation) -> None:
        learner.tested_version, learner.doubted = test.version, False
        self.size.forgive((learner.name, test.version))
        if test.neutral:
            self.pair_queues.neutral = test.neutral
        scores, records = pair_outcomes.of_test(learner, test)
        self.records += records
        if test.version and test.version == self.version(learner.name):
            if len(scores) == len(learner.held_out):
                learner.fully_tested = test.version
            problem = self._versions.judge(learner, TestScore.of(test.version, scores, test.neutral_nll), self._guard)
            nll, base_nll = test.neutral_nll or (None, None)
            self.records.append(VersionTested(learner.name, test.version, nll, base_nll, problem))

    def _retire(self, pair: TokenPair, state: PairState, version: int, epochs: int, reason: str = "") -> None:
        self.records.append(pair_outcomes.retired(pair, state, version, epochs, reason))

    # -- versions ----------------------------------------------------------------------------------------------------

    def rollback(self, adapter: str, version: int) -> int:
        """Publish an earlier version's weights as a new version; returns its number.

        Version 0 is the untrained adapter. Raises UnknownAdapter, UnknownVersion.
        """
        self._versions.demand(adapter)
        if version == self.version(adapter):
            return version
        return self.import_adapter(adapter, self._versions.weights(adapter, version), f"rollback to {version}", version)

    def import_adapter(self, adapter: str, weights: Weights | None, reason: str, restored: int | None = None) -> int:
        """Publish weights that this run did not learn (None: the untrained ones) as a new version; returns its number.

        What they are worth is not known: no earlier test is held against them.
        """
        learner = self.pair_queues.learner(adapter)
        self.abandon(adapter)
        self._versions.restore(learner, weights, reason, version=restored)
        learner.best = learner.good = learner.turn = None
        learner.withdrawn.clear()
        learner.caution, learner.suspicion.lenient = 1.0, False
        self.adapter_cache.files.spare(adapter, 0)
        return self.version(adapter)

    def introduce(self, adapter: str) -> None:
        """Publish the untrained weights of an adapter without a version: the base's answers at an adapter's cost."""
        if not self.version(adapter):
            self._versions.restore(self.pair_queues.learner(adapter), None, "introduced")

    def suspect(self, adapter: str, version: int) -> bool:
        """See `Versions.suspect`; False for an adapter that is gone."""
        return adapter in self.adapter_cache.versions and self._versions.suspect(
            self.pair_queues.learner(adapter), version
        )

    def withdraw(self, adapter: str, reason: str) -> None:
        """See `Versions.take_back`."""
        self._versions.take_back(self.pair_queues.learner(adapter), reason)

    # -- steps that end otherwise ------------------------------------------------------------------------------------

    def abandon(self, adapter: str) -> None:
        """Drop the adapter's step under way; its pairs go back to the head of the queue.

        So do those of all who share the step: nothing of it has become anyone's yet, so they are stepped again as if
        it had not begun.
        """
        learner = self.pair_queues.learners.get(adapter)
        if learner is None or learner.step is None:
            return
        learner.step.free()
        self.pair_queues.put_back(learner.step.adapters)

    def starved(self, step: FineTuneStep, alone: bool, reason: str) -> None:
        """Drop a step under way that found no memory; `alone`: nothing else of fine-tuning wanted any then."""
        if isinstance(step, DpoStep):
            step.free()
            self._starved(step.adapters, alone and _alone(step.members), reason)
        elif self.size.hopeless((step.adapters[0], step.version), others_first=False):
            self.skip(step, reason)
        else:
            self.abandon(step.adapters[0])

    def _starved(self, adapters: Collection[str], alone: bool, reason: str) -> None:
        """The pairs that a step took wait again; a single one behind all others, and not for ever."""
        self.pair_queues.put_back(adapters)
        for learner in [self.pair_queues.learners[name] for name in adapters if alone]:
            pair = learner.queue.popleft()
            if self.size.hopeless(pair.pair_id):
                self._skipped(learner, [pair], f"out of memory, also alone: {reason}")
            else:
                learner.queue.append(pair)
            self.pair_queues.note(learner)

    def skip(self, step: FineTuneStep, reason: str) -> None:
        """Drop a step under way because it failed."""
        step.free()
        if isinstance(step, DpoStep):
            self._failed(step.adapters, reason)
            return
        learner = self.pair_queues.learners[step.adapters[0]]
        learner.end()
        learner.tested_version, learner.doubted = step.version, False
        learner.unscored.clear()
        self.pair_queues.note(learner)

    def _failed(self, adapters: Collection[str], reason: str) -> None:
        """Retire the pairs that a failed step took as skipped; but those of several adapters are first tried apart,
        for one of them alone may be at fault."""
        for name in adapters:
            learner = self.pair_queues.learners[name]
            if len(adapters) > 1:
                learner.put_back()
                learner.alone = True
            else:
                pairs = learner.taken
                learner.end()
                self._skipped(learner, pairs, reason)
            self.pair_queues.note(learner)

    def _skipped(self, learner: AdapterQueue, fresh: Sequence[TokenPair], reason: str) -> None:
        version = self.version(learner.name)
        self.records.append(StepSkipped(learner.name, version, tuple(pair.pair_id for pair in fresh), reason))
        for pair in fresh:
            self._retire(pair, "skipped", version, pair.epochs_done, reason)

    def forget(self, adapter: str) -> None:
        """Remove the adapter and its pairs; its files wait for `files.forget`. Raises UnknownAdapter."""
        if adapter not in self.adapter_cache.files.left:
            self._versions.demand(adapter)
        self.abandon(adapter)
        self.pair_queues.forget(adapter)
        self.adapter_cache.forget(adapter)


def _alone(by_adapter: Mapping[str, StepBatch | AdapterStep]) -> bool:
    """Whether it is a single pair: no smaller step can be made."""
    return len(by_adapter) == 1 and all(len(own.fresh) == 1 and not own.replay for own in by_adapter.values())
