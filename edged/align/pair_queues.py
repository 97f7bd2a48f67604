"""Pairs by adapter: which wait, which are replayed or held out, which a next step takes; and who has work at all."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Collection, Iterator, KeysView, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from edged.align.dpo.adapter_step import AdapterStep
from edged.align.dpo.evaluation import HeldOutEvaluation
from edged.align.dpo.step import DpoStep
from edged.align.feedback.outliers import OutlierDetector, OutlierHistory
from edged.align.feedback.pair import PairRetired, PairScored, PairState, Record, TokenPair
from edged.align.guard import GuardState, PreferenceChange
from edged.runtime.token_bucket import TokenBucket
from edged.settings.live import Live
from edged.settings.load import AlignSettings, GuardSettings, Settings

FineTuneStep = DpoStep | HeldOutEvaluation
FIRST_LOSS = math.log(2.0)
"""DPO's loss of an adapter that answers as the base."""
_REPLAY_POOL = 64
_MOST_ASKED = 64
"""Adapters that are asked whether their pairs fit into another's step."""


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
    detector: OutlierDetector = field(default_factory=OutlierDetector)
    rate: TokenBucket = field(default_factory=TokenBucket)
    guard: GuardState = field(default_factory=GuardState)
    waiting: deque[TokenPair] = field(default_factory=deque)
    """Pairs beyond `feedback.pairs_per_hour`."""
    queue: deque[TokenPair] = field(default_factory=deque)
    replay: deque[TokenPair] = field(default_factory=lambda: deque(maxlen=_REPLAY_POOL))
    held_out: dict[int, TokenPair] = field(default_factory=dict)
    """Oldest first."""
    unscored: set[int] = field(default_factory=set)
    """Held-out pairs that no version was tested on yet."""
    new_pairs: int = 0
    """How many came."""
    held_out_since: dict[int, int] = field(default_factory=dict)
    """`new_pairs` when each held-out pair came."""
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
    loss: float = FIRST_LOSS

    @property
    def pairs(self) -> int:
        """Pairs that wait for training or are in a step."""
        return len(self.queue) + len(self.taken)

    # -- pairs in ----------------------------------------------------------------------------------------------------

    def take_in(self, pair: TokenPair, guard: GuardSettings, now: float) -> tuple[PairState, str] | None:
        """Put a submitted pair where its state says, a new one where it belongs; its new state and why, if it has one.

        `now` in seconds.
        """
        if pair.state == "held_out":
            self._hold_out(pair)
            return None
        if pair.again:
            if all(each.pair_id != pair.pair_id for each in (*self.queue, *self.waiting, *self.taken)):
                self.queue.append(pair)
            return None
        contradicts = self.detector.note(pair)
        if pair.state != "queued":
            self.replay.append(pair)
        elif pair.trusted or pair.epochs_done:
            self.queue.append(pair)
        elif self.detector.alarm_left_s(now) and not pair.direct:
            return "quarantined", "burst: it came while the user's pairs were held, see the first ones of the burst"
        elif not contradicts and self._is_for_tests(guard):
            self._hold_out(replace(pair, state="held_out"))
            self.unscored.add(pair.pair_id)
            return "held_out", ""
        else:
            self.waiting.append(pair)
            self.admit(now)
        return None

    def _is_for_tests(self, guard: GuardSettings) -> bool:
        """Whether a new pair is kept for tests: the newest are, so that the present is tested."""
        self.new_pairs += 1
        share = guard.held_out_share
        return share > 0 and guard.held_out_pairs > 0 and self.new_pairs % max(1, round(1 / share)) == 0

    def _hold_out(self, pair: TokenPair) -> None:
        self.held_out[pair.pair_id], self.held_out_since[pair.pair_id] = pair, self.new_pairs

    def admit(self, now: float) -> None:
        """Queue those who waited for their time."""
        while self.waiting and self.rate.take(now):
            self.queue.append(self.waiting.popleft())

    # -- tests -------------------------------------------------------------------------------------------------------

    def to_test(self, version: int, guard: GuardSettings) -> list[TokenPair]:
        """The held-out pairs to test a version with: all at times, else the newest few, which tell of its language."""
        pairs = list(self.held_out.values())
        if version - self.guard.fully_tested >= guard.evaluate_every:
            return pairs
        few = len(pairs) - guard.min_pairs
        return [pair for index, pair in enumerate(pairs) if index >= few or pair.pair_id in self.unscored]

    def finish_test(self, test: HeldOutEvaluation) -> tuple[list[PairScored], list[Record]]:
        """(scores that a judgement may use, records): new held-out pairs that are outlying are quarantined."""
        used: list[PairScored] = []
        records: list[Record] = []
        for scored in test.scores:
            pair = self.held_out.get(scored.pair_id)
            new = scored.pair_id in self.unscored
            first = replace(scored, split="prequential", kl_nats=None)
            why = self.detector.judge(pair, scored.loss).why if pair is not None and new else ""
            if pair is not None and why:
                self.drop({pair.pair_id})
                records += [first, pair.retired("quarantined", test.version, 0, why)]
                continue
            used.append(scored)
            records += [scored, first] if new else [scored]
        self.unscored -= {scored.pair_id for scored in used}
        return used, records

    def skip_test(self, version: int) -> None:
        """The test of a version failed: not again at once, the next versions will be tested."""
        self.guard.tested_version, self.guard.test_soon = version, False
        self.unscored.clear()

    def outgrown(self, guard: GuardSettings) -> list[TokenPair]:
        """Held-out pairs that are too old or too many, which are queued from here on; only scored ones are."""
        surplus = len(self.held_out) - guard.held_out_pairs
        old = [
            pair
            for index, (pair_id, pair) in enumerate(self.held_out.items())
            if (index < surplus or self.new_pairs - self.held_out_since[pair_id] > guard.held_out_age)
            and pair_id not in self.unscored
        ]
        for pair in old:
            del self.held_out[pair.pair_id], self.held_out_since[pair.pair_id]
        queued = [replace(pair, state="queued") for pair in old]
        self.queue.extend(queued)
        return queued

    # -- steps -------------------------------------------------------------------------------------------------------

    def draw(self, align: AlignSettings) -> StepBatch:
        """The next step's pairs, which stay where they are until `begin`."""
        fresh = list(islice(self.queue, align.micro_batch_pairs))
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

    def put_back(self, pairs: Sequence[TokenPair] | None = None) -> None:
        """The step was not taken: its pairs, or these of them, go back to the head of the queue."""
        self.queue.extendleft(reversed(self.taken if pairs is None else pairs))
        self.step, self.taken = None, []

    def end(self) -> None:
        """The step or test ended, with or without success."""
        tested = isinstance(self.step, HeldOutEvaluation)
        self.step, self.taken = None, []
        if not tested:
            self.alone = False
            self.steps += 1

    def finish_step(self, member: AdapterStep, version: int, epochs: int) -> list[PairRetired]:
        """The pairs of a step that was taken, or needed none, go where they belong; each is trained on `epochs` times.

        Direct pairs are watched while it is open whether preferences have changed.
        """
        self.detector.learn([(each.pair, each.loss, each.verdict) for each in member.outcomes], member.grad_norm)
        records = []
        for outcome in member.outcomes:
            pair, done = outcome.pair, outcome.pair.epochs_done + int(outcome.trained)
            if self.guard.change is not None and pair.direct and not pair.epochs_done:
                longer = len(pair.chosen) - len(pair.rejected)
                self.guard.change.take(pair.pair_id, outcome.loss, outcome.verdict.contrary, longer)
            why = outcome.verdict.why or (member.strange if outcome.trained else "")
            if member.strange and outcome.trained and pair.trusted:
                # Nothing was learned yet of what somebody found good: its next step is without those at fault.
                self.queue.append(pair)
            elif why:
                records.append(pair.retired("quarantined", version, pair.epochs_done, why))
            elif outcome.trained and done < epochs:
                self.queue.append(replace(pair, epochs_done=done))
                records.append(pair.retired("queued", version, done))
            else:
                state: PairState = "trained" if outcome.trained else "learnt"
                self.replay.append(replace(pair, epochs_done=done, state=state))
                reason = "" if outcome.trained else f"loss {outcome.loss:.4f} is under align.loss_threshold"
                records.append(pair.retired(state, version, done, reason))
        return records

    # -- pairs out ---------------------------------------------------------------------------------------------------

    def hold_burst(self, now: float) -> list[TokenPair]:
        """Raise the alarm and give up what is of the burst: new pairs that nothing was done with yet."""
        self.detector.raise_alarm(now)
        waiting = (*self.queue, *self.waiting, *(self.held_out[pair_id] for pair_id in sorted(self.unscored)))
        burst = [pair for pair in waiting if not (pair.epochs_done or pair.trusted or pair.direct or pair.again)]
        self.drop({pair.pair_id for pair in burst})
        return burst

    def begin_change(self) -> list[TokenPair]:
        """The user's own signals say something else than before: forget what was usual; held-out pairs of before that.

        They, and the pairs to replay, speak for what the user no longer wants.
        """
        self.guard.change = PreferenceChange(self.guard.version_before_change)
        self.guard.best = None
        self.detector.begin_anew()
        before = [pair for pair in self.held_out.values() if pair.pair_id not in self.unscored]
        self.drop({pair.pair_id for pair in before})
        self.replay.clear()
        return before

    def drop(self, pair_ids: Collection[int]) -> None:
        """Learn nothing more from these pairs."""
        for pairs in (self.queue, self.waiting, self.replay):
            kept = [pair for pair in pairs if pair.pair_id not in pair_ids]
            pairs.clear()
            pairs.extend(kept)
        for pair_id in self.held_out.keys() & set(pair_ids):
            del self.held_out[pair_id], self.held_out_since[pair_id]
            self.unscored.discard(pair_id)


