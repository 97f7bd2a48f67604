"""What the engine adds to its forwards and units: between two iterations, and to the first one after a rest."""

import random
import statistics
import time
from itertools import count, pairwise

from edged.bench.recorder import ReplayRecorder
from edged.engine.engine import Engine
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


def engine_time(parts: Engine, recorder: ReplayRecorder, quick: bool, progress: Progress) -> tuple[float, float]:
    """Seconds of an iteration outside its forward and units: (of every one, of one that finds the engine at rest).

    Of every one are planning, bookkeeping, delivery; besides, after a rest, the thread sleeps, caches and clocks are
    cold. Runs an engine of `parts`, which deliver to `recorder` and are closed afterwards. RuntimeError when it fails
    or gives no answer.
    """
    running = _Running(parts, recorder)
    try:
        progress(0, 1, "the engine's overhead")
        overhead_s = running.overhead_s()
        return overhead_s, running.rest_s(_QUICK_ROUNDS if quick else _ROUNDS, progress)
    finally:
        parts.stop(0.0)


class _Running:
    """An engine that is asked."""

    def __init__(self, parts: Engine, recorder: ReplayRecorder) -> None:
        self._parts, self._recorder = parts, recorder
        self._numbers, self._generator = count(), random.Random(0)
        parts.start()

    def overhead_s(self) -> float:
        """Median seconds between the work of two iterations, while some requests decode."""
        tokens = min(_TOKENS, self._parts.max_context_tokens // 2)
        for _ in range(_REQUESTS):
            self._submit(tokens, answer=tokens)
        self._wait()
        gaps = [
            then.started_s - now.started_s - now.forward_s - sum(seconds for _, _, seconds in now.units)
            for now, then in pairwise(self._parts.iterations())
        ]
        return statistics.median(gaps) if gaps else 0.0

    def rest_s(self, rounds: int, progress: Progress) -> float:
        """How much later the first token comes to a prompt after a rest than right after another one; at least 0.

        The median over the lengths of the differences of medians: what a rest costs does not grow with the prompt.
        """
        longest = self._parts.max_context_tokens - _ANSWER_TOKENS
        lengths = sorted({min(tokens, longest) for tokens in REST_PROMPTS})
        gained: dict[int, tuple[list[float], list[float]]] = {tokens: ([], []) for tokens in lengths}
        for number in range(rounds):
            for index, (tokens, (rested, in_a_row)) in enumerate(gained.items()):
                progress(number * len(lengths) + index, rounds * len(lengths), f"{tokens} tokens after a rest")
                time.sleep(_REST_S)
                rested.append(self._first_token_after_s(tokens))
                in_a_row.append(self._first_token_after_s(tokens))
        medians = (map(statistics.median, both) for both in gained.values())
        return max(0.0, statistics.median(rested - in_a_row for rested, in_a_row in medians))

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
        self._parts.submit(Request(name, prompt, Sampling(max_tokens=answer, ignore_eos=True)))
        return name

    def _wait(self) -> None:
        self._recorder.wait_for_whole_answers(lambda: self._parts.error, _LONGEST_WAIT_S)
