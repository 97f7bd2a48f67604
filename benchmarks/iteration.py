"""The time that an iteration spends outside the model's own forward, and its share of the device's bandwidth and rate.

    python -m benchmarks.iteration [--size 135m] [--json] [--output docs/results/iteration-135m-cpu.json]
    python -m benchmarks.iteration --size 3b            on a GPU

An engine in process (no sockets, no store) with a random-weight Llama. Answers of prompts of 256 tokens are decoded
together, 1, 8 and 32 unless told, greedily, at a temperature, with top_p and with penalties; an iteration lasts from
the begin of one batch to that of the next. Outside the forward are planning, packing, drawing, bookkeeping and
delivery. On CUDA the forward is the device's time from its first kernel to its last.

Then the shares: what greedy decodes and a prompt of 2,048 tokens must read and compute (weights, keys and values; see
benchmarks/support/machine_limits.py) over the time that they took, of what a large copy and a large product reach here.
"""

from __future__ import annotations

import benchmarks.support.prepared  # noqa: F401

# isort: split
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.support.command import DEVICE, SIZE, finish, numbers, option, parse, say, table_of
from benchmarks.support.interleave import Spread
from benchmarks.support.local_engine import LocalEngine
from benchmarks.support.machine_limits import (
    Machine,
    Sizes,
    Work,
    copy_bytes_per_s,
    decode,
    measure_machine,
    prefill,
    report_header,
)
from benchmarks.support.random_llama import SHAPES, device_dtype, write_random_llama
from edged.engine.engine import Engine
from edged.engine.model_runner import RunnerOutput
from edged.tensors.cpu_threads import apart

BATCHES = (1, 8, 32)
PROMPT_TOKENS, ANSWER_TOKENS = 256, 24
PREFILL_TOKENS = 2048
_PEAKED = 0.08
"""A low temperature. Random weights make all tokens nearly equally likely; at this one a few are likely, as with
trained weights."""
MIXES: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": _PEAKED},
    "top_p": {"temperature": _PEAKED, "top_p": 0.9},
    "top_p, all tokens alike": {"temperature": 1.0, "top_p": 0.9},
    "penalties": {
        "temperature": _PEAKED,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.2,
    },
}
"""Sampling parameters by name."""
_WARM_UP = 2
"""Full iterations that are not counted: they allocate buffers of the batch's size."""


