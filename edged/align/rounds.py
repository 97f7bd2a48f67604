"""Rounds of a federation: a start learns some of a participant's pairs, in an adapter that nobody is answered with."""

from collections import deque
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import islice

from edged.align.adapters.adapter import AdapterState
from edged.align.dpo.adapter_step import AdapterStep
from edged.align.feedback.pair import PairScored, TokenPair
from edged.align.jobs import JobQueue
from edged.align.pair_queues import AdapterQueue, StepBatch, SuppliedQueue
from edged.settings.load import AlignSettings

ROUNDS = "@round"
"""The queue of rounds, and their adapter: no user's name; never served, listed or saved."""


class RoundFailed(RuntimeError):
    """A round that has ended without a record; the message says why."""


@dataclass(slots=True, eq=False)
class LocalRound:
    """A round under way: what it trains, and the pairs that it has left."""

    state: AdapterState
    """The start, then what it has learned."""
    learned: list[TokenPair]
    """The pairs that it learns, which the participant's own adapter has learned."""
    held_out: list[TokenPair]
    """Held-out pairs that are scored before and after it; none where counts of them may not leave."""
    pairs: deque[TokenPair] = field(init=False)
    """Those of `learned` that are left."""
    right: list[float] = field(default_factory=list)
    """How many held-out pairs were right, before it and after it; a tie is a half."""
    ended: Future["LocalRound"] = field(default_factory=Future)

    def __post_init__(self) -> None:
        self.pairs = deque(self.learned)

    @property
    def tests(self) -> bool:
        """Whether the held-out pairs are to be scored next."""
        return bool(self.held_out) and (not self.right or (not self.pairs and len(self.right) < 2))

    def holds(self, pair_ids: Collection[int]) -> bool:
        """Whether any of these pairs was, or is to be, learned or scored."""
        return any(pair.pair_id in pair_ids for pair in (*self.learned, *self.held_out))


def learned_pairs(queue: AdapterQueue) -> list[TokenPair]:
    """Return the latest pairs that an adapter has learned, oldest first: none that wait, are tests or quarantined.

    Single ratings are left out, and all pairs while a job trains the adapter.
    """
    if isinstance(queue, JobQueue):
        return []
    return [pair for pair in queue.replay if pair.state in ("trained", "learnt") and not (pair.single or pair.imitate)]


@dataclass(slots=True)
class RoundQueue(SuppliedQueue):
    """The queue of the round under way, if any. It has no versions, and leaves no record of pairs."""

    round: LocalRound | None = None
    number: int = 0
    """The greatest version of a round's state, by which a slot tells them apart."""

    @property
    def due(self) -> bool:
        """Whether its next step or test can be opened."""
        return self.round is not None and self.step is None

    def begin_round(self, state: AdapterState, of: AdapterQueue, most: int, tests: bool) -> Future[LocalRound]:
        """Begin a round of the latest pairs that a participant has learned, `most` at most; returns its end.

        The future raises RoundFailed.
        """
        self.fail("another round began")
        learned = [_apart(pair) for pair in learned_pairs(of)[-most:]]
        held_out = [_apart(pair) for pair in of.held_out.values() if tests and not pair.single]
        state.version = state.newest_number = self.number + 1
        if not learned:
            raise RoundFailed("the participant has no learned pairs any more")
        self.round = LocalRound(state, learned, held_out)
        return self.round.ended

    def draw(self, align: AlignSettings) -> StepBatch:
        """Return the next step's pairs, which stay until the step was taken."""
        assert self.round is not None
        return StepBatch(list(islice(self.round.pairs, align.micro_batch_pairs)), [])

    def take_step(self, step: AdapterStep) -> None:
        """Take in a step that ended well; one of a round that has failed meanwhile counts for nothing."""
        if self.round is not None and step.state is self.round.state:
            for _ in step.fresh:
                self.round.pairs.popleft()
            self._go_on(self.round)

    def take_test(self, scores: Sequence[PairScored]) -> None:
        """Take in the scores of all held-out pairs."""
        if self.round is not None:
            margins = [score.reward_margin for score in scores]
            self.round.right.append(sum(0.5 if margin == 0 else float(margin > 0) for margin in margins))
            self._go_on(self.round)

    def _go_on(self, local: LocalRound) -> None:
        self.number = max(self.number, local.state.version)
        if not (local.pairs or local.tests):
            self.round = None
            local.ended.set_result(local)

    def fail(self, reason: str) -> None:
        """End the round under way without a result."""
        if self.round is not None:
            self.number = max(self.number, self.round.state.version)
            local, self.round = self.round, None
            local.ended.set_exception(RoundFailed(reason))

    def skip_test(self, version: int) -> None:
        """End a round whose held-out pairs could not be scored."""
        self.fail("the participant's held-out pairs could not be scored: the log says why")

    def drop(self, pair_ids: Collection[int]) -> None:
        """End a round that has learned, or would learn, one of these pairs, which are withdrawn."""
        if self.round is not None and self.round.holds(pair_ids):
            self.fail("a pair that it learns was withdrawn")


def _apart(pair: TokenPair) -> TokenPair:
    """Return a pair as the round's own: it was judged before."""
    return replace(pair, adapter=ROUNDS, epochs_done=0, trusted=True)
