#!/usr/bin/env python3
"""What many adapters cost: a decode batch of 32 shared by 1 or 16 of them, and 1,000 registered with 64 active.

    python tools/bench_adapters.py [--rounds 5] [--registered 1000] [--active 64] [--output FILE]

The batch: a random-weight Llama of SmolLM2-135M's shape (--quick: 4 M parameters), median time between tokens, sides in
turns. The crowd: the demo model; first tokens of users whose adapters are on disk alone ("cold") and in memory
("warm"), and the gaps in a stream that runs meanwhile.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from edged.engine.process import prepare

prepare()

from edged.bench.adapters import batch_cost, registered_cost  # noqa: E402
from edged.bench.random_llama import SHAPES, write_random_llama  # noqa: E402
from edged.models import demo_model_dir  # noqa: E402


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
    with tempfile.TemporaryDirectory(prefix="edged-bench-") as folder:
        model = write_random_llama(Path(folder), SHAPES["4m" if quick else "135m"])
        batch = batch_cost(model, options.rounds or (2 if quick else 5))
    crowd = registered_cost(
        demo_model_dir(), options.registered or (100 if quick else 1000), options.active or (8 if quick else 64)
    )
    for count, ratio in batch["over_one_adapter"].items():
        print(
            f"{count} adapters in a batch of {batch['batch']}: {ratio['median']:.3f} "
            f"({ratio['low']:.3f}-{ratio['high']:.3f}) of the time with one"
        )
    print(
        f"{crowd['registered']} registered: started in {crowd['start_s']:.1f} s, {crowd['loaded']} in memory at the end"
    )
    for label in ("cold", "warm"):
        found = crowd[label]
        print(
            f"{label}: TTFT p50 {found['ttft_ms_p50']:.0f} ms, p95 {found['ttft_ms_p95']:.0f} ms; gaps of a stream p50 "
            f"{found['stream_gap_ms_p50']:.1f} ms, p99 {found['stream_gap_ms_p99']:.1f} ms"
        )
    if options.output:
        options.output.write_text(json.dumps({"batch": batch, "crowd": crowd}, indent=2) + "\n")


if __name__ == "__main__":
    main()
