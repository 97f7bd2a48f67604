"""Pair queues by adapter: waiting, replayed and held-out pairs, the next step's, and which adapters have work."""

import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Collection, Iterator, KeysView, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, takewhile
from operator import itemgetter

from edged.align.dpo.adapter_step import AdapterStep
from edged.align.dpo.evaluation import HeldOutEvaluation
from edged.align.dpo.step import DpoStep
from edged.align.feedback.outliers import OutlierDetector, OutlierHistory
from edged.align.feedback.pair import PairRetired, PairScored, PairState, Record, TokenPair, is_practice
from edged.align.guard import MIN_PAIRS, AdapterHealth, GuardState, PreferenceChange
from edged.align.starts import StartChoice
from edged.runtime.token_bucket import TokenBucket
from edged.settings.live import Live
from edged.settings.load import AlignSettings, GuardSettings, Settings

FinetuneStep = DpoStep | HeldOutEvaluation
FIRST_LOSS = math.log(2.0)
"""The DPO loss of an adapter that answers as the base."""
EVALUATE_EVERY = 8
"""Versions between two tests while pairs keep coming."""
HELD_OUT_PAIRS, HELD_OUT_AGE = 16, 200
"""Most held-out pairs of an adapter, and its pairs after which a held-out one is trained on instead."""
_REPLAY_POOL = 64
_ADAPTERS_TOLD = 16
"""Adapters whose pairs are told one by one."""
_MAX_ASKED = 64
"""Most adapters that are considered for another's step."""


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The pairs of an adapter's next step."""

    fresh: list[TokenPair]
    replay: list[TokenPair]

    @property
    def num_tokens(self) -> int:
        """Number of forward tokens of all pairs."""
        return sum(pair.num_tokens for pair in (*self.fresh, *self.replay))


