"""The kernels that a hybrid iteration and each kind of unit launch, and how long the device does nothing meanwhile.

    python -m benchmarks.kernels hh-harmless.jsonl.gz [--size 3b] [--output docs/results/kernels-135m-h100.json]
    python -m benchmarks.kernels --count

An engine in process with a random-weight Llama answers --batch requests while two adapters learn, under torch's
profiler. For the packed forwards that hold tokens of both, for those that only decode and for each kind of unit: how
long it takes, the share of that in which the device computes, the number of kernels, and those that take most. On the
CPU torch's operators stand in for kernels, each with those inside it.

With --count: the kernels that a decode iteration launches on CUDA for a layer of small Llama, Qwen3 and Gemma shapes,
without and with LoRA, on any machine (`benchmarks.engine.launches`).
"""

from __future__ import annotations

import benchmarks.support.prepared  # noqa: F401

# isort: split
import json
import os
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

from benchmarks.preemption import random_model
from benchmarks.support.command import (
    DEVICE,
    FORMAT,
    PAIRS,
    SIZE,
    finish,
    flag,
    make_parser,
    markdown,
    option,
    resolve,
    table_of,
)
from benchmarks.support.local_engine import LocalEngine
from benchmarks.support.machine_limits import report_header
from edged.align.dpo.step import DpoStep
from edged.engine.engine import Engine
from edged.lab.bench.replay import load_pairs
from edged.settings.load import Settings
from edged.text.tokenizer import Tokenizer

PROMPT_TOKENS = 256
_MAX_NAMES = 10
_BACKWARD, _FEWEST_UNITS, _MAX_TURNS = ("unit, layer", "unit, grad"), 4, 20
"""Requests are answered again until so many units of a layer's way back were seen, or so often."""


@dataclass(frozen=True, slots=True)
class Span:
    """A piece of work until the device had done it, or a kernel's run (nanoseconds since the epoch)."""

    name: str
    begin_ns: int
    end_ns: int


def watch(parts: Engine, spans: list[Span]) -> Callable[[], None]:
    """Have each packed forward and unit of an engine end in `spans`; return a function that ends this."""
    runner, on_gpu = parts.runner, parts.model.device.type == "cuda"
    forward, run_unit = runner._forward, DpoStep.run_unit

    def end(name: str, begin_ns: int) -> None:
        if on_gpu:
            torch.cuda.synchronize()
        spans.append(Span(name, begin_ns, time.time_ns()))

    def timed_forward(segments: Any, takes: Any, *more: Any) -> None:
        begin_ns = time.time_ns()
        forward(segments, takes, *more)
        pieces = sum(len(parts) for _, _, parts in takes)
        kind = "decodes" if not takes else "hybrid" if len(segments) > pieces else "fine-tuning"
        end(f"forward, {kind}", begin_ns)

    def timed_unit(self: DpoStep, *arguments: int) -> Any:
        begin_ns = time.time_ns()
        done = run_unit(self, *arguments)
        end(f"unit, {done[0]}", begin_ns)
        return done

    # Methods of a single object and of a class are replaced.
    setattr(runner, "_forward", timed_forward)  # noqa: B010
    setattr(DpoStep, "run_unit", timed_unit)  # noqa: B010
    return lambda: setattr(DpoStep, "run_unit", run_unit)


def busy_ns(kernels: Iterable[Span]) -> int:
    """Return how long any of the kernels ran; they are in order of their begins."""
    total, until = 0, 0
    for kernel in kernels:
        total += max(0, kernel.end_ns - max(until, kernel.begin_ns))
        until = max(until, kernel.end_ns)
    return total


def summary(spans: Iterable[Span], kernels: list[Span]) -> dict[str, Any]:
    """Return the figures of the spans of each name: medians over them, and the names of kernels by their time."""
    begins = [kernel.begin_ns for kernel in kernels]
    by_name: defaultdict[str, list[tuple[Span, list[Span]]]] = defaultdict(list)
    for span in spans:
        own = kernels[bisect_left(begins, span.begin_ns) : bisect_left(begins, span.end_ns)]
        by_name[span.name].append((span, own))
    found = {}
    for name, items in sorted(by_name.items()):
        spent: Counter[str] = Counter()
        for _, own in items:
            spent.update({kernel.name: 0 for kernel in own})
            for kernel in own:
                spent[kernel.name] += kernel.end_ns - kernel.begin_ns
        whole = sum(span.end_ns - span.begin_ns for span, _ in items)
        found[name] = {
            "times": len(items),
            "ms": 1e-6 * median(span.end_ns - span.begin_ns for span, _ in items),
            "busy_share": sum(busy_ns(own) for _, own in items) / whole,
            "kernels": median(len(own) for _, own in items),
            "share_of_time": {kernel: ns / whole for kernel, ns in spent.most_common(_MAX_NAMES)},
        }
    return found


