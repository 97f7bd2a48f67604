"""A load run: a trace's requests with preference pairs, sent to an engine in real or in virtual time, and its
report."""

import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from edged.align.feedback.pair import TokenPair
from edged.engine.request import EngineBusy, Request
from edged.engine.sampling.params import Sampling
from edged.lab.bench import figures
from edged.lab.bench.arrivals import Arrivals
from edged.lab.bench.traces import Arrival, PromptIds, RequestTrace, burst_of, length_scale, scale_trace
from edged.profiler.recorder import ReplayRecorder
from edged.scheduler.reader import Pace
from edged.settings.load import Settings

ADAPTER = "replay"
"""The user that sends the requests, and whose adapter learns from the pairs."""
LOAD_SHARE = 0.7
"""Default request rate as a share of the rate that a burst reached."""
_LINE_EVERY_S = 5.0

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """The load of a run. `arrivals` None: at the trace's own times, stretched; `rate_per_s` None: 70 % of the requests
    per second that a burst reaches."""

    trace: str
    settings: Settings
    arrivals: Arrivals | None = None
    rate_per_s: float | None = None
    retrain_rate: float = 0.1
    seconds: float = 60.0
    seed: int = 0
    pace: Pace | None = None
    """Speed of the readers of the answers; None: nobody reads them while they are made."""


