#!/usr/bin/env python3
"""Two frontiers of learning: answers that follow a taste against KL, and reward accuracy against NLL of unseen text.

    python tools/bench_language.py --model hh-lm --pairs hh-harmless.jsonl.gz [--set learning_rate=2e-4,beta=0.1]...
        [--tastes concise,refusing] [--counts 50,250] [--seeds 4] [--one-by-one] [--guard] [--quick] [--output FILE]
    python tools/bench_language.py --model demo --tastes formal,casual

An adapter learns the pairs of a taste under each `--set` (by default the daemon's own settings); after each of
`--counts` pairs it answers 100 prompts that no pair has, greedily and sampled. transformers and peft judge the answers:
NLL under the base model, repetition, length, and whether they follow the taste; and unseen text: reward accuracy and KL
of pairs, NLL of pairs, of neutral sentences and of prompts. The last 100 usable lines of the file are the unseen ones.
Without --pairs the demo model's own answers make the pairs.
The guard and the quarantine are off, unless --guard asks for the daemon as it is.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import checkout  # noqa: F401
from edged.runtime.process import prepare, restart_in_huge_pages

if __name__ == "__main__":
    restart_in_huge_pages()
prepare()


from benchmarks.language import Bench, Exam, stream  # noqa: E402
from benchmarks.sequential_dpo import Recipe, Reference, side_of  # noqa: E402
from benchmarks.support.interleave import open_sides  # noqa: E402
from benchmarks.support.machine_limits import report_header  # noqa: E402
from benchmarks.support.preference_streams import DEMO_TASTES, FIRST_ONLINE_LINE, TASTES  # noqa: E402
from edged.align.feedback.pair import TokenPair  # noqa: E402
from edged.align.metrics import RECENT_PAIRS  # noqa: E402
from edged.bench.replay import load_pairs  # noqa: E402
from edged.models import demo_model_dir  # noqa: E402
from edged.settings.load import Settings, load_settings  # noqa: E402

UNSEEN_PAIRS = 100
SCORED_PAIRS = 64
_ALONE = {
    "guard.held_out_share": 0.0,
    "guard.max_kl_nats": 1e9,
    "guard.max_nll_change": 1e9,
    "feedback.quarantine": False,
    "feedback.pairs_per_hour": 0,
}


def main() -> None:
    """Run the benchmark."""
    options = parsed()
    model = demo_model_dir() if options.pairs is None else options.model
    report: dict[str, Any] = {
        "model": options.model.name,
        **report_header(),
        "one_by_one": options.one_by_one,
        "guard": options.guard,
        "runs": [],
    }
    with open_sides([side_of(Recipe(str(model)))]) as (side,), tempfile.TemporaryDirectory() as folder:
        bench = Bench(model, settings_of("", options.guard), Reference(side))
        try:
            learnable, exam = material(options, bench)
            for taste, seed, text in itertools.product(options.tastes, range(options.seeds), options.set or [""]):
                settings = settings_of(text, options.guard)
                bench.engine.configure(settings).result()
                own = learnable[: max(options.counts) * 3]
                pairs = stream(own, taste, f"{taste}-{seed}", bench.codec.decode, seed)
                for each in measures(bench, exam, pairs, taste, options, Path(folder) / "weights.safetensors"):
                    print(json.dumps({"set": text, "seed": seed, **each}, ensure_ascii=False), flush=True)
                    report["runs"].append({"set": text, "seed": seed, "align": settings.align.model_dump(), **each})
                if options.output:
                    options.output.write_text(json.dumps(report, indent=1) + "\n")
        finally:
            bench.close()
    print("\n" + table(report["runs"]))


def measures(
    bench: Bench, exam: Exam, pairs: Sequence[TokenPair], taste: Any, options: argparse.Namespace, weights: Path
) -> Iterator[dict[str, Any]]:
    """The measures after each count of pairs that the engine learned."""
    adapter, done, scores = pairs[0].adapter, 0, []
    for count in sorted({min(count, len(pairs)) for count in options.counts}):
        scores += bench.learn(pairs[done:count], options.one_by_one)
        done, last = count, scores[-RECENT_PAIRS:]
        accuracy = sum(score.reward_margin > 0 for score in last) / len(last)
        yield {"taste": taste, "pairs": count, "accuracy": accuracy, **bench.measure(exam, adapter, weights, taste)}
    bench.engine.forget(adapter).result()


def material(options: argparse.Namespace, bench: Bench) -> tuple[list[TokenPair], Exam]:
    """(pairs to learn from, the exam); both are the same for every run."""
    if options.pairs is None:
        learnable, unseen = bench.own_pairs(max(options.counts) * 2, 1), bench.own_pairs(UNSEEN_PAIRS, 2, fresh=True)
    else:
        pairs, _ = load_pairs(options.pairs, "hh", bench.codec, Settings().align.max_pair_tokens)
        unseen = pairs[-UNSEEN_PAIRS:]
        # Those that the base model was not trained on come first.
        learnable = sorted(pairs[:-UNSEEN_PAIRS], key=lambda pair: pair.pair_id < FIRST_ONLINE_LINE)
    unseen = unseen[:8] if options.quick else unseen
    return learnable, bench.exam([pair.prompt for pair in unseen], unseen[:SCORED_PAIRS])


def settings_of(text: str, guard: bool) -> Settings:
    """The defaults with `text`, such as "learning_rate=2e-4,beta=0.5", put over their section [align]."""
    chosen = {f"align.{name}": value for name, value in (item.split("=", 1) for item in text.split(",") if item)}
    alone = {"feedback.pairs_per_hour": 0} if guard else _ALONE
    return load_settings(None, environ={}, overrides={**alone, **chosen, "serving.max_queue": 4096})


def table(runs: Sequence[dict[str, Any]]) -> str:
    """Means over seeds with their ranges, as Markdown."""
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "accuracy, last 50": lambda run: f"{run['accuracy']:.2f}",
        "held out": lambda run: f"{run['held_out_accuracy']:.2f}",
        "NLL of unseen answers, %": lambda run: f"{100 * run['nll_change']:+.1f}",
        "of neutral text, %": lambda run: f"{100 * run['neutral_change']:+.1f}",
        "KL": lambda run: f"{run['kl_nats']:.3f}",
        "greedy answers that follow (base)": lambda run: _following(run["greedy"]),
        "sampled ones": lambda run: _following(run["sampled"]),
        "repetition (base)": lambda run: f"{run['greedy']['repetition']:.2f} ({run['greedy']['repetition_base']:.2f})",
        "their NLL under the base": lambda run: f"{run['greedy']['base_nll']:.2f}",
    }
    lines = ["| taste | settings | pairs | seed | " + " | ".join(columns) + " |"]
    lines.append("| --- |" + " --- |" * (3 + len(columns)))
    for run in sorted(runs, key=lambda run: (run["taste"], run["set"], run["pairs"], run["seed"])):
        said = [run["taste"], run["set"] or "defaults", str(run["pairs"]), str(run["seed"])]
        lines.append("| " + " | ".join([*said, *(cell(run) for cell in columns.values())]) + " |")
    return "\n".join(lines)


def _following(part: dict[str, Any]) -> str:
    return f"{part['follow']:.2f} ({part['follow_base']:.2f})" if "follow" in part else ""


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help='a model\'s directory, or "demo"')
    parser.add_argument("--pairs", type=Path, default=None, help="HH-RLHF dialogues: a (gzipped) JSONL file")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE,...", help="of [align]; repeatable")
    parser.add_argument("--tastes", default="", help="by comma (default all that the pairs' model knows)")
    parser.add_argument("--counts", default="50,250", help="pairs after which it is measured (default 50,250)")
    parser.add_argument("--seeds", type=int, default=1, help="orders of the pairs: 0 to this (default 1)")
    parser.add_argument("--one-by-one", action="store_true", help="each pair comes when the one before is learned")
    parser.add_argument("--guard", action="store_true", help="with guard and quarantine as by default")
    parser.add_argument("--quick", action="store_true", help="few prompts: a smoke test")
    parser.add_argument("--output", type=Path, default=None, help="write a JSON report here")
    options = parser.parse_args()
    if options.pairs is None and str(options.model) != "demo":
        parser.error(f"--pairs is missing: only the demo model makes its own, {options.model} needs a file")
    known: Sequence[str] = DEMO_TASTES if options.pairs is None else TASTES
    options.tastes = options.tastes.split(",") if options.tastes else list(known)
    if unknown := set(options.tastes).difference(known):
        parser.error(f'taste "{unknown.pop()}" is unknown here: known are {", ".join(known)}')
    options.counts = [int(count) for count in options.counts.split(",")]
    return options


if __name__ == "__main__":
    main()