def run(model: Path, options: Namespace) -> dict[str, Any]:
    """Load the engine, record some seconds of it, and summarise."""
    settings = Settings.model_validate(
        {
            "model": {"device": options.device},
            "align": {"loss_threshold": 0.0, "recompute": "full" if options.recompute else "auto"},
            "store": {"save_every_s": 3600.0},
        }
    )
    pairs, _ = load_pairs(options.pairs, options.format, Tokenizer.load(model), settings.align.max_pair_tokens)
    spans: list[Span] = []
    stop: list[Callable[[], None]] = []
    engine = LocalEngine(model, settings, watch=lambda parts: stop.append(watch(parts, spans)))
    activities = [ProfilerActivity.CUDA if options.device.startswith("cuda") else ProfilerActivity.CPU]
    random = np.random.default_rng(0)

    def answer(turn: str) -> None:
        for index in range(options.batch):
            prompt = tuple(random.integers(3, engine.vocab, PROMPT_TOKENS).tolist())
            engine.ask(f"{turn} {index}", prompt, options.tokens)
        engine.wait()

    try:
        engine.submit_pairs([replace(pair, adapter=f"user{number % 2}") for number, pair in enumerate(pairs)])
        answer("warm-up")
        # The engine computes on a thread of its own.
        everywhere = _ExperimentalConfig(profile_all_threads=True)
        with profile(activities=activities, experimental_config=everywhere) as profiled:
            begin_ns, before = time.time_ns(), len(spans)
            for turn in range(_MAX_TURNS):
                answer(str(turn))
                if sum(span.name in _BACKWARD for span in spans[before:]) >= _FEWEST_UNITS:
                    break
            end_ns = time.time_ns()
    finally:
        engine.close()
        stop[0]()
    on_gpu = options.device.startswith("cuda")
    ran = [
        Span(event.name(), event.start_ns(), event.end_ns())
        for event in profiled.profiler.kineto_results.events()
        if (event.device_type().name == "CUDA") == on_gpu and event.duration_ns() > 0
    ]
    # The engine also works while the profiler begins and ends.
    seen = [span for span in spans if span.begin_ns >= begin_ns and span.end_ns <= end_ns]
    return summary(seen, sorted(ran, key=lambda kernel: kernel.begin_ns))


def main() -> None:
    """Run the benchmark."""
    choices = (
        replace(PAIRS, settings={**PAIRS.settings, "nargs": "?"}),
        FORMAT,
        SIZE,
        option("--batch", "requests at once", 16, 2),
        option("--tokens", "of each answer", 24, 8),
        flag("--recompute", "align.recompute = inputs: steps' forwards are packed with those of requests"),
        DEVICE,
        flag("--count", "count the launches of a decode iteration's layer instead: no pairs are needed"),
    )
    parser = make_parser(__doc__, *choices, quick="a 4 M parameter model")
    options = resolve(parser, *choices)
    if options.count:
        counted = count_launches()
        finish(options, counted, table_of_counts(counted["launches"]))
        return
    if options.pairs is None:
        parser.error("give a file of pairs, or --count")
    header = report_header(options.device)
    with tempfile.TemporaryDirectory(prefix="edged-bench-") as folder:
        model = random_model(Path(folder), options)
        report = {"model": options.size, "batch": options.batch, **header, "pieces": run(model, options)}
    finish(options, report, table(report))


def count_launches() -> dict[str, Any]:
    """Count, in a process whose Triton kernels are interpreted, what a layer of each family launches."""
    command = [sys.executable, "-m", "benchmarks.engine.launches"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    return {**report_header("cpu"), "launches": json.loads(done.stdout)}


def table_of_counts(launches: dict[str, dict[str, dict[str, dict[str, int]]]]) -> str:
    """Return the launches of a layer as Markdown, and the names of those with LoRA."""
    columns = ["launches a layer", "its own", "fused", "its own, with LoRA", "fused, with LoRA"]
    kinds = [(way, kind) for kind in ("base", "adapted") for way in ("own", "fused")]
    rows = [[name, *(sum(found[way][kind].values()) for way, kind in kinds)] for name, found in launches.items()]
    lines = markdown(columns, rows)
    for name, found in launches.items():
        for way, own in found.items():
            told = ", ".join(f"{count} {kernel}" for kernel, count in Counter(own["adapted"]).most_common())
            lines += ["", f"{name}, {way}: {told}"]
    return "\n".join(lines)


def table(report: dict[str, Any]) -> str:
    """Return the figures and the longest kernels as Markdown."""
    pieces = [{"name": name, **found} for name, found in report["pieces"].items()]
    columns = {
        "piece": "{name}",
        "times": "{times}",
        "ms": "{ms:.2f}",
        "device busy": "{busy_share:.0%}",
        "kernels": "{kernels:.0f}",
    }
    lines = [f"{report['model']}, {report['batch']} requests, {report['device']}", "", *table_of(columns, pieces)]
    for piece in pieces:
        longest = (f"{share:.1%} {name[:70]}" for name, share in piece["share_of_time"].items())
        lines += ["", f"{piece['name']}:", *(f"  {line}" for line in longest)]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
