"""Replay of a recorded request load and real preference pairs against the engine, in process."""

import gc
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edged.align.feedback.pair import TokenPair
from edged.align.feedback.pair_formats import Format, read_pairs
from edged.align.feedback.pair_tokens import tokenize_pair
from edged.engine.engine import Engine
from edged.lab.bench.figures import EVERY_S
from edged.lab.bench.load_run import ADAPTER, LoadPlan, LoadRun, Progress
from edged.lab.bench.traces import Arrival, RequestTrace, length_scale, read_trace
from edged.profiler.recorder import ReplayRecorder
from edged.store.feedback import PairRow, Side
from edged.text.tokenizer import Tokenizer

_PROBE_REPEATS = 3
_PROBED_PERCENTILES = (5, 25, 50, 75, 100)
"""Percentiles of the prompts' lengths to probe. Times grow faster than lengths: interpolation needs several points."""
_LONGEST_PROBE_S = 120.0


class ReplayError(RuntimeError):
    """The replay cannot continue; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayPlan(LoadPlan):
    """A replay's load, preference pairs and model."""

    pairs: Path
    model_dir: Path
    pair_format: Format = "hh"


OnPair = Callable[[Engine, TokenPair, float], None]
"""Callback with a pair before it is submitted to the engine, and the seconds since the start of the load."""


def replay(
    plan: ReplayPlan, progress: Progress = lambda _line: None, on_pair: OnPair = lambda _engine, _pair, _at_s: None
) -> dict[str, Any]:
    """Run the plan and report; units are in the keys' names.

    Raises ReplayError, and what reading the trace, the pairs or the model raises: TraceError, OSError, ModelRefused,
    TokenizerError.
    """
    load_before = os.getloadavg()[0]
    trace = read_trace(plan.trace, plan.seed)
    tokenizer = Tokenizer.load(plan.model_dir)
    pairs, bad_lines = load_pairs(plan.pairs, plan.pair_format, tokenizer, plan.settings.align.max_pair_tokens)
    recorder = ReplayRecorder()
    engine = Engine.build(plan.settings, plan.model_dir, recorder.deliver, recorder.journal, None)
    # As in the daemon: long-lived objects are exempt from garbage collection.
    gc.collect()
    gc.freeze()
    engine.start()
    try:
        # The adapter is applied from the start, so that policies that learn late or never pay for it, too.
        engine.publish_untrained(ADAPTER).result()
        run = _Replay(plan, engine, recorder, pairs, _plain_ids(tokenizer), progress)
        run.on_pair = on_pair
        report = run.play(trace)
    finally:
        engine.stop(0.0)
    return {
        "measured_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "load_average_before": load_before,
        **report,
        "pairs_file": {"name": plan.pairs.name, "usable": len(pairs), "bad_lines": bad_lines},
    }


def load_pairs(path: Path, format: Format, tokenizer: Tokenizer, max_tokens: int) -> tuple[list[TokenPair], int]:
    """Return the file's pairs in tokens, and the number of invalid lines. Raises ReplayError when there are no
    pairs."""
    pairs: list[TokenPair] = []
    bad_lines = 0
    for number, pair in read_pairs(path, format):
        if isinstance(pair, str):
            bad_lines += 1
            continue
        row = PairRow(
            id=number,
            created_at="",
            adapter=ADAPTER,
            signal_id="",
            source="replay",
            weight=1.0,
            messages=tuple(pair["messages"]) if "messages" in pair else None,
            prompt=pair.get("prompt"),
            prompt_ids=None,
            chosen=Side(pair["chosen"]),
            rejected=Side(pair["rejected"]),
            state="queued",
        )
        pairs.append(tokenize_pair(tokenizer, row, max_tokens)[0])
    if not pairs:
        raise ReplayError(f'"{path}" has no usable pair in {bad_lines} lines: is --format {format} right?')
    return pairs, bad_lines