@dataclass(slots=True)
class AdapterQueue:
    """The pairs and progress of one adapter."""

    name: str
    detector: OutlierDetector = field(default_factory=OutlierDetector)
    rate: TokenBucket = field(default_factory=TokenBucket)
    guard: GuardState = field(default_factory=GuardState)
    choice: StartChoice = field(default_factory=StartChoice)
    waiting: deque[TokenPair] = field(default_factory=deque)
    """Pairs beyond `feedback.pairs_per_hour`."""
    queue: deque[TokenPair] = field(default_factory=deque)
    queued_s: float = math.inf
    """Since when pairs are queued, in seconds; inf where none are, -inf where they wait for no others."""
    replay: deque[TokenPair] = field(default_factory=lambda: deque(maxlen=_REPLAY_POOL))
    held_out: dict[int, TokenPair] = field(default_factory=dict)
    """Held-out pairs by id, oldest first."""
    unscored: set[int] = field(default_factory=set)
    """Held-out pairs that no version was tested on yet."""
    new_pairs: int = 0
    """Number of new pairs that came."""
    held_out_since: dict[int, int] = field(default_factory=dict)
    """Value of `new_pairs` when each held-out pair came, by pair id."""
    step: FinetuneStep | None = None
    """The step or test under way; other adapters may share it."""
    taken: list[TokenPair] = field(default_factory=list)
    """Pairs that the step under way took from the queue, or from `practice`."""
    steps: int = 0
    """Number of steps that ended: seeds a step's replay pairs, whichever adapters share it, however often it begins."""
    alone: bool = False
    """Whether a step that it shared failed: it shares none before one has ended."""
    one_by_one: int = 0
    """Number of pairs at the head of the queue that are trained on one at a time, since a step of them failed."""
    unreadable: bool = False
    """Whether its files could not be read: it has no work before they can be."""
    loss: float = FIRST_LOSS
    practice: deque[TokenPair] = field(default_factory=deque)
    """The daemon's own pairs, which are trained on while the person's own leave time."""
    practice_versions: int = 0
    """Number of the latest versions that practice made and no test has seen."""

    @property
    def tested(self) -> bool:
        """Whether tests judge the adapter's versions."""
        return True

    @property
    def pairs(self) -> int:
        """Number of the adapter's pairs that wait for training or are in a step; not practice."""
        return len(self.queue) + (0 if is_practice(self.taken) else len(self.taken))

    # -- pairs in ----------------------------------------------------------------------------------------------------

    def enqueue(self, pair: TokenPair, guard: GuardSettings, now: float) -> tuple[PairState, str] | None:
        """File a submitted pair by its state, or a new one by the rules; returns its new state and why, if it has one.

        `now` in seconds.
        """
        if pair.state == "held_out":
            self._hold_out(pair)
            return None
        if pair.again and pair.state == "queued":
            if all(each.pair_id != pair.pair_id for each in (*self.queue, *self.waiting, *self.taken)):
                self.queue.append(pair)
            return None
        contradicts = self.detector.note(pair)
        if pair.state != "queued":
            self.replay.append(pair)
        elif pair.trusted or pair.epochs_done:
            self.queue.append(pair)
        elif self.detector.alarm_left_s(now) and not pair.first_party:
            return "quarantined", "burst: it came while the user's pairs were held, see the first ones of the burst"
        elif not (contradicts or pair.alike) and self._is_for_tests(guard):
            self._hold_out(replace(pair, state="held_out"))
            self.unscored.add(pair.pair_id)
            return "held_out", ""
        else:
            self.waiting.append(pair)
            self.admit(now)
        return None

    def _is_for_tests(self, guard: GuardSettings) -> bool:
        """Whether a new pair is held out: the newest are, so that tests follow current preferences."""
        self.new_pairs += 1
        share = guard.held_out_share
        return share > 0 and self.new_pairs % max(1, round(1 / share)) == 0

    def _hold_out(self, pair: TokenPair) -> None:
        self.held_out[pair.pair_id], self.held_out_since[pair.pair_id] = pair, self.new_pairs

    def admit(self, now: float) -> None:
        """Queue the waiting pairs that the rate limit allows by `now` (seconds)."""
        while self.waiting and not self.rate.wait_s(now):
            self.rate.take(now)
            self.queue.append(self.waiting.popleft())

    # -- tests -------------------------------------------------------------------------------------------------------

    def to_test(self, version: int) -> list[TokenPair]:
        """The held-out pairs to test a version with: at times all, else the unscored and, for language, the newest."""
        pairs = list(self.held_out.values())
        if version - self.guard.fully_tested >= EVALUATE_EVERY:
            return pairs
        few = len(pairs) - MIN_PAIRS
        return [pair for index, pair in enumerate(pairs) if index >= few or pair.pair_id in self.unscored]

    def finish_test(self, test: HeldOutEvaluation) -> tuple[list[PairScored], list[Record]]:
        """Quarantine a test's outlying new held-out pairs; returns (scores that the guard may use, records).

        Scores of single ratings are the guard's alone.
        """
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
            if not scored.rating:
                records += [scored, first] if new else [scored]
        self.unscored -= {scored.pair_id for scored in used}
        self.practice_versions = 0
        return used, records

    def skip_test(self, version: int) -> None:
        """Give up the failed test of a version; the next versions will be tested."""
        self.guard.take_test(version)
        self.unscored.clear()
        self.practice_versions = 0

    def outgrown(self) -> list[TokenPair]:
        """Queue and return the held-out pairs that are too old or too many, of those that were scored."""
        surplus = len(self.held_out) - HELD_OUT_PAIRS
        old = [
            pair
            for index, (pair_id, pair) in enumerate(self.held_out.items())
            if (index < surplus or self.new_pairs - self.held_out_since[pair_id] > HELD_OUT_AGE)
            and pair_id not in self.unscored
        ]
        for pair in old:
            del self.held_out[pair.pair_id], self.held_out_since[pair.pair_id]
        queued = [replace(pair, state="queued") for pair in old]
        self.queue.extend(queued)
        return queued

    # -- steps -------------------------------------------------------------------------------------------------------

    def practice_pairs(self, align: AlignSettings) -> list[TokenPair]:
        """Return the next pairs of practice; none while the person's own wait."""
        waits = self.queue or self.waiting or self.guard.change is not None
        return [] if waits or not align.practice else list(islice(self.practice, align.micro_batch_pairs))

    def draw(self, align: AlignSettings) -> StepBatch:
        """Draw the next step's pairs, which stay in the queue until `begin`; where none are queued, practice."""
        if self.one_by_one:
            align = align.model_copy(update={"micro_batch_pairs": 1, "replay_share": 0.0})
        if not self.queue:
            return StepBatch(self.practice_pairs(align), [])
        fresh = list(islice(self.queue, align.micro_batch_pairs))
        share = len(fresh) * align.replay_share
        if not share or not self.replay:
            return StepBatch(fresh, [])
        chance = random.Random(f"{self.name} {self.steps}")
        # A share of less than one pair is kept by chance: single pairs would never have replay pairs else.
        wanted = round(share + 1e-9) or int(chance.random() < share)
        return StepBatch(fresh, chance.sample(list(self.replay), min(len(self.replay), wanted)))

    def begin(self, draw: StepBatch) -> None:
        """Take these pairs from the queue, or from practice, for the next step."""
        self.taken = draw.fresh
        for pair in draw.fresh:
            (self.practice if pair.practice else self.queue).remove(pair)

    def put_back(self, pairs: Sequence[TokenPair] | None = None) -> None:
        """Return the pairs of a step that was not taken, or only `pairs` of them, to the head of their queue."""
        for pair in reversed(self.taken if pairs is None else pairs):
            (self.practice if pair.practice else self.queue).appendleft(pair)
        self.step, self.taken = None, []

    def end(self) -> None:
        """Record the end of the step or test, with or without success."""
        tested = isinstance(self.step, HeldOutEvaluation)
        self.step, self.taken = None, []
        if not tested:
            self.alone, self.one_by_one = False, max(0, self.one_by_one - 1)
            self.steps += 1

    def finish_step(self, adapter_step: AdapterStep, version: int, epochs: int) -> list[PairRetired]:
        """File the pairs of a step that was taken, or not needed; each is trained on `epochs` times. Returns records.

        Direct pairs are added to a change of preferences under observation.
        """
        if is_practice(adapter_step.fresh):
            return []
        # Gradients of single ratings are smaller than those of pairs.
        norm = None if adapter_step.rated else adapter_step.grad_norm
        self.detector.learn([(each.pair, each.loss, each.verdict) for each in adapter_step.outcomes], norm)
        records = []
        for outcome in adapter_step.outcomes:
            pair, done = outcome.pair, outcome.pair.epochs_done + int(outcome.trained)
            if self.guard.change is not None and pair.first_party and pair.telling and not pair.epochs_done:
                longer = len(pair.chosen) - len(pair.rejected)
                self.guard.change.take(pair.pair_id, outcome.loss, outcome.verdict.contrary, longer)
            why = outcome.verdict.why or (adapter_step.rejected_reason if outcome.trained else "")
            if adapter_step.rejected_reason and outcome.trained and pair.trusted:
                # A trusted pair that was not trained on yet is queued again: its next step is without those at fault.
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
        """Raise the alarm; drop and return the burst's pairs: new ones that were not trained on or tested yet."""
        self.detector.raise_alarm(now)
        waiting = (*self.queue, *self.waiting, *(self.held_out[pair_id] for pair_id in sorted(self.unscored)))
        burst = [pair for pair in waiting if not (pair.epochs_done or pair.trusted or pair.first_party or pair.again)]
        self.drop({pair.pair_id for pair in burst})
        return burst

    def begin_change(self) -> list[TokenPair]:
        """Begin to observe a change of preferences: forget what was usual, drop and return the earlier held-out pairs.

        These and the replay pairs, dropped as well, show what the user no longer wants.
        """
        self.guard.change = PreferenceChange(self.guard.version_before_change)
        self.guard.best = None
        self.detector.begin_anew()
        before = [pair for pair in self.held_out.values() if pair.pair_id not in self.unscored]
        self.drop({pair.pair_id for pair in before})
        self.replay.clear()
        return before

    def drop(self, pair_ids: Collection[int]) -> None:
        """Remove these pairs from all queues and the held-out pairs."""
        for pairs in (self.queue, self.waiting, self.replay):
            kept = [pair for pair in pairs if pair.pair_id not in pair_ids]
            pairs.clear()
            pairs.extend(kept)
        for pair_id in self.held_out.keys() & set(pair_ids):
            del self.held_out[pair_id], self.held_out_since[pair_id]
            self.unscored.discard(pair_id)


