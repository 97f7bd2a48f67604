"""Pairs by adapter: which wait, which are replayed or held out, which a next step takes; and who has work at all."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, KeysView
from dataclasses import dataclass, field, replace

from edged.align.adapters.adapter import CopiedVersion
from edged.align.dpo.evaluation import HeldOutEvaluation
from edged.align.dpo.step import DpoStep
from edged.align.feedback.outliers import OutlierDetector, OutlierHistory
from edged.align.feedback.pair import PairState, TokenPair
from edged.align.guard import TestScore
from edged.align.preference_change import PreferenceChange
from edged.runtime.token_bucket import TokenBucket
from edged.settings.load import AlignSettings, FeedbackSettings, GuardSettings

FineTuneStep = DpoStep | HeldOutEvaluation
FIRST_LOSS = math.log(2.0)
"""DPO's loss of an adapter that answers as the base."""
_REPLAY_POOL = 64


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The pairs of an adapter's next step."""

    fresh: list[TokenPair]
    replay: list[TokenPair]

    @property
    def tokens(self) -> int:
        """Forward tokens of all pairs."""
        return sum(pair.tokens for pair in (*self.fresh, *self.replay))


@dataclass(slots=True)
class AdapterQueue:
    """One adapter's pairs and progress."""

    name: str
    suspicion: OutlierDetector = field(default_factory=OutlierDetector)
    rate: TokenBucket = field(default_factory=TokenBucket)
    waiting: deque[TokenPair] = field(default_factory=deque)
    """Pairs beyond `feedback.pairs_per_hour`."""
    queue: deque[TokenPair] = field(default_factory=deque)
    replay: deque[TokenPair] = field(default_factory=lambda: deque(maxlen=_REPLAY_POOL))
    held_out: dict[int, TokenPair] = field(default_factory=dict)
    """Oldest first."""
    unscored: set[int] = field(default_factory=set)
    """Held-out pairs that no version was tested on yet."""
    seen: int = 0
    """New pairs that came."""
    born: dict[int, int] = field(default_factory=dict)
    """`seen` when each held-out pair came."""
    step: FineTuneStep | None = None
    """Under way; other adapters may share it."""
    taken: list[TokenPair] = field(default_factory=list)
    """Of the queue, by the step under way."""
    steps: int = 0
    """How many ended: a step draws its replay pairs by this number, whoever shares it and however often it begins."""
    alone: bool = False
    """A step that it shared failed: it shares none before one has ended."""
    unreadable: bool = False
    """Its files could not be read: it has no work before they can be."""
    tested_version: int = -1
    fully_tested: int = 0
    """The version that was tested with all held-out pairs last."""
    doubted: bool = False
    """The present version is to be tested before the next step: it, or a pair, is strange."""
    suspected: int = -1
    """The version that answered with numbers that are not finite, latest."""
    withdrawn: set[int] = field(default_factory=set)
    """Versions that are not gone back to."""
    source: int = 0
    """The version whose weights were gone back to last."""
    restored_at_step: int = 0
    """`steps` then."""
    best: TestScore | None = None
    """The score that later versions are compared with."""
    own: int = 0
    foreign: int = 0
    """Pairs trained on since: direct ones, and others."""
    good: CopiedVersion | None = None
    """The newest version that passed its test, with the optimizer's moments."""
    step_scale: float = 1.0
    """Of the step size: halved each time that the language broke."""
    calm_tests: int = 0
    """Tests passed since."""
    caution: float = 1.0
    """Also of the step size: less the nearer the latest tested version is to the bounds on language."""
    turn: PreferenceChange | None = None
    """A change of preferences under observation."""
    undo: int = 0
    """The version before the latest one."""
    loss: float = FIRST_LOSS

    @property
    def pairs(self) -> int:
        """Pairs that wait for training or are in a step."""
        return len(self.queue) + len(self.taken)

    def take_in(self, pair: TokenPair, guard: GuardSettings, now: float) -> tuple[PairState, str] | None:
        """Put a submitted pair where its state says, a new one where it belongs; its new state and why, if it has one.

        `now` in seconds.
        """
        if pair.state == "held_out":
            self.held_out[pair.pair_id] = pair
            self.born[pair.pair_id] = self.seen
            return None
        if pair.again:
            if all(each.pair_id != pair.pair_id for each in (*self.queue, *self.waiting, *self.taken)):
                self.queue.append(pair)
            return None
        contradicts = self.suspicion.note(pair)
        if pair.state != "queued":
            self.replay.append(pair)
        elif pair.trusted or pair.epochs_done:
            self.queue.append(pair)
        elif self.suspicion.alarm_left_s(now) and not pair.direct:
            return "quarantined", "burst: it came while the user's pairs were held, see the first ones of the burst"
        elif not contradicts and self._hold_out(guard):
            self.held_out[pair.pair_id] = replace(pair, state="held_out")
            self.unscored.add(pair.pair_id)
            self.born[pair.pair_id] = self.seen
            return "held_out", ""
        else:
            self.waiting.append(pair)
            self.admit(now)
        return None

    def _hold_out(self, guard: GuardSettings) -> bool:
        """Whether a new pair is kept for tests: the newest are, so that the present is tested."""
        self.seen += 1
        share = guard.held_out_share
        return share > 0 and guard.held_out_pairs > 0 and self.seen % max(1, round(1 / share)) == 0

    def to_test(self, version: int, guard: GuardSettings) -> list[TokenPair]:
        """The held-out pairs to test a version with: all at times, else the newest few, which tell of its language."""
        pairs = list(self.held_out.values())
        if version - self.fully_tested >= guard.evaluate_every:
            return pairs
        few = len(pairs) - guard.min_pairs
        return [pair for index, pair in enumerate(pairs) if index >= few or pair.pair_id in self.unscored]

    def outgrown(self, guard: GuardSettings) -> list[TokenPair]:
        """Held-out pairs that are too old or too many, which are queued from here on; only scored ones are."""
        surplus = len(self.held_out) - guard.held_out_pairs
        old = [
            pair_id
            for index, pair_id in enumerate(self.held_out)
            if (index < surplus or self.seen - self.born[pair_id] > guard.held_out_age) and pair_id not in self.unscored
        ]
        pairs = [replace(self.held_out.pop(pair_id), state="queued") for pair_id in old]
        for pair in pairs:
            self.born.pop(pair.pair_id)
        self.queue.extend(pairs)
        return pairs

    def admit(self, now: float) -> None:
        """Queue those who waited for their time."""
        while self.waiting and not self.rate.wait_s(now):
            self.rate.take(now)
            self.queue.append(self.waiting.popleft())

    def hold_burst(self, now: float) -> list[TokenPair]:
        """Raise the alarm and give up what is the rest of the burst: new pairs that nothing was done with yet."""
        self.suspicion.raise_alarm(now)
        waiting = (*self.queue, *self.waiting, *(self.held_out[pair_id] for pair_id in sorted(self.unscored)))
        rest = [pair for pair in waiting if not (pair.epochs_done or pair.trusted or pair.direct or pair.again)]
        self.drop({pair.pair_id for pair in rest})
        return rest

    def begin_turn(self) -> list[TokenPair]:
        """The user's own signals say something else than before: forget what was usual; held-out pairs of before that.

        They, and the pairs to replay, speak for what the user no longer wants.
        """
        self.turn = PreferenceChange(self.undo)
        self.suspicion.begin_anew()
        self.best = None
        before = [pair for pair in self.held_out.values() if pair.pair_id not in self.unscored]
        self.drop({pair.pair_id for pair in before})
        self.replay.clear()
        return before

    def draw(self, align: AlignSettings) -> StepBatch:
        """The next step's pairs, which stay where they are until `begin`."""
        fresh = [self.queue[index] for index in range(min(len(self.queue), align.micro_batch_pairs))]
        share = len(fresh) * align.replay_share
        if not share or not self.replay:
            return StepBatch(fresh, [])
        chance = random.Random(f"{self.name} {self.steps}")
        # Single pairs would never be accompanied: chance keeps the share.
        wanted = round(share + 1e-9) or int(chance.random() < share)
        return StepBatch(fresh, chance.sample(list(self.replay), min(len(self.replay), wanted)))

    def begin(self, draw: StepBatch) -> None:
        """Its next step takes these pairs."""
        self.taken = [self.queue.popleft() for _ in draw.fresh]

    def put_back(self) -> None:
        """The step was not taken: its pairs go back to the head of the queue."""
        self.queue.extendleft(reversed(self.taken))
        self.step, self.taken = None, []

    def end(self) -> None:
        """The step or test ended, with or without success."""
        tested = isinstance(self.step, HeldOutEvaluation)
        self.step, self.taken = None, []
        if not tested:
            self.alone = False
            self.steps += 1

    def drop(self, pair_ids: Collection[int]) -> None:
        """Learn nothing more from these pairs."""
        for pairs in (self.queue, self.waiting, self.replay):
            kept = [pair for pair in pairs if pair.pair_id not in pair_ids]
            pairs.clear()
            pairs.extend(kept)
        for pair_id in self.held_out.keys() & set(pair_ids):
            del self.held_out[pair_id]
            self.unscored.discard(pair_id)
            self.born.pop(pair_id, None)


