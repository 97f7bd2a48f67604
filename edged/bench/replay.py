"""Replays a recorded request load and real preference pairs against the engine, in process."""

from __future__ import annotations

import gc
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from edged.align.feedback.pair import TokenPair
from edged.align.feedback.pair_formats import Format, read_pairs
from edged.align.feedback.pair_tokens import tokenize_pair
from edged.bench.recorder import (
    ReplayRecorder,
    alignment_figures,
    iteration_figures,
    learning_latency,
    prefix_figures,
    request_counts,
    score_series,
    serving_figures,
    slo_figures,
)
from edged.bench.timeline import Timeline
from edged.bench.traces import Arrival, RequestTrace, burst_of, length_scale, load_figures, read_trace, scale_trace
from edged.engine.engine import Engine
from edged.engine.request import EngineBusy, Request
from edged.engine.sampling.params import Sampling
from edged.settings.load import Settings
from edged.store.feedback import PairRow, Side
from edged.text.tokenizer import Tokenizer

ADAPTER = "replay"
"""The user whose requests are replayed and whose preferences are learnt meanwhile."""
LOAD_SHARE = 0.7
"""Of the requests per second that a burst reached: the rate of a replay that names none."""
_PROBE_REPEATS = 3
_PROBED_PERCENTILES = (5, 25, 50, 75, 100)
"""Of the prompts' lengths. Their times grow faster than the lengths: few points would lie above what is between."""
_LONGEST_PROBE_S = 120.0
_LINE_EVERY_S = 5.0


class ReplayError(RuntimeError):
    """The replay cannot go on; the message says why."""


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """What to replay. `rate_per_s` None: 70 % of the requests per second that a burst reached on this machine."""

    trace: str
    pairs: Path
    model_dir: Path
    settings: Settings
    pair_format: Format = "hh"
    rate_per_s: float | None = None
    retrain_rate: float = 0.1
    seconds: float = 60.0
    seed: int = 0


Progress = Callable[[str], None]
OnPair = Callable[[Engine, TokenPair, float], None]
"""Called with a pair before the engine gets it, and the seconds since the start of the load."""


def replay(
    plan: ReplayPlan,
    progress: Progress = lambda _line: None,
    on_pair: OnPair = lambda _engine, _pair, _at_s: None,
) -> dict[str, Any]:
    """Run the plan and report; units are in the keys' names.

    Raises ReplayError, and what reading the trace, the pairs or the model raises: TraceError, OSError, ModelRefused,
    TokenizerError.
    """
    load_before = os.getloadavg()[0]
    trace = read_trace(plan.trace, plan.seed)
    codec = Tokenizer.load(plan.model_dir)
    pairs, bad_lines = load_pairs(plan.pairs, plan.pair_format, codec, plan.settings.align.max_pair_tokens)
    recorder = ReplayRecorder()
    engine = Engine.build(plan.settings, plan.model_dir, recorder.deliver, recorder.journal, None)
    # As in the daemon: what lives for ever is not looked at by every garbage collection.
    gc.collect()
    gc.freeze()
    engine.start()
    try:
        player = _Player(plan, engine, recorder, codec, progress, on_pair)
        report = player.play(trace, pairs)
    finally:
        engine.stop(0.0)
    return {
        "measured_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "load_average_before": load_before,
        **report,
        "pairs_file": {"name": plan.pairs.name, "usable": len(pairs), "bad_lines": bad_lines},
    }


def load_pairs(path: Path, format: Format, codec: Tokenizer, max_tokens: int) -> tuple[list[TokenPair], int]:
    """The file's pairs in tokens, and the number of lines that are none. Raises ReplayError when there are no pairs."""
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
        pairs.append(tokenize_pair(codec, row, max_tokens)[0])
    if not pairs:
        raise ReplayError(f'"{path}" has no usable pair in {bad_lines} lines: is --format {format} right?')
    return pairs, bad_lines


