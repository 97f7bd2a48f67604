"""What the engine adds to its forwards and units: between two iterations, and to the first one after a rest."""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import dataclass
from itertools import count
from typing import Any

from edged.bench.recorder import ReplayRecorder
from edged.engine.engine import Engine
from edged.engine.model_runner import RunnerOutput
from edged.engine.request import Request
from edged.engine.sampling.params import Sampling
from edged.profiler.measure import Progress

_REQUESTS, _TOKENS = 8, 48
"""Of the load that shows what lies between iterations."""
REST_PROMPTS = (8, 48, 160, 450)
"""Lengths of the prompts that meet an engine at rest, in tokens."""
_REST_S = 0.05
"""Longer rests cost no more: what is lost is lost by then."""
_ANSWER_TOKENS = 8
"""A rest follows an answer, whose decoding leaves other things in the caches than a prompt does."""
_ROUNDS, _QUICK_ROUNDS = 12, 3
_LONGEST_WAIT_S = 300.0


@dataclass(frozen=True, slots=True)
class EngineTime:
    """Seconds of an iteration outside its forward and units."""

    overhead_s: float
    """Of every iteration: planning, bookkeeping, delivery."""
    rest_s: float
    """Of one that finds the engine at rest, besides: its thread sleeps, caches and clocks are cold."""


def engine_time(parts: Engine, recorder: ReplayRecorder, quick: bool, progress: Progress) -> EngineTime:
    """Run an engine of `parts`, which deliver to `recorder` and are closed afterwards.

    RuntimeError when it fails or gives no answer.
    """
    running = _Running(parts, recorder)
    try:
        progress(0, 1, "the engine's overhead")
        overhead_s = running.overhead_s()
        return EngineTime(overhead_s, running.rest_s(_QUICK_ROUNDS if quick else _ROUNDS, progress))
    finally:
        running.stop()


class _Running:
    """An engine, and the seconds between the work of its iterations."""

    def __init__(self, parts: Engine, recorder: ReplayRecorder) -> None:
        self._parts, self._recorder = parts, recorder
        self._numbers, self._generator = count(), random.Random(0)
        self._engine = parts
        self._run = parts.runner.run
        self._gaps: list[float] = []
        self._last_end_s = 0.0
        setattr(parts.runner, "run", self._watched)  # noqa: B010 - a method of one object is watched
        self._engine.start()

    def stop(self) -> None:
        """End the engine."""
        self._engine.stop(0.0)

    def overhead_s(self) -> float:
        """Median seconds between the work of two iterations, while some requests decode."""
        tokens = min(_TOKENS, self._parts.max_context_tokens // 2)
        for _ in range(_REQUESTS):
            self._submit(tokens, answer=tokens)
        self._wait()
        return statistics.median(self._gaps) if self._gaps else 0.0

    def rest_s(self, rounds: int, progress: Progress) -> float:
        """How much later the first token comes to a prompt after a rest than right after another one; at least 0.

        The median over the lengths of the differences of medians: what a rest costs does not grow with the prompt.
        """
        longest = self._parts.max_context_tokens - _ANSWER_TOKENS
        lengths = sorted({min(tokens, longest) for tokens in REST_PROMPTS})
        rested: dict[int, list[float]] = {tokens: [] for tokens in lengths}
        in_a_row: dict[int, list[float]] = {tokens: [] for tokens in lengths}
        for number in range(rounds):
            for index, tokens in enumerate(lengths):
                progress(number * len(lengths) + index, rounds * len(lengths), f"{tokens} tokens after a rest")
                time.sleep(_REST_S)
                rested[tokens].append(self._first_token_after_s(tokens))
                in_a_row[tokens].append(self._first_token_after_s(tokens))
        differences = [statistics.median(rested[n]) - statistics.median(in_a_row[n]) for n in lengths]
        return max(0.0, statistics.median(differences))

    def _first_token_after_s(self, tokens: int) -> float:
        """Seconds from a lone prompt's submission to its first token."""
        name = self._submit(tokens, _ANSWER_TOKENS)
        self._wait()
        return self._recorder.answers[name].ttft_s or 0.0

    def _submit(self, tokens: int, answer: int) -> str:
        """A prompt that shares no beginning with another one."""
        vocab = self._parts.model.shape.vocab_size
        prompt = tuple(self._generator.choices(range(min(8, vocab - 1), vocab), k=tokens))
        name = f"timed {next(self._numbers)}"
        self._recorder.expect(name, time.monotonic(), tokens)
        self._engine.submit(Request(name, prompt, Sampling(max_tokens=answer, ignore_eos=True)))
        return name

    def _wait(self) -> None:
        self._recorder.whole_answers(lambda: self._engine.error, _LONGEST_WAIT_S)

    def _watched(self, *arguments: Any, **named: Any) -> RunnerOutput:
        began_s = time.perf_counter()
        if self._last_end_s:
            self._gaps.append(began_s - self._last_end_s)
        work = self._run(*arguments, **named)
        self._last_end_s = began_s + work.forward_s + sum(seconds for _, seconds in work.units)
        return work
