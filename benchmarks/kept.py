"""Time and memory of a DPO step by what it keeps of its forward: layers' inputs, Algorithm 1's results, or the graph.

    python -m benchmarks.kept [--size 135m] [--layers 12] [--vocab 8192] [--tokens 256] [--rounds 9] [--output FILE]

A random-weight Llama of the size's widths; one pair in one window, LoRA of rank 16 on all linears. The three ways take
turns, in the opposite order every other round. Times are of the process's CPUs, so that other programs on the machine
count less. Memory is the peak above what was there before a step, in a process of its own, after a small step that
keeps inputs alone.
"""

from __future__ import annotations

import benchmarks.support.prepared  # noqa: F401

# isort: split
import multiprocessing
import tempfile
import time
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from statistics import quantiles
from typing import Any, get_args

from benchmarks.support.command import finish, markdown, option, parse
from benchmarks.support.random_llama import SHAPES, write_random_llama
from edged.align.dpo.step_plan import Recompute
from edged.engine.engine import Engine
from edged.profiler.measure import Prober, StepShape
from edged.profiler.proc_memory import peak_bytes, start_peak, used_bytes
from edged.settings.load import Settings
from edged.tensors.cpu_threads import apart

WAYS: tuple[Recompute, ...] = get_args(Recompute)


def main() -> None:
    """Measure all ways; print the table."""
    options = parse(
        __doc__,
        option("--size", "widths of the model", "135m", quick="4m", choices=sorted(SHAPES)),
        option("--layers", "number of layers", 12, quick=2),
        option("--vocab", "size of the vocabulary", 8192, quick=512),
        option("--tokens", "tokens of the pair and of a window", 256, quick=64),
        option("--rounds", "times that each way is measured", 9, quick=2),
        quick="a small model",
    )
    with tempfile.TemporaryDirectory(prefix="edged-bench-") as folder:
        shape = replace(SHAPES[options.size], layers=options.layers, vocab=options.vocab)
        apart(lambda: write_random_llama(Path(folder), shape))
        peaks = {}
        for way in WAYS:
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                peaks[way] = pool.apply(peak_of, (folder, options.tokens, way))
        seconds = apart(lambda: times(folder, options.tokens, options.rounds))
    finish(options, *report(options, seconds, peaks))


def engine(folder: str, tokens: int) -> Engine:
    """Return an engine's parts on the model in `folder`."""
    settings: dict[str, Any] = {
        "model": {"path": folder, "device": "cpu", "max_context_tokens": 1024},
        "align": {"window_tokens": tokens, "loss_threshold": 0.0, "replay_share": 0.0},
        "guard": {"held_out_share": 0.0},
    }
    return Engine.build(Settings(**settings), Path(folder), lambda _events: None, lambda _records: None, None)


def peak_of(folder: str, tokens: int, way: Recompute) -> int:
    """Return the peak bytes of a step above the memory before it."""

    def run() -> int:
        parts = engine(folder, tokens)
        measured, device = Prober(parts), parts.model.device
        measured.run_step(StepShape(tokens // 8, 1, "full"))
        start_peak(device)
        before = used_bytes(device)
        measured.run_step(StepShape(tokens, 1, way))
        return peak_bytes(device) - before

    return apart(run)


def times(folder: str, tokens: int, rounds: int) -> dict[Recompute, list[float]]:
    """Return the CPU seconds of steps, by way and round."""
    measured, found = Prober(engine(folder, tokens)), {way: list[float]() for way in WAYS}
    for number in range(rounds + 1):
        for way in WAYS if number % 2 else WAYS[::-1]:
            began = time.process_time()
            measured.run_step(StepShape(tokens, 1, way))
            # The first round loads what is loaded late.
            found[way] += [time.process_time() - began] if number else []
    return found


def report(
    options: Namespace, seconds: dict[Recompute, list[float]], peaks: dict[Recompute, int]
) -> tuple[dict[str, Any], str]:
    """Return the figures, and them as a table; ratios are to the graph's step of the same round."""
    rows, lines = [], []
    for way, own in seconds.items():
        low, middle, high = quantiles([mine / graph for mine, graph in zip(own, seconds["none"], strict=True)], n=4)
        rows.append({"way": way, "cpu_s": own, "over_graph": [low, middle, high], "peak_bytes": peaks[way]})
        took = f"{quantiles(own, n=4)[1]:.2f}"
        lines.append([f"`{way}`", took, f"{middle:.2f} ({low:.2f}-{high:.2f})", f"{peaks[way] / 2**20:,.0f}"])
    columns = ["kept", "CPU s a step", "over the graph's", "peak MiB"]
    shape = {name: getattr(options, name) for name in ("size", "layers", "vocab", "tokens")}
    return {**shape, "ways": rows}, "\n".join(markdown(columns, lines))


if __name__ == "__main__":
    main()
