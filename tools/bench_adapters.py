#!/usr/bin/env python3
"""What many adapters cost: a decode batch of 32 shared by 1 or 16 of them, and 1,000 registered with 64 active.

    python tools/bench_adapters.py [--rounds 5] [--registered 1000] [--active 64] [--output FILE]

The batch: a random-weight Llama of SmolLM2-135M's shape (--quick: 4 M parameters), median time between tokens, sides in
turns. The crowd: the demo model; first tokens of users whose adapters are on disk alone ("cold") and in memory
("warm"), and the gaps in a stream that runs meanwhile. Beside each figure stands its floor: what this machine must read
and compute for it, at the bandwidth and the rate that it reached when the benchmark began.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import checkout  # noqa: F401
from edged.runtime.process import prepare, restart_in_huge_pages

if __name__ == "__main__":
    restart_in_huge_pages()
prepare()

import torch  # noqa: E402

from benchmarks.adapters import ANSWER_TOKENS, BATCH, PROMPT_TOKENS, batch_cost, registered_cost  # noqa: E402
from benchmarks.support.machine_limits import Machine, Sizes, decode, measure_machine, prefill  # noqa: E402
from benchmarks.support.random_llama import SHAPES, write_random_llama  # noqa: E402
from edged.models import demo_model_dir  # noqa: E402
from edged.settings.load import AlignSettings  # noqa: E402
from edged.tensors.cpu_threads import apart  # noqa: E402

DEVICE, DTYPE = ("cuda", "bfloat16") if torch.cuda.is_available() else ("cpu", "float32")
"""What an engine chooses by itself."""


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a 4 M parameter model and 100 adapters: a smoke test")
    parser.add_argument("--rounds", type=int, default=None, help="measured rounds of the batch (default 5; quick: 2)")
    parser.add_argument("--registered", type=int, default=None, help="adapters on disk (default 1000; quick: 100)")
    parser.add_argument("--active", type=int, default=None, help="users who ask (default 64; quick: 8)")
    parser.add_argument("--output", type=Path, default=None, help="write a JSON report here")
    options = parser.parse_args()
    quick = options.quick
    machine = apart(lambda: measure_machine(torch.device(DEVICE), DTYPE))
    with tempfile.TemporaryDirectory(prefix="edged-bench-") as folder:
        model = apart(lambda: write_random_llama(Path(folder), SHAPES["4m" if quick else "135m"]))
        batch = batch_cost(model, options.rounds or (2 if quick else 5))
        batch["floor_ms"] = batch_floors(model, machine, list(batch["gap_ms"]))
    crowd = registered_cost(
        demo_model_dir(), options.registered or (100 if quick else 1000), options.active or (8 if quick else 64)
    )
    crowd |= crowd_floors(demo_model_dir(), machine)
    print(f"the machine: {machine.text()}")
    show_batch(batch)
    show_crowd(crowd)
    if options.output:
        report = {"machine": machine.as_json(), "batch": batch, "crowd": crowd}
        options.output.write_text(json.dumps(report, indent=2) + "\n")


def batch_floors(model: Path, machine: Machine, counts: list[str]) -> dict[str, float]:
    """Milliseconds between the batch's tokens, at least, by the number of adapters."""
    sizes = Sizes.of(model, DTYPE, AlignSettings().rank)
    context = PROMPT_TOKENS + ANSWER_TOKENS // 2
    return {count: 1e3 * decode(sizes, BATCH, context, int(count)).floor_s(machine) for count in counts}


def crowd_floors(model: Path, machine: Machine) -> dict[str, float]:
    """Milliseconds of a first token and between a stream's tokens, at least."""
    sizes = Sizes.of(model, DTYPE, AlignSettings().rank)
    return {
        "ttft_floor_ms": 1e3 * prefill(sizes, PROMPT_TOKENS, adapters=1).floor_s(machine),
        "stream_gap_floor_ms": 1e3 * decode(sizes, 1, PROMPT_TOKENS).floor_s(machine),
    }


def show_batch(batch: dict[str, Any]) -> None:
    """The batch's times, their ratios, and the floors of both."""
    floor_ms = batch["floor_ms"]
    for count, ratio in batch["over_one_adapter"].items():
        print(
            f"{count} adapters in a batch of {batch['batch']}: {batch['gap_ms'][count]['median']:.1f} ms "
            f"(floor {floor_ms[count]:.1f}), {ratio['median']:.3f} ({ratio['low']:.3f}-{ratio['high']:.3f}) of the "
            f"time with one (floors: {floor_ms[count] / floor_ms['1']:.3f})"
        )


def show_crowd(crowd: dict[str, Any]) -> None:
    """First tokens and gaps, and their floors."""
    print(
        f"{crowd['registered']} registered: started in {crowd['start_s']:.1f} s, {crowd['loaded']} in memory at the end"
    )
    for label in ("cold", "warm"):
        found = crowd[label]
        print(
            f"{label}: TTFT p50 {found['ttft_ms_p50']:.0f} ms, p95 {found['ttft_ms_p95']:.0f} ms (floor "
            f"{crowd['ttft_floor_ms']:.1f}); gaps of a stream p50 {found['stream_gap_ms_p50']:.1f} ms, p99 "
            f"{found['stream_gap_ms_p99']:.1f} ms (floor {crowd['stream_gap_floor_ms']:.1f})"
        )


if __name__ == "__main__":
    main()