@dataclass(slots=True)
class SuppliedQueue(AdapterQueue):
    """A queue of pairs that are not a person's new ones: they stay where they are until their step was taken."""

    @property
    def tested(self) -> bool:
        """False: no test judges its versions, if it has any."""
        return False

    @property
    def pairs(self) -> int:
        """None: nobody gave them now."""
        return 0

    def begin(self, draw: StepBatch) -> None:
        """Note the pairs of the step under way."""
        self.taken = draw.fresh

    def put_back(self, pairs: Sequence[TokenPair] | None = None) -> None:
        """Note that the step was not taken."""
        self.step, self.taken = None, []


class PairQueues:
    """The queues by adapter, and which adapters have work.

    A queue that is asked for may be changed by the caller: before totals are read, such queues are counted again.
    """

    def __init__(self, versions: dict[str, int], settings: Live[Settings]) -> None:
        """`versions` are the current ones by adapter; an adapter that gets a queue is added with version 0."""
        self._versions, self._settings = versions, settings
        self.queues: dict[str, AdapterQueue] = {}
        self.now = 0.0
        """Time of the latest `tick`, in seconds."""
        self.neutral: list[TokenPair] = []
        """Neutral text, with which every version is tested."""
        self.followed: set[str] = set()
        """Adapters whose writer is another node of a fleet: they have no work here."""
        self._changed: dict[str, None] = {}
        """Adapters whose queues were asked for since the latest recount."""
        self._pairs: dict[str, int] = {}
        """Pairs of each adapter that has any waiting for training or in a step; `_pairs_queued` is the sum."""
        self._pairs_queued = 0
        self._ready: dict[str, None] = {}
        self._gathering: dict[str, None] = {}
        """Adapters whose queued pairs wait for others (`align.accumulate_s`), those due first first."""
        self._practising: dict[str, None] = {}
        """Adapters without other work that have practice."""
        self._waiting: dict[str, None] = {}
        """Adapters with pairs beyond `feedback.pairs_per_hour`."""
        self._alarmed: dict[str, None] = {}
        """Adapters whose alarm was raised; it may have ended since."""

    def __getitem__(self, adapter: str) -> AdapterQueue:
        """The adapter's queue, created if there is none."""
        if adapter not in self.queues:
            self._versions.setdefault(adapter, 0)
            feedback = self._settings.current.feedback
            detector, rate = OutlierDetector(feedback), TokenBucket(feedback.pairs_per_hour)
            self.queues[adapter] = AdapterQueue(adapter, detector, rate)
        self._changed[adapter] = None
        return self.queues[adapter]

    def is_withdrawn(self, adapter: str) -> bool:
        """Whether the adapter's current version is bad, while another one is read to take its place."""
        return adapter in self.queues and self.queues[adapter].guard.health is AdapterHealth.WITHDRAWN

    def exchange(self, queue: AdapterQueue) -> None:
        """Put a queue in the place of its adapter's other one. A version that was withdrawn stays so."""
        withdrawn = self.is_withdrawn(queue.name)
        self.forget(queue.name)
        self.queues[queue.name] = queue
        queue.guard.health = AdapterHealth.WITHDRAWN if withdrawn else AdapterHealth.SOUND

    def forget(self, adapter: str) -> None:
        """Remove the adapter's queue with all its pairs."""
        self.queues.pop(adapter, None)
        for names in (self._changed, self._ready, self._practising, self._gathering, self._waiting, self._alarmed):
            names.pop(adapter, None)
        self._pairs_queued -= self._pairs.pop(adapter, 0)

    def follow(self, adapter: str) -> None:
        """Give an adapter no work any more: another node writes it. A step under way ends by itself."""
        self.followed.add(adapter)
        if adapter in self.queues:
            self._changed[adapter] = None

    def recount(self) -> None:
        """Update the totals, and the adapters that have work, by the queues that were asked for."""
        align = self._settings.current.align
        for name in self._changed:
            queue = self.queues[name]
            idle = queue.step is None and not queue.unreadable and name not in self.followed
            queue.queued_s = min(queue.queued_s, self.now) if queue.queue else math.inf
            due = bool(queue.queue) and self._due(queue)
            _list(self._gathering, name, bool(queue.queue) and not due)
            ready = idle and (due or self.test_due(queue))
            _list(self._ready, name, ready)
            # One whose step has ended is listed anew, behind the others.
            _list(self._practising, name, idle and not ready and queue.practice_pairs(align))
            _list(self._waiting, name, queue.waiting)
            _list(self._alarmed, name, queue.detector.alarm_left_s(self.now) > 0)
            self._pairs_queued += queue.pairs - self._pairs.pop(name, 0)
            if queue.pairs:
                self._pairs[name] = queue.pairs
        self._changed.clear()

    def _due(self, queue: AdapterQueue) -> bool:
        """Whether the queued pairs wait for no others."""
        align = self._settings.current.align
        return len(queue.queue) >= align.micro_batch_pairs or queue.queued_s + align.accumulate_s <= self.now

    def flush_accumulation(self, adapter: str) -> None:
        """Have the adapter's queued pairs wait for no others, since its next version is waited for."""
        if adapter in self._gathering:
            self[adapter].queued_s = -math.inf

    # -- adapters with work ------------------------------------------------------------------------------------------

    def practising(self) -> list[str]:
        """Return the adapters that have practice and no other work, the one that has waited longest first."""
        self.recount()
        # The settings may have changed since it was counted.
        return [name for name in self._practising if self.queues[name].practice_pairs(self._settings.current.align)]

    def ready(self) -> KeysView[str]:
        """Adapters that have work, can be read and have no step under way, in the order in which they became so."""
        self.recount()
        return self._ready.keys()

    @property
    def pairs_queued(self) -> int:
        """Number of all pairs that wait for training or are in a step."""
        self.recount()
        return self._pairs_queued

    def most_pairs(self) -> dict[str, int]:
        """Return the pairs that wait or are in a step, of the adapters with most; any thread may ask."""
        return dict(heapq.nlargest(_ADAPTERS_TOLD, self._pairs.copy().items(), key=itemgetter(1)))

    def with_step(self) -> Iterator[AdapterQueue]:
        """Queues with a step or test under way."""
        return (queue for queue in self.queues.values() if queue.step is not None)

    def holding(self, pair_ids: Collection[int]) -> list[str]:
        """Adapters whose step under way holds any of these pairs."""
        return [
            queue.name
            for queue in self.with_step()
            if isinstance(queue.step, DpoStep) and queue.step.adapter_steps[queue.name].holds(pair_ids)
        ]

    def test_due(self, queue: AdapterQueue) -> bool:
        """Whether an adapter's next step is a test of its current version."""
        if not self.testable(queue):
            return False
        settings = self._settings.current
        behind = self._versions.get(queue.name, 0) - queue.guard.tested_version
        if queue.guard.health is AdapterHealth.SUSPECT or behind >= EVALUATE_EVERY:
            return True
        if queue.queue:
            return False
        # Versions of practice alone wait for each other.
        alone = behind == queue.practice_versions and queue.practice_pairs(settings.align)
        return bool(queue.unscored) or (behind > 0 and not alone)

    def testable(self, queue: AdapterQueue) -> bool:
        """Whether there are pairs or text to test the current version with; version 0 needs no test of its language."""
        return queue.tested and bool(queue.held_out or (self.neutral and self._versions.get(queue.name, 0)))

    def take_step(
        self, first: AdapterQueue, align: AlignSettings, admit: Callable[[str], bool]
    ) -> dict[str, StepBatch]:
        """Take the next pairs of `first`, and of others that `admit` accepts and whose pairs fit the same window."""
        draws = {first.name: first.draw(align)}
        practice = is_practice(draws[first.name].fresh)
        most = 1 if first.alone or first.one_by_one or practice else align.joint_adapters
        room = align.window_tokens - draws[first.name].num_tokens
        for queue in (self.queues[name] for name in islice(self.ready(), _MAX_ASKED)):
            if len(draws) == most or room <= 0:
                break
            if queue.name in draws or queue.alone or queue.one_by_one or self.test_due(queue):
                continue
            draw = queue.draw(align)
            if draw.num_tokens <= room and admit(queue.name):
                draws[queue.name] = draw
                room -= draw.num_tokens
        for name, draw in draws.items():
            self[name].begin(draw)
        return draws

    # -- waiting pairs, alarms ---------------------------------------------------------------------------------------

    def drop(self, pair_ids: Collection[int]) -> None:
        """Remove these pairs from the queues of all adapters."""
        for name in self.queues:
            self[name].drop(pair_ids)

    def tick(self, now: float) -> None:
        """Set the time to `now` (seconds), and queue the waiting pairs that the rate limit allows."""
        self.now = now
        self._changed |= dict.fromkeys(takewhile(lambda name: self._due(self.queues[name]), self._gathering))
        self.recount()
        for name in self._waiting:
            self[name].admit(now)

    def next_pair_s(self) -> float | None:
        """Time (seconds) at which the next waiting pair may be queued or trained on; None when none waits."""
        self.recount()
        accumulate_s = self._settings.current.align.accumulate_s
        dues_s = [self.queues[name].queued_s + accumulate_s for name in islice(self._gathering, 1)]
        return min(
            [*dues_s, *(self.now + self.queues[name].rate.wait_s(self.now) for name in self._waiting)], default=None
        )

    def waiting(self) -> int:
        """Number of pairs that wait for the rate limit."""
        self.recount()
        return sum(len(self.queues[name].waiting) for name in self._waiting)

    def restore_outlier_history(self, adapter: str, past: OutlierHistory) -> None:
        """Restore an adapter's history from an earlier run."""
        queue = self[adapter]
        queue.detector.restore(past, self.now)
        guard = queue.guard
        guard.tested_version, guard.lr_scale = past.tested_version, past.lr_scale
        guard.baseline_version, guard.baseline_nll_change, guard.baseline_kl_nats = (
            past.baseline_version,
            past.baseline_nll_change,
            past.baseline_kl_nats,
        )

    def clear_alarm(self, adapter: str) -> None:
        """End an adapter's alarm after a decision about its burst: new pairs are trained on again."""
        if adapter in self.queues:
            self[adapter].detector.clear_alarm()

    def alarms(self) -> tuple[str, ...]:
        """Adapters whose new pairs are quarantined unseen."""
        self.recount()
        return tuple(name for name in self._alarmed if self.queues[name].detector.alarm_left_s(self.now))


def _list(names: dict[str, None], name: str, listed: object) -> None:
    """Append `name` to `names` where it is missing and to be `listed` (true), else remove it if not."""
    if listed:
        names.setdefault(name)
    else:
        names.pop(name, None)