class ForwardClock:
    """A clock of the model's forwards, in seconds: on CUDA the device's time, from the first kernel of each to its
    last."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._spans: list[tuple[Any, Any]] = []

    def timed(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return `run` with its begin and end recorded."""

        def call(*arguments: Any, **named: Any) -> Any:
            begin = self._mark()
            result = run(*arguments, **named)
            self._spans.append((begin, self._mark()))
            return result

        return call

    def _mark(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def take_s(self) -> float:
        """Return the forwards' seconds since the last call; waits for the device."""
        spans, self._spans = self._spans, []
        if not self._cuda:
            return sum(end - begin for begin, end in spans)
        if spans:
            spans[-1][1].synchronize()
        return sum(begin.elapsed_time(end) for begin, end in spans) / 1e3


@dataclass(frozen=True, slots=True)
class Ran:
    """One call of `ModelRunner.run`: its times, the model's part of it, its sequences and their tokens."""

    began_s: float
    ended_s: float
    forward_s: float
    sequences: int
    tokens: int


class WatchedEngine(LocalEngine):
    """An engine in process that records its iterations."""

    def __init__(self, model: Path, device: str, dtype: str) -> None:
        self.ran: list[Ran] = []
        self._names = count()
        super().__init__(model, {"model": {"device": device, "dtype": dtype}}, watch=self._watch)

    def _watch(self, parts: Engine) -> None:
        self._clock, self._run = ForwardClock(parts.model.device), parts.runner.run
        # Methods of single objects are wrapped.
        setattr(parts.runner, "run", self._watched)  # noqa: B010
        setattr(parts.model, "forward", self._clock.timed(parts.model.forward))  # noqa: B010
        if parts.runner.graphs is not None:
            parts.runner.graphs.watch(self._clock.timed)

    def _watched(self, *arguments: Any, **named: Any) -> RunnerOutput:
        began_s = time.perf_counter()
        work = self._run(*arguments, **named)
        forward_s = self._clock.take_s()
        tokens = sum(len(segment.token_ids) for segment in work.segments)
        self.ran.append(Ran(began_s, time.perf_counter(), forward_s, len(work.segments), tokens))
        return work

    def answer(self, prompts: Sequence[tuple[int, ...]], tokens: int, mix: dict[str, Any]) -> list[Ran]:
        """Answer all prompts at once; return the iterations that ran. Raises RuntimeError if one is not answered."""
        ran: list[Ran] = []
        self.ran = ran
        for prompt in prompts:
            self.ask(f"watched {next(self._names)}", prompt, tokens, seed=0, **mix)
        self.wait()
        return ran


def measure(model: Path, device: str, dtype: str, batches: Sequence[int]) -> dict[str, Any]:
    """Measure every mix at every batch size of `batches`, and a long prompt."""
    engine = WatchedEngine(model, device, dtype)
    try:
        random = np.random.default_rng(0)
        prompts = [tuple(random.integers(3, engine.vocab, PROMPT_TOKENS).tolist()) for _ in range(max(batches))]
        say(f"{len(prompts)} prompts of {PROMPT_TOKENS} tokens")
        # Warm-up: from here on the prompts are cached prefixes, so that all answers begin together.
        engine.answer(prompts, 1, MIXES["greedy"])
        decodes: dict[str, dict[str, Any]] = {}
        for batch in batches:
            for name, mix in MIXES.items():
                say(f"decoding, batch {batch}, {name}")
                ran = engine.answer(prompts[:batch], ANSWER_TOKENS, mix)
                decodes.setdefault(str(batch), {})[name] = outside(ran, batch)
        for label in ("to warm up", "that counts"):
            say(f"a prompt of {PREFILL_TOKENS} tokens {label}")
            prompt = tuple(random.integers(3, engine.vocab, PREFILL_TOKENS).tolist())
            ran = engine.answer([prompt], 1, MIXES["greedy"])
    finally:
        engine.close()
    return {"decodes": decodes, "prefill_s": ran[-1].ended_s - ran[0].began_s, "prefill_iterations": len(ran)}


def outside(ran: Sequence[Ran], batch: int) -> dict[str, Any]:
    """Return times of the iterations that decode all of `batch`: seconds from one's begin to the next one's, and the
    part outside the model's forward, in seconds and as a share. Raises RuntimeError if there are too few."""
    full = [
        (now.forward_s, then.began_s - now.began_s)
        for now, then in pairwise(ran)
        if now.sequences == now.tokens == batch
    ][_WARM_UP:]
    if not full:
        raise RuntimeError(f"no iterations decoded {batch} sequences together: the engine has no room for so many")
    return {
        "iterations": len(full),
        "iteration_ms": Spread.of([1e3 * whole for _, whole in full]).as_json(),
        "outside_ms": Spread.of([1e3 * (whole - forward) for forward, whole in full]).as_json(),
        "outside_share": Spread.of([(whole - forward) / whole for forward, whole in full]).as_json(),
    }


# -- the command -------------------------------------------------------------------------------------------------------


def main() -> None:
    """Run the benchmark."""
    options = parse(
        __doc__,
        SIZE,
        option("--batch", "answers at once, by comma", list(BATCHES), type=numbers),
        DEVICE,
        quick="a 4 M parameter model",
    )
    report = run(options.size, options.device, options.batch)
    finish(options, report, table(report))


def run(size: str, device: str, batches: Sequence[int]) -> dict[str, Any]:
    """Measure at these batch sizes; compare with the limits of the device."""
    header, dtype = report_header(device), device_dtype(device)
    machine = apart(lambda: measure_machine(torch.device(device), dtype))
    copy = apart(lambda: copy_bytes_per_s(torch.device(device)))
    with tempfile.TemporaryDirectory(prefix="edged-bench-") as folder:
        model = apart(lambda: write_random_llama(Path(folder), SHAPES[size], dtype))
        sizes = Sizes.of(model, dtype)
        found = measure(model, device, dtype, batches)
    context = PROMPT_TOKENS + ANSWER_TOKENS // 2
    for batch, mixes in found["decodes"].items():
        for figures in mixes.values():
            figures["floor_ms"] = 1e3 * decode(sizes, int(batch), context).floor_s(machine)
    greedy_s = {
        int(batch): 1e-3 * mixes["greedy"]["iteration_ms"]["median"] for batch, mixes in found["decodes"].items()
    }
    works = {f"decode, batch {batch}": (decode(sizes, batch, context), took_s) for batch, took_s in greedy_s.items()}
    works[f"prompt of {PREFILL_TOKENS}"] = (prefill(sizes, PREFILL_TOKENS), found["prefill_s"])
    return {
        "model": size,
        **header,
        "dtype": dtype,
        "machine": {**asdict(machine), "copy_bytes_per_s": copy},
        "prompt_tokens": PROMPT_TOKENS,
        **found,
        "shares": {name: shares(work, took_s, machine, copy) for name, (work, took_s) in works.items()},
    }


def shares(work: Work, took_s: float, machine: Machine, copy: float) -> dict[str, float]:
    """Return the bandwidth and rate of a piece of work that took `took_s`, as shares of what the device reaches."""
    return {
        "ms": 1e3 * took_s,
        "floor_ms": 1e3 * work.floor_s(machine),
        "of_copy_bandwidth": work.bytes / took_s / copy,
        "of_matmul_rate": work.operations / took_s / machine.operations_per_s,
    }


def table(report: dict[str, Any]) -> str:
    """Return both tables as Markdown."""
    machine = report["machine"]
    reached = Machine(machine["bytes_per_s"], machine["operations_per_s"]).text()
    lines = [
        f"{report['model']} random-weight Llama, prompts of {report['prompt_tokens']} tokens, {report['dtype']}, "
        f"{report['device']}: {reached}, copies at {machine['copy_bytes_per_s'] / 1e9:.0f} GB/s",
        "",
        *table_of(
            {
                "batch": "{batch}",
                "drawn": "{name}",
                "an iteration (ms)": "{iteration_ms[median]:.1f}",
                "its floor": "{floor_ms:.1f}",
                "outside the model's forward (ms, quartiles)": "{outside}",
                "share": "{outside_share[median]:.1%}",
            },
            [
                {"batch": batch, "name": name, "outside": Spread.read(found["outside_ms"]).text(), **found}
                for batch, mixes in report["decodes"].items()
                for name, found in mixes.items()
            ],
        ),
        "",
        *table_of(
            {
                "work": "{name}",
                "ms": "{ms:.1f}",
                "its floor": "{floor_ms:.1f}",
                "share of copy bandwidth": "{of_copy_bandwidth:.1%}",
                "of the matmul rate": "{of_matmul_rate:.1%}",
            },
            [{"name": name, **found} for name, found in report["shares"].items()],
        ),
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