class PairQueues:
    """The queues by adapter, and who has work.

    Whoever asks for a queue may change it: before anything is said of them all, those that were asked for are counted
    again.
    """

    def __init__(self, versions: dict[str, int], settings: Live[Settings]) -> None:
        """`versions` are the current ones by adapter; who gets a queue and is not among them has version 0."""
        self._versions, self._settings = versions, settings
        self.queues: dict[str, AdapterQueue] = {}
        self.now = 0.0
        """Of the latest `tick`, in seconds."""
        self.neutral: list[TokenPair] = []
        """Neutral text, with which every version is tested."""
        self._changed: dict[str, None] = {}
        """Adapters whose queues were asked for since they were counted."""
        self._pairs: dict[str, int] = {}
        """How many pairs of each adapter wait for training or are in a step; `_pairs_queued` is the sum."""
        self._pairs_queued = 0
        self._ready: dict[str, None] = {}
        self._waiting: dict[str, None] = {}
        """Adapters with pairs beyond `feedback.pairs_per_hour`."""
        self._alarmed: dict[str, None] = {}
        """Adapters whose alarm was raised; it may have ended since."""

    def __getitem__(self, adapter: str) -> AdapterQueue:
        """The adapter's queue, new or not."""
        self._versions.setdefault(adapter, 0)
        if adapter not in self.queues:
            feedback = self._settings.now.feedback
            self.queues[adapter] = AdapterQueue(
                adapter, OutlierDetector(feedback), TokenBucket(feedback.pairs_per_hour)
            )
        self._changed[adapter] = None
        return self.queues[adapter]

    def forget(self, adapter: str) -> None:
        """Remove the adapter's queue with all its pairs."""
        self.queues.pop(adapter, None)
        for names in (self._changed, self._ready, self._waiting, self._alarmed):
            names.pop(adapter, None)
        self._pairs_queued -= self._pairs.pop(adapter, 0)

    def recount(self) -> None:
        """Bring what is said of all queues up to date with those that were asked for."""
        for name in self._changed:
            queue = self.queues[name]
            idle = queue.step is None and not queue.unreadable
            _list(self._ready, name, idle and (bool(queue.queue) or self.test_due(queue)))
            _list(self._waiting, name, bool(queue.waiting))
            _list(self._alarmed, name, queue.detector.alarm_left_s(self.now) > 0)
            self._pairs_queued += queue.pairs - self._pairs.get(name, 0)
            self._pairs[name] = queue.pairs
        self._changed.clear()

    # -- who has work ------------------------------------------------------------------------------------------------

    def ready(self) -> KeysView[str]:
        """Adapters that have work, can be read and have no step under way, in the order in which they became so."""
        self.recount()
        return self._ready.keys()

    @property
    def pairs_queued(self) -> int:
        """Pairs that wait for training or are in a step."""
        self.recount()
        return self._pairs_queued

    def with_step(self) -> Iterator[AdapterQueue]:
        """Those who have a step or test under way."""
        return (queue for queue in self.queues.values() if queue.step is not None)

    def holding(self, pair_ids: Collection[int]) -> list[str]:
        """Adapters whose step under way holds any of these pairs."""
        return [
            queue.name
            for queue in self.with_step()
            if isinstance(queue.step, DpoStep) and queue.step.members[queue.name].holds(pair_ids)
        ]

    def test_due(self, queue: AdapterQueue) -> bool:
        """Whether its next step is a test of the present version."""
        if not self.testable(queue):
            return False
        behind = self._versions.get(queue.name, 0) - queue.guard.tested_version
        if queue.guard.test_soon and behind > 0:
            return True
        every = self._settings.now.guard.evaluate_every
        return behind >= every or (not queue.queue and (behind > 0 or bool(queue.unscored)))

    def testable(self, queue: AdapterQueue) -> bool:
        """Whether there is anything to test the present version with; the untrained one has no language of its own."""
        return bool(queue.held_out or (self.neutral and self._versions.get(queue.name, 0)))

    def take_step(
        self, first: AdapterQueue, align: AlignSettings, admit: Callable[[str], bool]
    ) -> dict[str, StepBatch]:
        """Take the next pairs of `first`, and of others whom `admit` lets in and whose pairs fit into one window beside
        them."""
        draws = {first.name: first.draw(align)}
        most = 1 if first.alone else align.joint_adapters
        room = align.window_tokens - draws[first.name].tokens
        for queue in (self.queues[name] for name in islice(self.ready(), _MOST_ASKED)):
            if len(draws) == most or room <= 0:
                break
            if queue.name in draws or queue.alone or self.test_due(queue):
                continue
            draw = queue.draw(align)
            if draw.tokens <= room and admit(queue.name):
                draws[queue.name] = draw
                room -= draw.tokens
        for name, draw in draws.items():
            self[name].begin(draw)
        return draws

    # -- pairs that wait, pairs that are held ------------------------------------------------------------------------

    def drop(self, pair_ids: Collection[int]) -> None:
        """Learn nothing more from these pairs, whoever learns from them."""
        for name in self.queues:
            self[name].drop(pair_ids)

    def tick(self, now: float) -> None:
        """It is `now` (seconds): pairs that waited for their time are queued."""
        self.now = now
        self.recount()
        for name in self._waiting:
            self[name].admit(now)

    def next_pair_s(self) -> float | None:
        """When the next waiting pair may be queued; None when none waits."""
        self.recount()
        return min((self.queues[name].rate.next_s() for name in self._waiting), default=None)

    def waiting(self) -> int:
        """Pairs that wait for their time."""
        self.recount()
        return sum(len(self.queues[name].waiting) for name in self._waiting)

    def recall(self, adapter: str, past: OutlierHistory) -> None:
        """What is usual for an adapter, as an earlier run left it."""
        queue = self[adapter]
        queue.detector.recall(past, self.now)
        queue.guard.tested_version, queue.guard.step_scale = past.tested_version, past.step_scale

    def calm(self, adapter: str) -> None:
        """Somebody decided about a burst: what comes is learned from again."""
        if adapter in self.queues:
            self[adapter].detector.calm()

    def alarms(self) -> tuple[str, ...]:
        """Users whose new pairs are quarantined unseen."""
        self.recount()
        return tuple(name for name in self._alarmed if self.queues[name].detector.alarm_left_s(self.now))


def _list(names: dict[str, None], name: str, listed: bool) -> None:
    """Have `name` among the `names`, behind those that are, or not."""
    if listed:
        names.setdefault(name)
    else:
        names.pop(name, None)
