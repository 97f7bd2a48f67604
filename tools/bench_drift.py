#!/usr/bin/env python3
"""People who change their minds, and others who say the same under their names: what is followed and what is held.

    python tools/bench_drift.py hh-harmless.jsonl.gz --model hh-lm [--taste concise] [--seeds 4] [--quick]
        [--output FILE]

150 pairs of a taste, then a change: a flip, a flip that is taken back, a gradual one, and two tastes by topic. As the
user's own direct signals each is to be followed: reward accuracy in windows of 20 pairs beside plain sequential DPO on
the same stream and at the same settings. 40 pairs of the opposite taste from elsewhere are an attack, which is to be
held; honest pairs that are all imported are not. Default settings; pairs come one by one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import checkout  # noqa: F401
from edged.runtime.process import prepare, restart_in_huge_pages

if __name__ == "__main__":
    restart_in_huge_pages()
prepare()


from benchmarks.drift import BEFORE, STREAMS, by_window, follow  # noqa: E402
from benchmarks.language import Bench, stream  # noqa: E402
from benchmarks.sequential_dpo import Reference, recipe_of, side_of  # noqa: E402
from benchmarks.support.interleave import open_sides  # noqa: E402
from benchmarks.support.machine_limits import report_header  # noqa: E402
from benchmarks.support.preference_streams import FIRST_ONLINE_LINE, TASTES  # noqa: E402
from edged.bench.replay import load_pairs  # noqa: E402
from edged.settings.load import load_settings  # noqa: E402
from edged.text.tokenizer import Tokenizer  # noqa: E402

PAIRS = 270


def main() -> None:
    """Run the benchmark."""
    options = parsed()
    settings = load_settings(None, environ={}, overrides={"feedback.pairs_per_hour": 0})
    codec = Tokenizer.load(options.model)
    pairs, _ = load_pairs(options.pairs, "hh", codec, settings.align.max_pair_tokens)
    online = [pair for pair in pairs if pair.pair_id >= FIRST_ONLINE_LINE]
    report: dict[str, Any] = {
        "model": options.model.name,
        "taste": options.taste,
        **report_header(),
        "align": settings.align.model_dump(),
        "runs": [],
    }
    with open_sides([side_of(recipe_of(str(options.model), settings.align))]) as (side,):
        bench = Bench(options.model, settings, Reference(side))
        try:
            for seed, name in itertools.product(range(options.seeds), options.streams):
                own = stream(online, options.taste, f"{options.taste}-{seed}", bench.codec.decode, seed)
                said = STREAMS[name]([replace(pair, direct=True) for pair in own[: options.count]])
                plain = by_window([(c - rc) - (r - rr) for c, r, rc, rr in bench.reference.learn(said, seed)])
                run = {"stream": name, "seed": seed, "loop": plain, **follow(bench, said)}
                report["runs"].append(run)
                print(json.dumps(run), flush=True)
                if options.output:
                    options.output.write_text(json.dumps(report, indent=1) + "\n")
        finally:
            bench.close()
    print("\n" + table(report["runs"]))


def table(runs: Sequence[dict[str, Any]]) -> str:
    """Means over seeds, as Markdown."""
    lines = [
        "| stream | | before | after the change, by 20 pairs | held: the user's own, from elsewhere |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name in dict.fromkeys(run["stream"] for run in runs):
        group = [run for run in runs if run["stream"] == name]
        held = ", ".join(
            " of ".join(str(sum(run[key][part] for run in group)) for part in (0, 1))
            for key in ("held_own", "held_foreign")
        )
        for label, key in (("edged", "accuracy"), ("loop", "loop")):
            first, *rest = means([run[key] for run in group])
            lines.append(f"| {name} | {label} | {first} | {' '.join(rest)} | {held if key == 'accuracy' else ''} |")
    return "\n".join(lines)


def means(rows: Sequence[Sequence[float | None]]) -> list[str]:
    """Means by column over the rows that have a value there."""
    columns = [[value for value in column if value is not None] for column in zip(*rows, strict=True)]
    return [f"{statistics.fmean(column):.2f}" if column else "-" for column in columns]


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pairs", type=Path, help="HH-RLHF dialogues: a (gzipped) JSONL file")
    parser.add_argument("--model", type=Path, required=True, help="a model's directory")
    parser.add_argument("--taste", choices=TASTES, default="concise", help="before the change (default concise)")
    parser.add_argument("--streams", default=",".join(STREAMS), help="by comma (default all)")
    parser.add_argument("--seeds", type=int, default=1, help="orders of the pairs: 0 to this (default 1)")
    parser.add_argument("--quick", action="store_true", help="few pairs: a smoke test")
    parser.add_argument("--output", type=Path, default=None, help="write a JSON report here")
    options = parser.parse_args()
    options.streams = options.streams.split(",")
    if unknown := set(options.streams).difference(STREAMS):
        parser.error(f'stream "{unknown.pop()}" is unknown: known are {", ".join(STREAMS)}')
    options.count = BEFORE + 20 if options.quick else PAIRS
    return options


if __name__ == "__main__":
    main()
