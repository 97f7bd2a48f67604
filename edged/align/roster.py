"""All learners of one base model: who has work, whose pairs wait for their time, whose are held for a burst.

Owns the learners and the counts over all of them. Must not know steps' work, weights or records.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, KeysView

from edged.align.dpo import DpoStep
from edged.align.learner import Learner
from edged.align.pair import PairState, TokenPair
from edged.align.rate import PairRate
from edged.align.suspicion import Past, Suspicion
from edged.config import FeedbackSettings, GuardSettings


class Roster:
    """Learners by adapter. After anything of a learner changed, `note` brings what is asked for here up to date."""

    def __init__(self, versions: dict[str, int], guard: GuardSettings, feedback: FeedbackSettings | None) -> None:
        """`versions` are the current ones by adapter; who gets a learner and is not among them has version 0.

        Without `feedback` settings no pair is suspicious and none has to wait for its time.
        """
        self._versions, self._guard, self._feedback = versions, guard, feedback
        self.learners: dict[str, Learner] = {}
        self.now = 0.0
        """Of the latest `tick`, in seconds."""
        self.pairs_queued = 0
        """Pairs that wait for training or are in a step."""
        self.neutral: list[TokenPair] = []
        """Neutral text, with which every version is tested."""
        self._counted: dict[str, int] = {}
        """How many of them are each adapter's."""
        self._ready: dict[str, None] = {}
        self._waiting: dict[str, None] = {}
        """Adapters with pairs beyond `feedback.pairs_per_hour`."""
        self._alarmed: set[str] = set()
        """Adapters whose alarm was raised; it may have ended since."""

    def configure(self, guard: GuardSettings) -> None:
        """Take over other settings for the pairs and tests to come."""
        self._guard = guard

    def learner(self, adapter: str) -> Learner:
        """The adapter's learner, new or not."""
        self._versions.setdefault(adapter, 0)
        if adapter not in self.learners:
            rate = PairRate(self._feedback.pairs_per_hour if self._feedback else 0)
            self.learners[adapter] = Learner(adapter, Suspicion(self._feedback), rate)
        return self.learners[adapter]

    def forget(self, adapter: str) -> None:
        """Remove the adapter's learner with all its pairs."""
        self.learners.pop(adapter, None)
        self._ready.pop(adapter, None)
        self._waiting.pop(adapter, None)
        self._alarmed.discard(adapter)
        self.pairs_queued -= self._counted.pop(adapter, 0)

    # -- who has work ------------------------------------------------------------------------------------------------

    def ready(self) -> KeysView[str]:
        """Adapters that have work, can be read and have no step under way, in the order in which they became so."""
        return self._ready.keys()

    def with_step(self) -> Iterator[Learner]:
        """Those who have a step or test under way."""
        return (learner for learner in self.learners.values() if learner.step is not None)

    def holding(self, pair_ids: Collection[int]) -> list[str]:
        """Adapters whose step under way holds any of these pairs."""
        return [
            learner.name
            for learner in self.with_step()
            if isinstance(learner.step, DpoStep) and learner.step.members[learner.name].holds(pair_ids)
        ]

    def test_due(self, learner: Learner) -> bool:
        """Whether its next step is a test of the present version."""
        if not self.testable(learner):
            return False
        behind = self._versions.get(learner.name, 0) - learner.tested_version
        if learner.doubted and behind > 0:
            return True
        return behind >= self._guard.evaluate_every or (not learner.queue and (behind > 0 or bool(learner.unscored)))

    def testable(self, learner: Learner) -> bool:
        """Whether there is anything to test the present version with; the untrained one has no language of its own."""
        return bool(learner.held_out or (self.neutral and self._versions.get(learner.name, 0)))

    def note(self, learner: Learner) -> None:
        """Bring who is ready or waits, and `pairs_queued`, up to date after anything of a learner changed."""
        idle = learner.step is None and not learner.unreadable
        if idle and (learner.queue or self.test_due(learner)):
            self._ready.setdefault(learner.name)
        else:
            self._ready.pop(learner.name, None)
        if learner.waiting:
            self._waiting[learner.name] = None
        else:
            self._waiting.pop(learner.name, None)
        self.pairs_queued += learner.pairs - self._counted.get(learner.name, 0)
        self._counted[learner.name] = learner.pairs

    def set_unreadable(self, adapter: str, unreadable: bool) -> None:
        """Whether the adapter's files could not be read: then nothing of it is ready."""
        if adapter in self.learners:
            self.learners[adapter].unreadable = unreadable
            self.note(self.learners[adapter])

    # -- pairs -------------------------------------------------------------------------------------------------------

    def take_in(self, learner: Learner, pair: TokenPair) -> tuple[PairState, str] | None:
        """Put a submitted pair where its state says or a new one belongs; its new state and why, if it has one."""
        taken = learner.take_in(pair, self._guard, self.now)
        self.note(learner)
        return taken

    def put_back(self, adapters: Collection[str]) -> None:
        """Their step was not taken: its pairs go back to the heads of their queues."""
        for name in adapters:
            self.learners[name].put_back()
            self.note(self.learners[name])

    def drop(self, pair_ids: Collection[int]) -> None:
        """Learn nothing more from these pairs, whoever learns from them."""
        for learner in self.learners.values():
            learner.drop(pair_ids)
            self.note(learner)

    # -- pairs that wait, pairs that are held ------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """It is `now` (seconds): pairs that waited for their time are queued."""
        self.now = now
        for name in list(self._waiting):
            self.learners[name].admit(now)
            self.note(self.learners[name])

    def next_pair_s(self) -> float | None:
        """When the next waiting pair may be queued; None when none waits."""
        return min((self.learners[name].rate.next_s() for name in self._waiting), default=None)

    def waiting(self) -> int:
        """Pairs that wait for their time."""
        return sum(len(self.learners[name].waiting) for name in self._waiting)

    def recall(self, adapter: str, past: Past) -> None:
        """What is usual for an adapter, as an earlier run left it."""
        learner = self.learner(adapter)
        learner.suspicion.recall(past, self.now)
        learner.tested_version, learner.step_scale = past.tested_version, past.step_scale
        if past.alarm_left_s:
            self._alarmed.add(adapter)

    def alarmed(self, adapter: str) -> None:
        """Its alarm was raised."""
        self._alarmed.add(adapter)

    def calm(self, adapter: str) -> None:
        """Somebody decided about a burst: what comes is learned from again."""
        if adapter in self.learners:
            self.learners[adapter].suspicion.calm()
            self._alarmed.discard(adapter)

    def alarms(self) -> tuple[str, ...]:
        """Users whose new pairs are quarantined unseen."""
        return tuple(name for name in self._alarmed if self.learners[name].suspicion.alarm_left_s(self.now))
