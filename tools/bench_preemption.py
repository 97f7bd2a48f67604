#!/usr/bin/env python3
"""How soon a request that comes in the middle of fine-tuning is begun: at most one unit later is the target.

    python tools/bench_preemption.py hh-harmless.jsonl.gz [--model DIR] [--requests 200] [--output FILE]

An engine fine-tunes without pause for --adapters users (default 2: as many steps as the engine has open at once) while
requests of 64 tokens come one at a time, at random. For each, the delay from its submission to the start of the packed
forward that computes its first tokens, in milliseconds and in lengths of the piece (a unit, or a packed forward) that
ran when it came, and the number of units that ended in between. The floor of a delay is none, as nothing must be read
or computed before a prompt is begun. Beside a piece's length stands its floor: what this machine must read and compute
for it, attention aside, at the bandwidth and the rate that it reached when the benchmark began. Without --model: a
random-weight Llama of SmolLM2-135M's shape.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import checkout  # noqa: F401
from edged.runtime.process import prepare, restart_in_huge_pages

if __name__ == "__main__":
    restart_in_huge_pages()
prepare()

import numpy as np  # noqa: E402
import torch  # noqa: E402

from benchmarks.preemption import Wait, measure  # noqa: E402
from benchmarks.support.machine_limits import Machine, Sizes, measure_machine, report_header, unit  # noqa: E402
from benchmarks.support.random_llama import SHAPES, device_dtype, write_random_llama, write_tokenizer  # noqa: E402
from edged.align.feedback.pair_formats import read_pairs  # noqa: E402
from edged.bench.replay import load_pairs  # noqa: E402
from edged.settings.load import Settings  # noqa: E402
from edged.tensors.cpu_threads import apart  # noqa: E402
from edged.text.tokenizer import Tokenizer  # noqa: E402

PERCENTILES = (50, 95, 99, 100)
CHAT_TEMPLATE = (
    "{% for message in messages %}\n\n{{ message.role }}: {{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}\n\nassistant:{% endif %}"
)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pairs", type=Path, help="preference pairs: a (gzipped) JSONL file")
    parser.add_argument("--format", choices=["hh", "trl", "edged"], default="hh", help="of the file (default hh)")
    parser.add_argument("--model", type=Path, default=None, help="a model's directory (default: random weights)")
    parser.add_argument("--quick", action="store_true", help="a 4 M parameter model and few requests: a smoke test")
    parser.add_argument("--requests", type=int, default=None, help="arrivals (default 200; quick: 20)")
    parser.add_argument("--gap-s", type=float, default=None, help="mean pause before one (default 0.5; quick: 0.1)")
    parser.add_argument("--adapters", type=int, default=2, help="users whose pairs are learnt (default 2)")
    parser.add_argument("--seed", type=int, default=0, help="of the arrivals (default 0)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, default=None, help="write a JSON report here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="edged-bench-") as folder:
        size = "4m" if options.quick else "135m"
        model = options.model or random_model(Path(folder), options.pairs, options.format, size)
        report = {"model": options.model.name if options.model else f"{size} random-weight Llama"}
        report |= run(model, options)
    print(table(report))
    if options.output:
        options.output.write_text(json.dumps(report, indent=2) + "\n")


def random_model(folder: Path, pairs: Path, format: Any, size: str) -> Path:
    """A random-weight Llama with a tokenizer that was trained on the pairs."""
    apart(lambda: write_random_llama(folder, SHAPES[size]))
    texts = (pair[key] for _, pair in read_pairs(pairs, format) if isinstance(pair, dict) for key in ("chosen",))
    tokenizer = write_tokenizer(folder, texts, SHAPES[size].vocab)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def run(model: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Measure and summarise."""
    header = report_header(options.device)
    settings = Settings.model_validate(
        {
            "model": {"device": options.device},
            "align": {"loss_threshold": 0.0, "max_active_adapters": max(8, options.adapters)},
            "store": {"save_every_s": 3600.0},
        }
    )
    pairs, _ = load_pairs(options.pairs, options.format, Tokenizer.load(model), settings.align.max_pair_tokens)
    shared = [replace(pair, adapter=f"user{number % options.adapters}") for number, pair in enumerate(pairs)]
    requests = options.requests or (20 if options.quick else 200)
    gap_s = options.gap_s or (0.1 if options.quick else 0.5)
    dtype = device_dtype(options.device)
    machine = apart(lambda: measure_machine(torch.device(options.device), dtype))
    floors = Floors(Sizes.of(model, dtype, settings.align.rank), machine)
    waits, learnt = measure(model, settings, shared, requests, gap_s, options.seed)
    return {
        **header,
        "requests": requests,
        "mean_gap_s": gap_s,
        "adapters": options.adapters,
        "learnt_meanwhile": learnt,
        "machine": machine.as_json(),
        "all": summary(waits, floors),
        "by_kind": {
            kind: summary([wait for wait in waits if wait.kind == kind], floors)
            for kind in sorted({w.kind for w in waits})
        },
    }


@dataclass(frozen=True, slots=True)
class Floors:
    """Of pieces of one model on one machine."""

    sizes: Sizes
    machine: Machine

    def ms(self, wait: Wait) -> float:
        """Of the piece that an arrival met."""
        return 1e3 * unit(self.sizes, wait.kind, wait.tokens).floor_s(self.machine)


def summary(waits: Sequence[Wait], floors: Floors) -> dict[str, Any]:
    """Percentiles of the delay, and how many units ended in it."""
    pieces = [wait for wait in waits if wait.piece_s]
    return {
        "arrivals": len(waits),
        "delay_ms": percentiles([1e3 * wait.delay_s for wait in waits]),
        "outside_ms": percentiles([1e3 * wait.outside_s for wait in waits]),
        "delay_in_pieces": percentiles([wait.delay_s / wait.piece_s for wait in pieces]),
        "piece_ms": percentiles([1e3 * wait.piece_s for wait in pieces]),
        "piece_floor_ms": percentiles([floors.ms(wait) for wait in pieces]),
        "unit_ends": {str(ends): count for ends, count in sorted(Counter(wait.unit_ends for wait in waits).items())},
    }


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """By name; p100 is the largest. None where there are none."""
    if not values:
        return None
    return {f"p{share}": float(np.percentile(values, share)) for share in PERCENTILES}


def table(report: dict[str, Any]) -> str:
    """The distribution as Markdown."""
    lines = [
        f"{report['model']}, {report['requests']} requests while {report['adapters']} adapters learn without pause "
        f"({report['learnt_meanwhile']['steps']} steps), {report['device']}",
        "",
        "| what ran at the arrival | arrivals | delay p50, p95, p99, longest (ms) | in lengths of it p50, p95, longest "
        "| its own ms p50 | floor p50 | delay outside pieces p50, p95 (ms) | units ended before the start |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for label, found in [("anything", report["all"]), *report["by_kind"].items()]:
        outside = ", ".join(f"{found['outside_ms'][key]:.1f}" for key in ("p50", "p95"))
        delay, lengths, piece = found["delay_ms"], found["delay_in_pieces"], found["piece_ms"]
        in_lengths = ", ".join(f"{lengths[key]:.2f}" for key in ("p50", "p95", "p100")) if lengths else "-"
        own = f"{piece['p50']:.1f} | {found['piece_floor_ms']['p50']:.1f}" if piece else "- | -"
        ends = ", ".join(f"{ends}: {count}" for ends, count in found["unit_ends"].items())
        lines.append(
            f"| {label} | {found['arrivals']} | {', '.join(f'{value:.1f}' for value in delay.values())} | "
            f"{in_lengths} | {own} | {outside} | {ends} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
