"""How long a request that comes in the middle of fine-tuning waits until its prompt is begun.

Owns the watching of what the engine runs and the arithmetic of an arrival. A piece is what nothing interrupts: a packed
forward or a unit.
"""

from __future__ import annotations

import random
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edged.align.feedback.pair import TokenPair
from edged.bench.recorder import ReplayRecorder
from edged.engine.build import build_parts_apart
from edged.engine.engine import Engine
from edged.engine.model_runner import FineTuneJob, RunnerOutput
from edged.engine.request import Request, Sampling
from edged.engine.sequence import Sequence as Running
from edged.scheduler.task import Plan
from edged.settings.load import Settings

FORWARD = "forward"
"""The kind of a packed forward; units have their own kinds' names."""
BETWEEN = "between"
"""The kind of what is no piece: planning, bookkeeping, opening a step."""
_LONGEST_WAIT_S = 600.0
_PROMPT_TOKENS, _ANSWER_TOKENS = 64, 4


@dataclass(frozen=True, slots=True)
class Piece:
    """What ran, and when: seconds of the monotonic clock."""

    kind: str
    tokens: int
    """Of an optimizer step the adapters that take one."""
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Wait:
    """One arrival: the piece that it met, and how long until its own packed forward began."""

    kind: str
    tokens: int
    """Of the piece, as `Piece` has them."""
    delay_s: float
    piece_s: float
    """How long the piece took in all; 0 between pieces."""
    outside_s: float
    """Of the delay, what was no piece: bookkeeping, opening a step, planning."""
    unit_ends: int
    """Units that ended between arrival and start: at most one is the target."""


def wait_of(pieces: Sequence[Piece], arrived_s: float, started_s: float) -> Wait:
    """What an arrival met; `pieces` are in order of time."""
    index = bisect_right(pieces, arrived_s, key=lambda piece: piece.begin_s) - 1
    met = pieces[index] if index >= 0 and arrived_s < pieces[index].end_s else None
    ended = [piece for piece in pieces[max(index, 0) :] if arrived_s < piece.end_s <= started_s]
    return Wait(
        kind=met.kind if met else BETWEEN,
        tokens=met.tokens if met else 0,
        delay_s=started_s - arrived_s,
        piece_s=met.end_s - met.begin_s if met else 0.0,
        outside_s=started_s - arrived_s - sum(piece.end_s - max(arrived_s, piece.begin_s) for piece in ended),
        unit_ends=sum(piece.kind != FORWARD for piece in ended),
    )


class Watch:
    """Remembers every piece of an executor's runs. Must be put in its place before the engine starts."""

    def __init__(self, run: Callable[..., RunnerOutput]) -> None:
        self.pieces: list[Piece] = []
        self._run = run

    def __call__(
        self,
        plan: Plan,
        sequences: dict[int, Running],
        jobs: dict[int, FineTuneJob],
        interrupted: Callable[[], bool],
        meanwhile: Callable[[], None],
    ) -> RunnerOutput:
        """`ModelRunner.run`: units lie back to back at its end, the forward before them."""
        work = self._run(plan, sequences, jobs, interrupted, meanwhile)
        moment = time.monotonic() - sum(seconds for _, seconds in work.units)
        if work.forward_s:
            tokens = sum(count for _, count in (*work.prefilled, *work.finetuned))
            self.pieces.append(Piece(FORWARD, tokens, moment - work.forward_s, moment))
        for unit, seconds in work.units:
            self.pieces.append(Piece(unit.kind, unit.tokens, moment, moment + seconds))
            moment += seconds
        return work


class Bench:
    """An engine that learns without pause while requests come one at a time."""

    def __init__(self, model: Path, settings: Settings, pairs: Sequence[TokenPair]) -> None:
        self._recorder = ReplayRecorder()
        parts = build_parts_apart(settings, model, None, self._recorder.deliver)
        self.watch = Watch(parts.runner.run)
        setattr(parts.runner, "run", self.watch)  # noqa: B010 - a method of one object is watched
        self.engine = Engine(parts)
        self.engine.start()
        self.engine.submit_pairs(list(pairs))

    def wait_until_learning(self) -> None:
        """Until the first step has been taken: what is loaded late is loaded then."""
        deadline_s = time.monotonic() + _LONGEST_WAIT_S
        while not self.engine.status()["finetune"]["steps"]:
            if self.engine.error or time.monotonic() > deadline_s:
                raise RuntimeError(f"the engine: {self.engine.error or 'no step in time'}")
            time.sleep(0.05)

    def arrive(self, name: str, prompt: tuple[int, ...]) -> tuple[float, float]:
        """One request from its arrival to its end: the moments of its arrival and of its forward's start."""
        sampling = Sampling(max_tokens=_ANSWER_TOKENS, temperature=0.0, ignore_eos=True)
        arrived_s = time.monotonic()
        self._recorder.expect(name, arrived_s, len(prompt))
        self.engine.submit(Request(name, prompt, sampling))
        self._recorder.whole_answers(lambda: self.engine.error, _LONGEST_WAIT_S)
        finish = self._recorder.answers[name].finish
        assert finish is not None, "a whole answer has ended"
        return arrived_s, arrived_s + finish.queue_s

    def close(self) -> None:
        """Stop the engine."""
        self.engine.stop(0.0)


def measure(
    model: Path, settings: Settings, pairs: Sequence[TokenPair], requests: int, mean_gap_s: float, seed: int
) -> tuple[list[Wait], dict[str, Any]]:
    """What each of `requests` met that came at random after the one before it ended; and what was learnt meanwhile."""
    chance = random.Random(seed)
    bench = Bench(model, settings, pairs)
    try:
        bench.wait_until_learning()
        before = bench.engine.status()
        vocab = int(before["model"]["vocab_size"])
        moments = []
        for number in range(requests):
            time.sleep(chance.expovariate(1.0 / mean_gap_s))
            prompt = tuple(chance.randrange(3, vocab) for _ in range(_PROMPT_TOKENS))
            moments.append(bench.arrive(str(number), prompt))
        after = bench.engine.status()
    finally:
        bench.close()
    learnt = {
        "steps": after["finetune"]["steps"] - before["finetune"]["steps"],
        "pairs_left": after["finetune"]["pairs_queued"],
    }
    return [wait_of(bench.watch.pieces, *moment) for moment in moments], learnt
