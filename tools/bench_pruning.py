#!/usr/bin/env python3
"""Decode latency and teacher-forced quality of a model whose K/V is pruned, against C_total (MACE 4.3, Figure 8b).

    python tools/bench_pruning.py MODEL hh-harmless.jsonl.gz [--tokens 768,512,256,128,64] [--output FILE]

Each budget is the number of old tokens that a KV head keeps on the mean of the heads: C_total over the KV heads. The
pairs of the lines --first to --last are scored behind earlier dialogues of the file, so that contexts are --context
tokens long; every token goes through the executor's decode path. Latencies are of random tokens.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import checkout  # noqa: F401
from edged.runtime.process import prepare, restart_in_huge_pages

if __name__ == "__main__":
    restart_in_huge_pages()
prepare()

import torch  # noqa: E402

from benchmarks.pruning import (  # noqa: E402
    Budget,
    PrunedDecoding,
    long_cases,
    measure_quality,
    measure_tbt,
    settings_for,
)
from benchmarks.support.interleave import Spread  # noqa: E402
from benchmarks.support.machine_limits import report_header  # noqa: E402
from edged.bench.replay import load_pairs  # noqa: E402
from edged.tensors.cpu_threads import apart  # noqa: E402
from edged.text.tokenizer import Tokenizer  # noqa: E402


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a model's directory")
    parser.add_argument("pairs", type=Path, help="preference pairs: a (gzipped) JSONL file")
    parser.add_argument("--format", choices=["hh", "trl", "edged"], default="hh", help="of the file (default hh)")
    parser.add_argument("--first", type=int, default=1400, help="first line that is scored, from 0 (default 1400)")
    parser.add_argument("--last", type=int, default=1899, help="last line that is scored (default 1899)")
    parser.add_argument("--tokens", default="768,512,256,128,64", help="budgets (default 768,512,256,128,64)")
    parser.add_argument("--recent", type=int, default=128, help="latest tokens, always kept (default 128)")
    parser.add_argument("--context", type=int, default=None, help="tokens (default: what the model has positions for)")
    parser.add_argument("--batch", type=int, default=16, help="sequences that are decoded together (default 16)")
    parser.add_argument("--rounds", type=int, default=10, help="of latencies, 16 iterations each (default 10)")
    parser.add_argument("--memory-mb", type=int, default=1024, help="K/V pages (default 1024)")
    parser.add_argument("--quick", action="store_true", help="two budgets, few pairs and rounds: a smoke test")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, default=None, help="write a JSON report here")
    options = parser.parse_args()
    if options.quick:
        options.tokens, options.rounds, options.batch = "128,32", 2, 2
        options.last = options.first + 3
    report = run(options)
    print(table(report))
    if options.output:
        options.output.write_text(json.dumps(report, indent=2) + "\n")


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure and summarise."""
    header = report_header(options.device)
    budgets: list[Budget] = [None, *(int(part) for part in options.tokens.split(","))]
    settings = settings_for(options.device, options.memory_mb, options.recent)
    driver = apart(lambda: PrunedDecoding(options.model, settings))
    context = options.context or driver.parts.max_context_tokens
    lines, _ = load_pairs(options.pairs, options.format, Tokenizer.load(options.model), context)
    pairs = [pair for pair in lines if options.first <= pair.pair_id - 1 <= options.last]
    cases = long_cases(pairs, [pair for pair in lines if pair.pair_id - 1 < options.first], context)
    report: dict[str, Any] = {
        "model": options.model.name,
        **header,
        "arguments": arguments(options),
        "context_tokens": context,
        "recent_tokens": options.recent,
        "kv_heads": driver.parts.model.shape.kv_heads,
        "tbt": {},
    }
    for sequences in sorted({1, options.batch}):
        report["tbt"][str(sequences)] = apart(
            lambda n=sequences: measure_tbt(driver, budgets, context, n, options.rounds, 16)
        )
    report["quality"] = apart(lambda: measure_quality(driver, cases, budgets, options.batch))
    return report


def arguments(options: argparse.Namespace) -> dict[str, str | int]:
    """What this run was given, files by their names: enough to type its command again."""
    given = {name: value for name, value in vars(options).items() if name not in ("quick", "output")}
    return {
        name: value.name if isinstance(value, Path) else value for name, value in given.items() if value is not None
    }


def table(report: dict[str, Any]) -> str:
    """The report as a Markdown table."""
    batches = list(report["tbt"])
    lines = [
        f"{report['model']}, contexts of {report['context_tokens']} tokens, of which the latest "
        f"{report['recent_tokens']} are kept; {report['quality']['off']['pairs']:.0f} pairs; {report['device']}",
        "",
        "| old tokens kept per head | "
        + " | ".join(f"TBT, {n} sequences (ms) | pages" for n in batches)
        + " | CLPD (nats) | win rate | perplexity | greedy agreement |",
        "| --- |" + " --- |" * (2 * len(batches) + 4),
    ]
    for name, quality in report["quality"].items():
        cells = [name]
        for batch in batches:
            found = report["tbt"][batch][name]
            ms = found["ms"]
            cells += [Spread(ms["median"], ms["low"], ms["high"], ms["rounds"]).text(), str(found["pages"])]
        cells += [f"{quality['clpd_nats']:.2f}", f"{quality['win_rate']:.3f}"]
        cells += [f"{quality['perplexity']:.2f}", f"{quality['greedy_agreement']:.3f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