class LoadRun(ABC):
    """A load run against one engine; subclasses define how time passes."""

    def __init__(
        self,
        plan: LoadPlan,
        engine: Any,
        recorder: ReplayRecorder,
        pairs: Iterable[TokenPair],
        token_ids: range,
        progress: Progress,
    ) -> None:
        """`engine` is an `Engine` or a `SimulatedEngine`, which delivers to `recorder`; prompts are of `token_ids`."""
        self._clock = recorder.clock
        self._plan, self.engine, self.recorder, self._progress = plan, engine, recorder, progress
        self._prompts = PromptIds(engine.max_context_tokens, token_ids, plan.seed)
        self._pairs, self._pairs_sent = iter(pairs), 0
        self._numbers = count()
        self._looks: list[figures.Look] = []
        self._next_line_s = 0.0

    def play(self, trace: RequestTrace) -> dict[str, Any]:
        """Measure the machine, send the load, wait for the answers, and return the report."""
        plan, recorder = self._plan, self.recorder
        alone_s = self._lone_ttft(trace)
        capacity = None if plan.rate_per_s else self._capacity(trace)
        rate = plan.rate_per_s or LOAD_SHARE * (capacity or 0.0)
        times_s = plan.arrivals.times_s(rate, plan.seconds, plan.seed) if plan.arrivals else ()
        load = scale_trace(trace, self._prompts, rate_per_s=rate, seconds=plan.seconds, times_s=times_s)
        before, measured_from = self.engine.status(), len(recorder.answers)
        start_s = self._clock()
        self._look(start_s)
        self._send(load, start_s)
        after = self.engine.status()
        # A quarter of the window for requests that are still running.
        self._drain(start_s + plan.seconds, max(10.0, plan.seconds / 4))
        answers = list(recorder.answers.values())[measured_from:]
        prompts = [len(arrival.prompt_ids) for arrival in load]
        # Copies: the engine may still be learning.
        scores, pairs = list(recorder.scores), list(recorder.pairs.values())

        def gained(name: str) -> int:
            return int(after["totals"][name] - before["totals"][name])

        return {
            "model": after["model"],
            "policy": plan.settings.scheduler.policy,
            "seed": plan.seed,
            "load": {
                "trace": trace.name,
                "arrivals": plan.arrivals.text if plan.arrivals else None,
                "recorded_rate_per_s": trace.rate_per_s,
                "length_scale": length_scale(trace, self._prompts.context_tokens),
                "mean_prompt_tokens": sum(prompts) / len(load),
                "mean_output_tokens": sum(arrival.output_tokens for arrival in load) / len(load),
                "seconds": plan.seconds,
                "rate_per_s": rate,
                "retrain_rate": plan.retrain_rate,
                "capacity_per_s": capacity,
            },
            "requests": figures.request_counts(answers),
            **figures.serving_figures(answers, start_s, plan.seconds),
            "slo": figures.slo_figures(answers, prompts, alone_s, plan.settings.scheduler),
            "readers": figures.reader_figures(answers),
            "finetune": {
                "pairs_sent": self._pairs_sent,
                "pairs_trained": gained("pairs_trained"),
                "steps": gained("optimizer_steps"),
                "skipped_steps": len(recorder.skipped_steps),
                "tokens": gained("finetune_tokens"),
                "tokens_per_s": gained("finetune_tokens") / plan.seconds,
                "lent_s": after["scheduler"]["lent_s"] - before["scheduler"]["lent_s"],
                "trained_tokens_per_s": gained("trained_tokens") / plan.seconds,
                "pairs_waiting": sum(pair.learned_s is None for pair in pairs),
                "latency_ms": figures.learning_latency(pairs, self._clock()),
            },
            "alignment": figures.alignment_figures([score for _, score in scores]),
            "series": figures.score_series(scores, start_s),
            "timeline": figures.shares(self._looks),
            "drafts": {"tokens": gained("drafted_tokens"), "right": gained("drafted_right")},
            "candidates": {"drawn": gained("candidates"), "dropped": gained("candidates_dropped")},
            "prefix": figures.prefix_figures(before["prefix"], after["prefix"], answers),
            "iterations": figures.iteration_figures(before["busy"], after["busy"]),
            "scheduler": {
                "decision_ms_p50": after["scheduler"]["decision_ms_p50"],
                "iterations": gained("iterations"),
                "preemptions": gained("preemptions"),
                "cost_model_mape_percent": after["cost_model"]["mape_percent"],
                "cost_model": after["cost_model"],
                "times_usual": figures.times_usual(before["cost_model"], after["cost_model"]),
            },
        }

    def _capacity(self, trace: RequestTrace) -> float:
        """Return the requests per second of a burst that fills the batch, sampled from the whole trace, with other
        tokens."""
        requests = min(len(trace.rows), self._plan.settings.serving.max_sequences)
        burst = burst_of(trace, requests, self._prompts)
        return len(burst) / self._burst_s(burst)

    def _accompanied(self, load: Sequence[Arrival]) -> Iterator[tuple[Arrival, TokenPair | None]]:
        """Yield the load's requests; a share of them (MACE's retrain rate) comes with a preference pair.

        They are spread evenly from a random one on: of few requests, too, the share is as asked for.
        """
        owed = random.Random(self._plan.seed).random()
        for arrival in load:
            owed += self._plan.retrain_rate
            pair = next(self._pairs, None) if owed >= 1.0 else None
            owed -= owed >= 1.0
            self._pairs_sent += pair is not None
            yield arrival, pair

    def _submit(self, arrival: Arrival, due_s: float, adapter: str = ADAPTER) -> str:
        """Send a request that is due at `due_s`; return its id."""
        request = replace(self._request(next(self._numbers), arrival), adapter=adapter)
        self.recorder.expect(request.request_id, due_s, len(arrival.prompt_ids))
        try:
            self.engine.submit(request)
        except EngineBusy:
            self.recorder.refuse(request.request_id)
        return request.request_id

    def _request(self, number: int, arrival: Arrival) -> Request:
        """Return the request of that number."""
        sampling = Sampling(max_tokens=arrival.output_tokens, seed=number, ignore_eos=True)
        return Request(f"request-{number}", arrival.prompt_ids, sampling, ADAPTER, pace=self._plan.pace)

    def _look(self, start_s: float) -> None:
        """Record the engine's busy times so far, and from time to time print a line of progress."""
        now = self._clock()
        status = self.engine.status()
        self._looks.append((now, status["busy"] | {name: status["totals"][name] for name in figures.COUNTED}))
        if time.monotonic() >= self._next_line_s:
            self._next_line_s = time.monotonic() + _LINE_EVERY_S
            learned = sum(pair.learned_s is not None for pair in list(self.recorder.pairs.values()))
            done = f"{self.recorder.open_requests} requests open, {learned} of {self._pairs_sent} pairs learned"
            self._progress(f"{now - start_s:.0f} of {self._plan.seconds:.0f} s: {done}")

    @abstractmethod
    def _lone_ttft(self, trace: RequestTrace) -> Callable[[float], float]:
        """Return a function from a prompt's length in tokens to its TTFT in seconds, alone on the engine."""

    @abstractmethod
    def _burst_s(self, burst: Sequence[Arrival]) -> float:
        """Return the seconds in which the otherwise idle engine answers all of `burst`."""

    @abstractmethod
    def _send(self, load: Sequence[Arrival], start_s: float) -> None:
        """Send each request when it is due, until the end of the window, with a `_look` each second."""

    @abstractmethod
    def _drain(self, end_s: float, limit_s: float) -> None:
        """Wait up to `limit_s` after the window's end for answers; cancel the rest, which counts as unfinished."""