def _plain_ids(tokenizer: Tokenizer) -> range:
    """The ids after those that end an answer; all where no others are left."""
    ids = range(max(tokenizer.eos_ids) + 1, tokenizer.vocab_size)
    return ids if len(ids) > 1 else range(tokenizer.vocab_size)


class _Replay(LoadRun):
    """A load run against a running engine."""

    engine: Engine
    on_pair: OnPair

    # -- the machine -------------------------------------------------------------------------------------------------

    def _lone_ttft(self, trace: RequestTrace) -> Callable[[float], float]:
        context = self.engine.max_context_tokens
        scale = length_scale(trace, context)
        lengths = np.percentile([row.prompt_tokens * scale for row in trace.rows], _PROBED_PERCENTILES)
        # One token alone is a decode's time, too.
        probed = sorted({1, *(int(min(max(1.0, length), context - 1)) for length in lengths)})
        self._progress(f"measuring prompts of {', '.join(map(str, probed))} tokens alone")
        generator = random.Random(self._plan.seed)
        self._alone_s(generator, probed[0])
        seconds = [min(self._alone_s(generator, length) for _ in range(_PROBE_REPEATS)) for length in probed]
        return lambda tokens: float(np.interp(tokens, probed, seconds))

    def _alone_s(self, generator: random.Random, num_tokens: int) -> float:
        ids = tuple(generator.choices(self._prompts.ids, k=num_tokens))
        answer = self.recorder.answers[self._submit(Arrival(0.0, ids, 1), time.monotonic())]
        self._wait_for_probe()
        if answer.ttft_s is None:
            raise ReplayError(f"a prompt of {num_tokens} tokens got no token: {answer.finish}")
        return answer.ttft_s

    def _burst_s(self, burst: Sequence[Arrival]) -> float:
        self._progress(f"measuring a burst of {len(burst)} requests")
        started = time.monotonic()
        for arrival in burst:
            self._submit(arrival, started)
        self._wait_for_probe()
        return time.monotonic() - started

    def _wait_for_probe(self) -> None:
        if not self._wait(_LONGEST_PROBE_S):
            raise ReplayError(self.engine.error or f"the engine needs more than {_LONGEST_PROBE_S:.0f} s to warm up")

    def _wait(self, seconds: float) -> bool:
        """Wait up to `seconds`; whether every request is answered, while the engine runs."""
        return self.recorder.wait_until_answered(seconds, lambda: not self.engine.error)

    # -- the load ----------------------------------------------------------------------------------------------------

    def _send(self, load: Sequence[Arrival], start_s: float) -> None:
        self._next_look_s = start_s + EVERY_S
        for arrival, pair in self._accompanied(load):
            self._sleep_until(start_s + arrival.at_s, start_s)
            self._submit(arrival, start_s + arrival.at_s)
            if pair is not None:
                self.on_pair(self.engine, pair, time.monotonic() - start_s)
                self.recorder.expect_pair(pair.pair_id)
                self.engine.submit_pairs([pair])
        self._sleep_until(start_s + self._plan.seconds, start_s)
        self._look(start_s)

    def _sleep_until(self, moment_s: float, start_s: float) -> None:
        while (now := time.monotonic()) < moment_s or now >= self._next_look_s:
            if now >= self._next_look_s:
                self._look(start_s)
                self._next_look_s += EVERY_S
            else:
                time.sleep(min(moment_s, self._next_look_s) - now)
            if self.engine.error:
                raise ReplayError(self.engine.error)

    def _drain(self, end_s: float, limit_s: float) -> None:
        self._progress(f"waiting at most {limit_s:.0f} s for {self.recorder.open_requests} answers")
        if not self._wait(limit_s):
            for request_id, answer in list(self.recorder.answers.items()):
                if answer.finish is None:
                    self.engine.cancel(request_id)
            self._wait(limit_s)
        if self.engine.error:
            raise ReplayError(self.engine.error)
