"""Simulates a request load with preference learning on a device described by a file, in virtual time."""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from edged.align.feedback.pair import TokenPair
from edged.lab.bench.figures import EVERY_S
from edged.lab.bench.load_run import ADAPTER, LoadRun, Progress
from edged.lab.bench.traces import Arrival, RequestTrace, read_trace
from edged.lab.simulator.hardware import SimulatedHardware
from edged.lab.simulator.plan import SimulationPlan
from edged.lab.simulator.roofline import Device, Pass
from edged.lab.simulator.runner import START_S, Coming, SimulatedEngine

_LONGEST_BURST_S = 86_400.0


def simulate(plan: SimulationPlan, progress: Progress = lambda _line: None) -> dict[str, Any]:
    """Run the plan and report as `edged.lab.bench.replay.replay` does; units are in the keys' names.

    Everything but "measured_at" and the scheduler's "decision_ms_p50" follows from the plan. Raises DeviceError,
    ModelRefused and TraceError.
    """
    trace = read_trace(plan.trace, plan.seed)
    report = Simulation(plan, SimulatedHardware.of(plan), progress).play(trace)
    return {"measured_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "simulated": True, **report}


class Simulation(LoadRun):
    """A load run against a simulated engine."""

    _plan: SimulationPlan
    engine: SimulatedEngine

    def __init__(self, plan: SimulationPlan, hardware: SimulatedHardware, progress: Progress) -> None:
        engine = SimulatedEngine(plan.settings, hardware, plan.seed, plan.quote_tokens, plan.best_of)
        super().__init__(
            plan, engine, engine.recorder, pairs_of(plan), range(hardware.model.shape.vocab_size), progress
        )
        self._hardware = hardware

    def play(self, trace: RequestTrace) -> dict[str, Any]:
        """Run the load as `LoadRun.play` does; the cost model's errors are those at the very end."""
        report, cost = super().play(trace), self.engine.scheduler.cost.report()
        report["scheduler"] |= {"cost_model_mape_percent": cost["mape_percent"], "cost_model": cost}
        return report

    def _lone_ttft(self, trace: RequestTrace) -> Callable[[float], float]:
        most = self._plan.settings.serving.max_batch_tokens
        return lambda tokens: lone_ttft_s(self._hardware.device, round(tokens), most)

    def _burst_s(self, burst: Sequence[Arrival]) -> float:
        """Return the seconds that a separate, new engine needs for the burst."""
        alone = Simulation(self._plan, self._hardware, self._progress)
        for arrival in burst:
            alone._submit(arrival, START_S)
        alone.engine.run(_LONGEST_BURST_S, drained=True)
        return alone.engine.now - START_S

    def _send(self, load: Sequence[Arrival], start_s: float) -> None:
        engine, end_s = self.engine, start_s + self._plan.seconds
        for arrival, pair in self._accompanied(load):
            due_s = start_s + arrival.at_s
            engine.commands.coming.append(Coming(due_s, partial(self._arrive, arrival, pair, due_s)))
        while engine.now < end_s:
            engine.run(min(end_s, engine.now + EVERY_S))
            self._look(start_s)

    def _arrive(self, arrival: Arrival, pair: TokenPair | None, due_s: float) -> None:
        self._submit(arrival, due_s)
        if pair is not None:
            self.engine.learning.submit(pair, due_s)

    def _drain(self, end_s: float, limit_s: float) -> None:
        self.engine.run(end_s + limit_s, drained=True)
        self.engine.cancel_all()


def lone_ttft_s(device: Device, num_tokens: int, most: int) -> float:
    """Return the seconds to the first token of a lone prompt under an adapter, in chunks of at most `most` tokens."""
    total_s, done = 0.0, 0
    while done < num_tokens:
        chunk = min(most, num_tokens - done)
        load = Pass(adapters=1, adapted=chunk, sampled=int(done + chunk == num_tokens))
        load.add_chunk(chunk, done, finetune=False)
        total_s += device.overhead_s + device.forward_s(load)
        done += chunk
    return total_s


def pairs_of(plan: SimulationPlan) -> Iterator[TokenPair]:
    """Yield pairs that have lengths but no contents, in order of arrival."""
    lengths = plan.pair_lengths if plan.pair_lengths is not None else _lengths(plan.pair_tokens, plan.seed)
    for number, sizes in enumerate(lengths):
        prompt, chosen, rejected = ((0,) * size for size in sizes)
        yield TokenPair(number, ADAPTER, prompt, chosen, rejected)


def _lengths(means: tuple[int, int, int], seed: int) -> Iterator[tuple[int, int, int]]:
    """Yield (prompt, chosen, rejected) lengths, uniform within half of their means, without end."""
    generator = random.Random(f"pairs {seed}")
    while True:
        prompt, chosen, rejected = (generator.randint(max(1, mean // 2), mean * 3 // 2) for mean in means)
        yield prompt, chosen, rejected
