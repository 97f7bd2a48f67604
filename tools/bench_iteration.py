#!/usr/bin/env python3
"""What an iteration spends outside the model's own forward, and its share of the device's bandwidth and rate.

    python tools/bench_iteration.py [--size 135m] [--json] [--output docs/results/iteration-135m-cpu.json]
    python tools/bench_iteration.py --size 3b            on a GPU

An engine in process (no sockets, no store) with a random-weight Llama. Answers of prompts of 256 tokens are decoded
together, 1, 8 and 32 unless told, greedily, at a temperature, with top_p and with penalties; an iteration lasts from
the begin of one batch to that of the next. Outside the forward are planning, packing, drawing, bookkeeping and
delivery. On CUDA the forward is the device's time from its first kernel to its last.

Then the shares: what greedy decodes and a prompt of 2,048 tokens must read and compute (weights, keys and values; see
benchmarks/support/machine_limits.py) over the time that they took, of what a large copy and a large product reach here.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import checkout  # noqa: F401
from edged.runtime.process import prepare, restart_in_huge_pages

if __name__ == "__main__":
    restart_in_huge_pages()
prepare()

import torch  # noqa: E402

from benchmarks.iteration import ANSWER_TOKENS, BATCHES, PREFILL_TOKENS, PROMPT_TOKENS, measure  # noqa: E402
from benchmarks.support.machine_limits import (  # noqa: E402
    Machine,
    Sizes,
    Work,
    copy_bytes_per_s,
    decode,
    measure_machine,
    prefill,
    report_header,
)
from benchmarks.support.random_llama import SHAPES, device_dtype, write_random_llama  # noqa: E402
from edged.tensors.cpu_threads import apart  # noqa: E402


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a 4 M parameter model: a smoke test")
    parser.add_argument("--size", choices=SHAPES, default=None, help="of the model (default 135m; quick: 4m)")
    parser.add_argument(
        "--batch", type=int, choices=BATCHES, action="append", help="answers at once, may be given again (default: all)"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--output", type=Path, default=None, help="write a JSON report here")
    options = parser.parse_args()
    size = options.size or ("4m" if options.quick else "135m")
    report = run(size, options.device, options.batch or BATCHES)
    print(json.dumps(report) if options.json else table(report))
    if options.output:
        options.output.write_text(json.dumps(report, indent=2) + "\n")


def run(size: str, device: str, batches: Sequence[int]) -> dict[str, Any]:
    """Measure at these numbers of answers, and set beside what the device can do."""
    header, dtype = report_header(device), device_dtype(device)
    machine = apart(lambda: measure_machine(torch.device(device), dtype))
    copy = apart(lambda: copy_bytes_per_s(torch.device(device)))
    with tempfile.TemporaryDirectory(prefix="edged-bench-") as folder:
        model = apart(lambda: write_random_llama(Path(folder), SHAPES[size], dtype))
        sizes = Sizes.of(model, dtype)
        found = measure(model, device, dtype, batches, lambda text: print(text, file=sys.stderr, flush=True))
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
        "machine": {**machine.as_json(), "copy_bytes_per_s": copy},
        "prompt_tokens": PROMPT_TOKENS,
        **found,
        "shares": {name: shares(work, took_s, machine, copy) for name, (work, took_s) in works.items()},
    }


def shares(work: Work, took_s: float, machine: Machine, copy: float) -> dict[str, float]:
    """How far a piece of work that took `took_s` came of what the device reaches."""
    return {
        "ms": 1e3 * took_s,
        "floor_ms": 1e3 * work.floor_s(machine),
        "of_copy_bandwidth": work.bytes / took_s / copy,
        "of_matmul_rate": work.operations / took_s / machine.operations_per_s,
    }


def table(report: dict[str, Any]) -> str:
    """Both tables as Markdown."""
    machine = report["machine"]
    reached = Machine(machine["bytes_per_s"], machine["operations_per_s"]).text()
    lines = [
        f"{report['model']} random-weight Llama, prompts of {report['prompt_tokens']} tokens, {report['dtype']}, "
        f"{report['device']}: {reached}, copies at {machine['copy_bytes_per_s'] / 1e9:.0f} GB/s",
        "",
        "| batch | drawn | an iteration (ms) | its floor | outside the model's forward (ms, quartiles) | share |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for batch, mixes in report["decodes"].items():
        for name, found in mixes.items():
            around = found["outside_ms"]
            lines.append(
                f"| {batch} | {name} | {found['iteration_ms']['median']:.1f} | {found['floor_ms']:.1f} | "
                f"{around['median']:.2f} ({around['low']:.2f}-{around['high']:.2f}) | "
                f"{found['outside_share']['median']:.1%} |"
            )
    lines += [
        "",
        "| work | ms | its floor | share of copy bandwidth | of the matmul rate |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, found in report["shares"].items():
        lines.append(
            f"| {name} | {found['ms']:.1f} | {found['floor_ms']:.1f} | {found['of_copy_bandwidth']:.1%} | "
            f"{found['of_matmul_rate']:.1%} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
