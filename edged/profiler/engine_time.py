"""The engine's overhead beside forwards and units: between two iterations, and in the first one after a rest."""

import random
import statistics
import time
from itertools import count, pairwise

from edged.engine.engine import Engine
from edged.engine.request import Request
from edged.engine.sampling.params import Sampling
from edged.profiler.measure import Progress
from edged.profiler.recorder import ReplayRecorder

_REQUESTS, _TOKENS = 8, 48
"""Number of requests, and tokens of each prompt and answer, that measure the overhead between iterations."""
REST_PROMPTS = (8, 48, 160, 450)
"""Lengths of the prompts that are sent to an engine at rest, in tokens."""
_REST_S = 0.05
"""Length of a rest. Longer rests cost no more: by then caches and clocks are cold."""
_ANSWER_TOKENS = 8
"""Length of the answer before a rest: decoding leaves other data in the caches than a prompt does."""
_ROUNDS, _QUICK_ROUNDS = 12, 3
_LONGEST_WAIT_S = 300.0


def engine_time(parts: Engine, recorder: ReplayRecorder, quick: bool, progress: Progress) -> tuple[float, float]:
    """Return seconds of an iteration outside its forward and units: (every iteration, additionally after a rest).

    The first is planning, bookkeeping and delivery; after a rest the thread also has to wake, and caches and clocks are
    cold. Runs an engine of `parts`, which deliver to `recorder` and are closed afterwards. Raises RuntimeError when it
    fails or gives no answer.
    """
    running = _Running(parts, recorder)
    try:
        progress(0, 1, "the engine's overhead")
        overhead_s = running.overhead_s()
        return overhead_s, running.rest_s(_QUICK_ROUNDS if quick else _ROUNDS, progress)
    finally:
        parts.stop(0.0)


class _Running:
    """A running engine that receives timed requests."""

    def __init__(self, parts: Engine, recorder: ReplayRecorder) -> None:
        self._parts, self._recorder = parts, recorder
        self._numbers, self._generator = count(), random.Random(0)
        parts.start()

    def overhead_s(self) -> float:
        """Return the median seconds between the work of two iterations, while some requests decode."""
        num_tokens = min(_TOKENS, self._parts.max_context_tokens // 2)
        for _ in range(_REQUESTS):
            self._submit(num_tokens, answer=num_tokens)
        self._wait()
        gaps = [
            then.started_s - now.started_s - now.forward_s - sum(seconds for _, _, seconds in now.units)
            for now, then in pairwise(self._parts.iterations())
        ]
        return statistics.median(gaps) if gaps else 0.0

    def rest_s(self, rounds: int, progress: Progress) -> float:
        """Return how much later the first token of a prompt comes after a rest than right after another prompt; at
        least 0.

        It is the median over the lengths of the differences of medians, since the cost of a rest does not grow with the
        prompt.
        """
        longest = self._parts.max_context_tokens - _ANSWER_TOKENS
        lengths = sorted({min(num_tokens, longest) for num_tokens in REST_PROMPTS})
        gained: dict[int, tuple[list[float], list[float]]] = {num_tokens: ([], []) for num_tokens in lengths}
        for number in range(rounds):
            for index, (num_tokens, (rested, in_a_row)) in enumerate(gained.items()):
                progress(number * len(lengths) + index, rounds * len(lengths), f"{num_tokens} tokens after a rest")
                time.sleep(_REST_S)
                rested.append(self._first_token_after_s(num_tokens))
                in_a_row.append(self._first_token_after_s(num_tokens))
        medians = (map(statistics.median, both) for both in gained.values())
        return max(0.0, statistics.median(rested - in_a_row for rested, in_a_row in medians))

    def _first_token_after_s(self, num_tokens: int) -> float:
        """Return the seconds from a lone prompt's submission to its first token."""
        name = self._submit(num_tokens, _ANSWER_TOKENS)
        self._wait()
        return self._recorder.answers[name].ttft_s or 0.0

    def _submit(self, num_tokens: int, answer: int) -> str:
        """Submit a prompt that shares no prefix with another one."""
        vocab = self._parts.model.shape.vocab_size
        prompt = tuple(self._generator.choices(range(min(8, vocab - 1), vocab), k=num_tokens))
        name = f"timed {next(self._numbers)}"
        self._recorder.expect(name, time.monotonic(), num_tokens)
        self._parts.submit(Request(name, prompt, Sampling(max_tokens=answer, ignore_eos=True)))
        return name

    def _wait(self) -> None:
        self._recorder.wait_for_whole_answers(lambda: self._parts.error, _LONGEST_WAIT_S)