def joint_draws(
    first: AdapterQueue, others: Iterable[AdapterQueue], align: AlignSettings, admit: Callable[[str], bool]
) -> dict[str, StepBatch]:
    """The next pairs of `first`, and of those `others` whose pairs fit beside them into one window."""
    draws = {first.name: first.draw(align)}
    most = 1 if first.alone else align.joint_adapters
    room = align.window_tokens - draws[first.name].tokens
    for learner in others:
        if len(draws) == most or room <= 0:
            break
        if learner.name in draws or learner.alone:
            continue
        draw = learner.draw(align)
        if draw.tokens <= room and admit(learner.name):
            draws[learner.name] = draw
            room -= draw.tokens
    return draws


class PairQueues:
    """Learners by adapter. After anything of a learner changed, `note` brings what is asked for here up to date."""

    def __init__(self, versions: dict[str, int], guard: GuardSettings, feedback: FeedbackSettings | None) -> None:
        """`versions` are the current ones by adapter; who gets a learner and is not among them has version 0.

        Without `feedback` settings no pair is suspicious and none has to wait for its time.
        """
        self._versions, self._guard, self._feedback = versions, guard, feedback
        self.learners: dict[str, AdapterQueue] = {}
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

    def learner(self, adapter: str) -> AdapterQueue:
        """The adapter's learner, new or not."""
        self._versions.setdefault(adapter, 0)
        if adapter not in self.learners:
            rate = TokenBucket(self._feedback.pairs_per_hour if self._feedback else 0)
            self.learners[adapter] = AdapterQueue(adapter, OutlierDetector(self._feedback), rate)
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

    def with_step(self) -> Iterator[AdapterQueue]:
        """Those who have a step or test under way."""
        return (learner for learner in self.learners.values() if learner.step is not None)

    def holding(self, pair_ids: Collection[int]) -> list[str]:
        """Adapters whose step under way holds any of these pairs."""
        return [
            learner.name
            for learner in self.with_step()
            if isinstance(learner.step, DpoStep) and learner.step.members[learner.name].holds(pair_ids)
        ]

    def test_due(self, learner: AdapterQueue) -> bool:
        """Whether its next step is a test of the present version."""
        if not self.testable(learner):
            return False
        behind = self._versions.get(learner.name, 0) - learner.tested_version
        if learner.doubted and behind > 0:
            return True
        return behind >= self._guard.evaluate_every or (not learner.queue and (behind > 0 or bool(learner.unscored)))

    def testable(self, learner: AdapterQueue) -> bool:
        """Whether there is anything to test the present version with; the untrained one has no language of its own."""
        return bool(learner.held_out or (self.neutral and self._versions.get(learner.name, 0)))

    def note(self, learner: AdapterQueue) -> None:
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

    def take_in(self, learner: AdapterQueue, pair: TokenPair) -> tuple[PairState, str] | None:
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
        return min((self.now + self.learners[name].rate.wait_s(self.now) for name in self._waiting), default=None)

    def waiting(self) -> int:
        """Pairs that wait for their time."""
        return sum(len(self.learners[name].waiting) for name in self._waiting)

    def recall(self, adapter: str, past: OutlierHistory) -> None:
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
