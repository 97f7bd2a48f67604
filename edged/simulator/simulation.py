"""Simulates a request load with preference learning on a device that is not here, in virtual time."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count
from typing import Any

import numpy as np

from edged.align.feedback.pair import TokenPair
from edged.bench.recorder import (
    ReplayedAnswer,
    alignment_figures,
    iteration_figures,
    learning_latency,
    prefix_figures,
    request_counts,
    serving_figures,
    slo_figures,
)
from edged.bench.replay import LOAD_SHARE
from edged.bench.timeline import EVERY_S, PARTS, Look, shares
from edged.bench.traces import Arrival, RequestTrace, burst_of, load_figures, read_trace, scale_trace
from edged.engine.request import Request
from edged.engine.sampling.params import Sampling
from edged.settings.load import Settings
from edged.simulator.device_file import find_device, find_model_shape, read_device
from edged.simulator.profiled import profiled
from edged.simulator.roofline import Memory, ModelSizes, Pass, RooflineDevice, Room, room_for
from edged.simulator.runner import ADAPTER, START_S, Coming, Device, SimulatedEngine

PAIR_TOKENS = (100, 60, 60)
"""Mean (prompt, chosen, rejected) tokens of a preference pair, where none are given."""
_LINE_EVERY_S = 2.0
_LONGEST_BURST_S = 86_400.0

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class SimulationPlan:
    """What to simulate. `rate_per_s` None: 70 % of the requests per second that a burst reaches.

    `device` and `model` are names of configs/devices and configs/models, or files; a .json file is a device's profile
    (`edged profile`). `pair_lengths`: tokens of (prompt,
    chosen, rejected) of the pairs as they come; None draws them without end, uniformly within half of `pair_tokens`.
    """

    trace: str
    device: str
    model: str
    settings: Settings
    rate_per_s: float | None = None
    retrain_rate: float = 0.1
    seconds: float = 60.0
    seed: int = 0
    pair_tokens: tuple[int, int, int] = PAIR_TOKENS
    pair_lengths: Sequence[tuple[int, int, int]] | None = None


@dataclass(frozen=True, slots=True)
class Bench:
    """A device with a model on it."""

    device: Device
    model: ModelSizes
    room: Room

    @property
    def context_tokens(self) -> int:
        """The longest prompt with its answer that positions and pages allow."""
        return self.model.shape.max_positions

    @classmethod
    def of(cls, plan: SimulationPlan) -> Bench:
        """Read the files. Raises DeviceError, ModelRefused."""
        path, shape, settings = find_device(plan.device), find_model_shape(plan.model), plan.settings
        if path.suffix == ".json":
            device, model, memory = profiled(path, shape, settings)
            return cls(device, model, room_for(memory, model, settings))
        file = read_device(path)
        model = ModelSizes.read(shape, settings, file.cuda)
        return cls(RooflineDevice(file, model, settings), model, room_for(Memory.of(file), model, settings))


def simulate(plan: SimulationPlan, progress: Progress = lambda _line: None) -> dict[str, Any]:
    """Run the plan and report as `edged.bench.replay.replay` does; units are in the keys' names.

    Everything but "measured_at" and the scheduler's "decision_ms_p50" follows from the plan. Raises DeviceError,
    ModelRefused and TraceError.
    """
    trace = read_trace(plan.trace, plan.seed)
    bench = Bench.of(plan)
    report = Simulation(plan, bench, progress).play(trace)
    return {"measured_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "simulated": True, **report}


class Simulation:
    """One simulation."""

    def __init__(self, plan: SimulationPlan, bench: Bench, progress: Progress) -> None:
        self._plan, self._bench, self._progress = plan, bench, progress
        longest = plan.settings.model.max_context_tokens or bench.context_tokens
        pages = bench.room.pages
        shape = bench.model.shape
        context = min(longest, shape.max_positions, (pages - 1) * plan.settings.cache.page_size)
        self._engine = SimulatedEngine(
            plan.settings, bench.device, pages, shape.layers, shape.vocab_size, context, bench.room.keeps_graph
        )
        self._token_ids = range(shape.vocab_size)
        self._numbers = count()
        self._pairs_sent = 0
        self._next_line_s = time.monotonic() + _LINE_EVERY_S

    @property
    def engine(self) -> SimulatedEngine:
        """For a look at what is left of it afterwards."""
        return self._engine

    def play(self, trace: RequestTrace) -> dict[str, Any]:
        """Send the load, let its answers end, report."""
        plan, engine = self._plan, self._engine
        context = engine.max_context_tokens
        capacity = None if plan.rate_per_s else self._capacity(trace)
        rate = plan.rate_per_s or LOAD_SHARE * (capacity or 0.0)
        load = scale_trace(
            trace,
            rate_per_s=rate,
            seconds=plan.seconds,
            context_tokens=context,
            token_ids=self._token_ids,
            seed=plan.seed,
        )
        start_s, before = engine.now, self._status()
        measured_from = len(engine.answers)
        engine.schedule(self._coming(load, start_s))
        looks = self._run(start_s + plan.seconds, start_s)
        after = self._status()
        # As in a replay: a quarter of the window for what is under way.
        engine.run(start_s + plan.seconds + max(10.0, plan.seconds / 4), drained=True)
        engine.cancel_all()
        answers = list(engine.answers.values())[measured_from:]
        return {
            "model": self._bench.model.report(self._bench.device.name, context),
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
            "slo": self._slo(answers, load),
            "finetune": self._finetuning(before, after),
            "alignment": alignment_figures([]),
            "series": [],
            "timeline": shares(looks),
            "prefix": prefix_figures(before, after, answers),
            "iterations": iteration_figures(before["busy"], after["busy"]),
            "scheduler": self._scheduling(before, after),
        }

    def _capacity(self, trace: RequestTrace) -> float:
        """Requests per second of a burst that fills the batch, on an engine of its own; as a replay measures it."""
        plan = self._plan
        requests = min(len(trace.rows), plan.settings.serving.max_sequences)
        context = self._engine.max_context_tokens
        burst = burst_of(trace, requests, context_tokens=context, token_ids=self._token_ids, seed=plan.seed)
        engine = Simulation(plan, self._bench, self._progress).engine
        for number, arrival in enumerate(burst):
            engine.submit(_request(f"burst-{number}", arrival, number))
        engine.run(_LONGEST_BURST_S, drained=True)
        return len(burst) / (engine.now - START_S)

    def _coming(self, load: list[Arrival], start_s: float) -> Iterator[Coming]:
        """Requests in their moments, some accompanied by a pair: as many, and the same, as in a replay."""
        chance = random.Random(self._plan.seed)
        pairs = iter(self._pairs())
        for arrival in load:
            pair = None
            if chance.random() < self._plan.retrain_rate:
                pair = next(pairs, None)
            self._pairs_sent += pair is not None
            yield Coming(start_s + arrival.at_s, partial(self._arrive, arrival, pair))

    def _arrive(self, arrival: Arrival, pair: TokenPair | None) -> None:
        engine, number = self._engine, next(self._numbers)
        engine.submit(_request(f"request-{number}", arrival, number))
        if pair is not None:
            engine.learning.submit(pair, engine.now)

    def _pairs(self) -> Iterable[TokenPair]:
        lengths = self._plan.pair_lengths
        drawn = iter(lengths) if lengths is not None else _lengths(self._plan.pair_tokens, self._plan.seed)
        for number, sizes in enumerate(drawn):
            prompt, chosen, rejected = ((0,) * size for size in sizes)
            yield TokenPair(number, ADAPTER, prompt, chosen, rejected)

    def _run(self, until_s: float, start_s: float) -> list[Look]:
        """Let time pass, with a look at what it went to each second, and a line on the progress now and then."""
        engine = self._engine
        looks = [self._look()]
        while engine.now < until_s:
            engine.run(min(until_s, engine.now + EVERY_S))
            looks.append(self._look())
            now = time.monotonic()
            if now >= self._next_line_s:
                self._next_line_s = now + _LINE_EVERY_S
                self._progress(
                    f"{engine.now - start_s:.0f} of {self._plan.seconds:.0f} s simulated: {engine.open_requests} "
                    f"requests open, {engine.learning.pairs_trained} of {self._pairs_sent} pairs learnt"
                )

        return looks

    # -- the report --------------------------------------------------------------------------------------------------

    def _look(self) -> Look:
        busy = asdict(self._engine.stats.busy)
        return Look(self._engine.now, tuple(busy[f"{part}_s"] for part in PARTS))

    def _status(self) -> dict[str, Any]:
        engine, totals = self._engine, self._engine.stats.totals
        stats = engine.trie.stats if engine.trie is not None else None
        return {
            "iterations": totals.iterations,
            "preemptions": totals.preemptions,
            "finetune_tokens": totals.finetune_tokens,
            "steps": engine.learning.steps,
            "pairs_trained": engine.learning.pairs_trained,
            "prompt_tokens": stats.prompt_tokens if stats else 0,
            "hit_tokens": stats.hit_tokens if stats else 0,
            "busy": asdict(engine.stats.busy),
        }

    def _slo(self, answers: list[ReplayedAnswer], load: list[Arrival]) -> dict[str, Any]:
        settings = self._plan.settings
        prompts = [len(arrival.prompt_ids) for arrival in load]

        def alone_s(tokens: float) -> float:
            return lone_ttft_s(self._bench.device, round(tokens), settings.serving.max_batch_tokens)

        return slo_figures(answers, prompts, alone_s, settings.scheduler.ttft_floor_ms / 1e3)

    def _finetuning(self, before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
        tokens = after["finetune_tokens"] - before["finetune_tokens"]
        pairs = list(self._engine.learning.pairs.values())
        return {
            "pairs_sent": self._pairs_sent,
            "pairs_trained": after["pairs_trained"] - before["pairs_trained"],
            "steps": after["steps"] - before["steps"],
            "skipped_steps": 0,
            "tokens": tokens,
            "tokens_per_s": tokens / self._plan.seconds,
            "pairs_waiting": sum(pair.learnt_s is None for pair in pairs),
            "latency_ms": learning_latency(pairs),
        }

    def _scheduling(self, before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
        engine = self._engine
        return {
            "decision_ms_p50": float(np.median(engine.stats.decision_ms)),
            "iterations": after["iterations"] - before["iterations"],
            "preemptions": after["preemptions"] - before["preemptions"],
            "cost_model_mape_percent": engine.scheduler.cost.mape * 100.0,
            "cost_model": engine.scheduler.cost.report(),
        }


def lone_ttft_s(device: Device, tokens: int, most: int) -> float:
    """Seconds to the first token of a lone prompt under an adapter, in chunks of at most `most` tokens."""
    total_s, done = 0.0, 0
    while done < tokens:
        chunk = min(most, tokens - done)
        load = Pass(adapters=1, adapted=chunk, sampled=int(done + chunk == tokens))
        load.add_chunk(chunk, done, finetune=False)
        total_s += device.overhead_s + device.forward_s(load)
        done += chunk
    return total_s


def _request(request_id: str, arrival: Arrival, seed: int) -> Request:
    sampling = Sampling(max_tokens=arrival.output_tokens, seed=seed, ignore_eos=True)
    return Request(request_id, arrival.prompt_ids, sampling, ADAPTER)


def _lengths(means: tuple[int, int, int], seed: int) -> Iterator[tuple[int, int, int]]:
    """Lengths uniform within half of their means."""
    generator = random.Random(f"pairs {seed}")
    while True:
        prompt, chosen, rejected = (generator.randint(max(1, mean // 2), mean * 3 // 2) for mean in means)
        yield prompt, chosen, rejected