class _Player:
    """One replay against a running engine."""

    def __init__(
        self,
        plan: ReplayPlan,
        engine: Engine,
        recorder: ReplayRecorder,
        codec: Tokenizer,
        progress: Progress,
        on_pair: OnPair,
    ) -> None:
        self._plan, self._engine, self._recorder, self._progress = plan, engine, recorder, progress
        self._token_ids = range(max(codec.eos_ids) + 1, codec.vocab_size)
        if len(self._token_ids) < 2:
            self._token_ids = range(codec.vocab_size)
        self._numbers = count()
        self._pairs_sent = 0
        self._on_pair = on_pair
        self._next_line_s = _LINE_EVERY_S

    def play(self, trace: RequestTrace, pairs: list[TokenPair]) -> dict[str, Any]:
        """Measure the machine, send the load, report."""
        plan, context = self._plan, self._engine.max_context_tokens
        # Policies that learn late or never are spared nothing: the adapter is applied from the start.
        self._engine.introduce(ADAPTER).result()
        forward_s = self._measure_forward(trace, context)
        capacity = None if plan.rate_per_s else self._measure_capacity(trace, context)
        rate = plan.rate_per_s or LOAD_SHARE * (capacity or 0.0)
        load = scale_trace(
            trace,
            rate_per_s=rate,
            seconds=plan.seconds,
            context_tokens=context,
            token_ids=self._token_ids,
            seed=plan.seed,
        )
        before = self._engine.status()
        measured_from = len(self._recorder.answers)
        with Timeline(self._engine.busy) as timeline:
            start_s = self._send(load, pairs)
        after = self._engine.status()
        self._drain()
        answers = list(self._recorder.answers.values())[measured_from:]
        if self._engine.error:
            raise ReplayError(self._engine.error)
        floor_s = plan.settings.scheduler.ttft_floor_ms / 1e3
        # The engine may still learn: both lists grow, a moment before its score.
        scores = list(self._recorder.scores)
        scored_s = self._recorder.scored_s[: len(scores)]
        return {
            "model": after["model"],
            "policy": plan.settings.scheduler.policy,
            "seed": plan.seed,
            "load": {
                **load_figures(trace, load, context),
                "seconds": plan.seconds,
                "rate_per_s": rate,
                "retrain_rate": plan.retrain_rate,
                "capacity_per_s": capacity,
            },
            "requests": request_counts(answers),
            **serving_figures(answers, start_s, plan.seconds),
            "slo": slo_figures(answers, [len(arrival.prompt_ids) for arrival in load], forward_s, floor_s),
            "finetune": self._finetuning(before, after),
            "alignment": alignment_figures(scores),
            "series": score_series(scores, scored_s, start_s),
            "timeline": timeline.rows(),
            "prefix": prefix_figures(before["prefix"], after["prefix"], answers),
            "iterations": iteration_figures(before["busy"], after["busy"]),
            "scheduler": {
                "decision_ms_p50": after["scheduler"]["decision_ms_p50"],
                "iterations": after["totals"]["iterations"] - before["totals"]["iterations"],
                "preemptions": after["totals"]["preemptions"] - before["totals"]["preemptions"],
                "cost_model_mape_percent": after["cost_model"]["mape_percent"],
                "cost_model": after["cost_model"],
            },
        }

    # -- the machine -------------------------------------------------------------------------------------------------

    def _measure_forward(self, trace: RequestTrace, context: int) -> Callable[[float], float]:
        """Seconds from submission to first token of a prompt alone on the engine, by its length in tokens."""
        scale = length_scale(trace, context)
        lengths = np.percentile([row.prompt_tokens * scale for row in trace.rows], _PROBED_PERCENTILES)
        longest = context - 1
        probed = sorted({int(min(max(1.0, length), longest)) for length in lengths})
        self._progress(f"measuring prompts of {', '.join(map(str, probed))} tokens alone")
        generator = random.Random(self._plan.seed)
        self._alone(generator, probed[0])
        seconds = [min(self._alone(generator, length) for _ in range(_PROBE_REPEATS)) for length in probed]
        return lambda tokens: float(np.interp(tokens, probed, seconds))

    def _alone(self, generator: random.Random, tokens: int) -> float:
        ids = tuple(generator.choices(self._token_ids, k=tokens))
        request_id = self._submit(Arrival(0.0, ids, 1), time.monotonic())
        self._wait_for_probe()
        ttft_s = self._recorder.answers[request_id].ttft_s
        if ttft_s is None:
            raise ReplayError(f"a prompt of {tokens} tokens got no token: {self._recorder.answers[request_id].finish}")
        return ttft_s

    def _measure_capacity(self, trace: RequestTrace, context: int) -> float:
        """Requests per second of a burst that fills the batch: requests from all over the trace, with other tokens."""
        requests = min(len(trace.rows), self._plan.settings.serving.max_sequences)
        self._progress(f"measuring a burst of {requests} requests")
        burst = burst_of(trace, requests, context_tokens=context, token_ids=self._token_ids, seed=self._plan.seed)
        started = time.monotonic()
        for arrival in burst:
            self._submit(arrival, started)
        self._wait_for_probe()
        return len(burst) / (time.monotonic() - started)

    def _wait_for_probe(self) -> None:
        if not self._recorder.wait_until_answered(_LONGEST_PROBE_S, lambda: not self._engine.error):
            raise ReplayError(self._engine.error or f"the engine needs more than {_LONGEST_PROBE_S:.0f} s to warm up")

    # -- the load ----------------------------------------------------------------------------------------------------

    def _send(self, load: list[Arrival], pairs: list[TokenPair]) -> float:
        """Submit everything in its moment, wait for the end of the window; returns the clock's start of it."""
        plan = self._plan
        # Some requests are accompanied by a preference, as MACE's retrain rate has it.
        chance = random.Random(plan.seed)
        waiting = iter(pairs)
        start_s = time.monotonic()
        self._progress(f"replaying {len(load)} requests in {plan.seconds:.0f} s")
        for arrival in load:
            self._wait_until(start_s + arrival.at_s, start_s)
            self._submit(arrival, start_s + arrival.at_s)
            if chance.random() < plan.retrain_rate and (pair := next(waiting, None)) is not None:
                self._on_pair(self._engine, pair, time.monotonic() - start_s)
                self._recorder.expect_pair(pair.pair_id)
                self._engine.submit_pairs([pair])
                self._pairs_sent += 1
        self._wait_until(start_s + plan.seconds, start_s)
        return start_s

    def _wait_until(self, moment_s: float, start_s: float) -> None:
        while (left := moment_s - time.monotonic()) > 0:
            time.sleep(min(left, 1.0))
            if self._engine.error:
                raise ReplayError(self._engine.error)
            elapsed_s = time.monotonic() - start_s
            if elapsed_s >= self._next_line_s:
                self._next_line_s = elapsed_s + _LINE_EVERY_S
                self._progress(
                    f"{elapsed_s:.0f} of {self._plan.seconds:.0f} s: {self._recorder.open_requests} requests open, "
                    f"{self._pairs_sent} pairs sent, {len(self._recorder.scores)} scored"
                )

    def _submit(self, arrival: Arrival, due_s: float) -> str:
        number = next(self._numbers)
        request_id = f"replay-{number}"
        sampling = Sampling(max_tokens=arrival.output_tokens, seed=number, ignore_eos=True)
        self._recorder.expect(request_id, due_s, len(arrival.prompt_ids))
        try:
            self._engine.submit(Request(request_id, arrival.prompt_ids, sampling, ADAPTER))
        except EngineBusy:
            self._recorder.refuse(request_id)
        return request_id

    def _drain(self) -> None:
        """Let running answers end within a quarter of the window; the rest is cancelled and counts as unfinished."""
        limit_s = max(10.0, self._plan.seconds / 4)
        self._progress(f"waiting at most {limit_s:.0f} s for {self._recorder.open_requests} answers")
        if not self._recorder.wait_until_answered(limit_s, lambda: not self._engine.error):
            for request_id, answer in list(self._recorder.answers.items()):
                if answer.finish is None:
                    self._engine.cancel(request_id)
            self._recorder.wait_until_answered(limit_s, lambda: not self._engine.error)

    # -- the report --------------------------------------------------------------------------------------------------

    def _finetuning(self, before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
        def gained(name: str) -> int:
            return int(after["totals"][name] - before["totals"][name])

        return {
            "pairs_sent": self._pairs_sent,
            "pairs_trained": gained("pairs_trained"),
            "steps": gained("optimizer_steps"),
            "skipped_steps": len(self._recorder.skipped_steps),
            "tokens": gained("finetune_tokens"),
            "tokens_per_s": gained("finetune_tokens") / self._plan.seconds,
            "pairs_waiting": sum(pair.learnt_s is None for pair in self._recorder.pairs.values()),
            "latency_ms": learning_latency(list(self._recorder.pairs.values())),
        }
