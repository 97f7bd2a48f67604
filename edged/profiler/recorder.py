"""A recorder of an engine's events and learning records during a replay."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from edged.align.feedback.pair import PairRetired, PairScored, Record, StepSkipped
from edged.engine.request import Event, FinishEvent, TokenEvent


@dataclass(slots=True)
class ReplayedAnswer:
    """One request of the replay; times are seconds of the recorder's clock."""

    due_s: float
    prompt_tokens: int
    token_s: list[float] = field(default_factory=list)
    """Times at which the tokens were delivered."""
    finish: FinishEvent | None = None

    @property
    def ttft_s(self) -> float | None:
        """Time to first token from the trace's due time, so that a late sender does not flatter the engine."""
        return self.token_s[0] - self.due_s if self.token_s else None

    @property
    def whole(self) -> bool:
        """Whether the answer came to its end."""
        return self.finish is not None and self.finish.reason in ("length", "stop")

    @property
    def tpot_s(self) -> float:
        """Mean time per output token after the first; 0 for answers of a single token."""
        return (self.token_s[-1] - self.token_s[0]) / max(1, len(self.token_s) - 1)


@dataclass(slots=True)
class SentPair:
    """One preference pair of the replay; times are seconds of the recorder's clock."""

    sent_s: float
    learned_s: float | None = None
    """Time at which the first version that was trained on the pair was published."""


class ReplayRecorder:
    """Receives the engine's events and records; the other methods may be called from any thread meanwhile."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Create an empty recorder; `clock` returns the current time in seconds."""
        self.clock = clock
        self.answers: dict[str, ReplayedAnswer] = {}
        self.scores: list[tuple[float, PairScored]] = []
        """Scored pairs with the times at which their records came."""
        self.pairs: dict[int, SentPair] = {}
        """Submitted pairs by pair id."""
        self.skipped_steps: list[StepSkipped] = []
        self._changed = threading.Condition()
        self.open_requests = 0
        """Number of requests that are submitted and have not ended yet."""

    def expect(self, request_id: str, due_s: float, prompt_tokens: int) -> None:
        """Register a request that is about to be submitted."""
        with self._changed:
            self.answers[request_id] = ReplayedAnswer(due_s, prompt_tokens)
            self.open_requests += 1

    def refuse(self, request_id: str) -> None:
        """Register that the engine refused the request."""
        with self._changed:
            self.open_requests -= 1

    def expect_pair(self, pair_id: int) -> None:
        """Register a pair that is about to be submitted."""
        self.pairs[pair_id] = SentPair(self.clock())

    def deliver(self, events: list[Event]) -> None:
        """The engine's callback for tokens and ends."""
        now = self.clock()
        ended = 0
        for event in events:
            answer = self.answers.get(event.request_id)
            if answer is None:
                # A candidate's, for which no client waits.
                continue
            if isinstance(event, TokenEvent):
                answer.token_s.append(now)
            else:
                answer.finish = event
                ended += 1
        if ended:
            with self._changed:
                self.open_requests -= ended
                self._changed.notify_all()

    def journal(self, records: list[Record]) -> None:
        """The engine's callback for the learning loop's records."""
        now = self.clock()
        for record in records:
            if isinstance(record, PairScored) and record.split == "prequential":
                self.scores.append((now, record))
            elif isinstance(record, PairRetired) and record.epochs_done and record.state != "skipped":
                pair = self.pairs[record.pair_id]
                pair.learned_s = pair.learned_s or now
            elif isinstance(record, StepSkipped):
                self.skipped_steps.append(record)

    def wait_until_answered(self, timeout_s: float, alive: Callable[[], bool] = lambda: True) -> bool:
        """Wait for the end of every request; False on timeout, or once the engine is no longer `alive`."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while self.open_requests and alive():
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(min(left, 0.5))
        return not self.open_requests

    def wait_for_whole_answers(self, problem: Callable[[], str | None], timeout_s: float) -> None:
        """Wait until every request is answered to its end.

        `problem` returns why the engine no longer runs, or None. Raises RuntimeError with that, on timeout, or when a
        request ended otherwise.
        """
        if not self.wait_until_answered(timeout_s, lambda: not problem()):
            raise RuntimeError(f"the engine: {problem() or 'no answer in time'}")
        ends = [answer.finish for answer in self.answers.values() if answer.finish is not None]
        if bad := [end.error or end.reason for end in ends if end.reason not in ("length", "stop")]:
            raise RuntimeError(f"{len(bad)} of {len(self.answers)} requests failed, the first with: {bad[0]}")
