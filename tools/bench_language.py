#!/usr/bin/env python3
"""Two frontiers of learning: answers that follow a taste against KL, and reward accuracy against NLL of unseen text.

    python tools/bench_language.py --model hh-lm --pairs hh-harmless.jsonl.gz [--set learning_rate=2e-4,beta=0.1]...
        [--tastes concise,refusing] [--counts 50,250] [--seeds 4] [--one-by-one] [--loop] [--quick] [--output FILE]
    python tools/bench_language.py --model demo --tastes formal,casual

An adapter learns the pairs of a taste under each `--set` (by default the daemon's own settings); after each of
`--counts` pairs it answers 100 prompts that no pair has, greedily and sampled. transformers and peft judge the answers:
NLL under the base model, repetition, length, and whether they follow the taste; and unseen text: reward accuracy and KL
of pairs, NLL of pairs, of neutral sentences and of prompts. The last 100 usable lines of the file are the unseen ones.
Without --pairs the demo model's own answers make the pairs.
--loop adds plain sequential DPO (four pairs a step, one pass) at the same settings. The guard and the quarantine are
off, unless --guard asks for the daemon as it is.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from edged.engine.process import prepare, restart_in_huge_pages

if __name__ == "__main__":
    restart_in_huge_pages()
prepare()

import torch  # noqa: E402

import edged  # noqa: E402
from edged.align.pair import TokenPair  # noqa: E402
from edged.bench.language import Bench, Exam, last_accuracy, stream  # noqa: E402
from edged.bench.replay import load_pairs  # noqa: E402
from edged.bench.sequential import Recipe, Reference, recipe_of, side_of  # noqa: E402
from edged.bench.tastes import DEMO_TASTES, FIRST_ONLINE_LINE, TASTES  # noqa: E402
from edged.bench.turns import open_sides  # noqa: E402
from edged.config import Settings, load_settings  # noqa: E402
from edged.models import demo_model_dir  # noqa: E402

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
    model = demo_model_dir() if options.demo else options.model
    settings = settings_of("", options.guard)
    report: dict[str, Any] = {
        "model": options.model.name,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {os.cpu_count()} cores",
        "versions": {"edged": edged.__version__, "torch": torch.__version__},
        "measured_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "one_by_one": options.one_by_one,
        "guard": options.guard,
        "runs": [],
    }
    with open_sides([side_of(Recipe(str(model)))]) as (side,):
        bench = Bench(model, settings, Reference(side), options.answer_tokens)
        try:
            learnable, exam = material(options, bench, settings)
            for taste, seed, text in itertools.product(options.tastes, range(options.seeds), options.set or [""]):
                for run in runs_of(options, bench, exam, learnable, taste, seed, text, model):
                    report["runs"].append(run)
                    print(line_of(run), flush=True)
                    if options.output:
                        options.output.write_text(json.dumps(report, indent=1) + "\n")
        finally:
            bench.close()
    print("\n" + table(report["runs"]))


def material(options: argparse.Namespace, bench: Bench, settings: Settings) -> tuple[list[TokenPair], Exam]:
    """(pairs to learn from, the exam); both are the same for every run."""
    if options.pairs is None:
        learnable, unseen = bench.own_pairs(max(options.counts) * 2, 1), bench.own_pairs(UNSEEN_PAIRS, 2, fresh=True)
    else:
        pairs, _ = load_pairs(options.pairs, options.format, bench.codec, settings.align.max_pair_tokens)
        cut = max(0, len(pairs) - UNSEEN_PAIRS)
        # Those that the base model was not trained on come first.
        learnable = [p for p in pairs[:cut] if p.pair_id >= options.first_line]
        learnable += [p for p in pairs[:cut] if p.pair_id < options.first_line]
        unseen = pairs[cut:]
    if options.quick:
        unseen = unseen[:8]
    return learnable, bench.exam([pair.prompt for pair in unseen], unseen[:SCORED_PAIRS])


def runs_of(
    options: argparse.Namespace,
    bench: Bench,
    exam: Exam,
    learnable: Sequence[TokenPair],
    taste: Any,
    seed: int,
    text: str,
    model: Path,
) -> list[dict[str, Any]]:
    """The engine's run under one --set, after each count of pairs, and the loop's at the same settings."""
    settings = settings_of(text, options.guard)
    bench.engine.configure(settings).result()
    adapter = f"{taste}-{seed}"
    pairs = stream(learnable[: max(options.counts) * 3], taste, adapter, bench.codec.decode, seed)
    common = {"taste": taste, "seed": seed, "set": text, "align": settings.align.model_dump()}
    found, done = [], 0
    scores: list[Any] = []
    with tempfile.TemporaryDirectory(prefix="edged-") as folder:
        file = Path(folder) / "adapter_model.safetensors"
        for count in options.counts:
            if done >= len(pairs):
                break
            started = time.monotonic()
            scores += bench.learn(pairs[done:count], options.one_by_one)
            done = min(count, len(pairs))
            seconds = time.monotonic() - started
            if bench.engine.adapters().get(adapter):
                measured = bench.measure(exam, adapter, bench.weights_of(adapter, file), taste)
                found.append(
                    {**common, "side": "edged", "pairs": done, "seconds": seconds,
                     "accuracy": last_accuracy(scores), **measured}
                )  # fmt: skip
        bench.engine.forget(adapter).result()
        if options.loop:
            found += loop_runs(options, exam, pairs, bench, settings, common, seed, file, model)
    return found


def loop_runs(
    options: argparse.Namespace,
    exam: Exam,
    pairs: Sequence[TokenPair],
    bench: Bench,
    settings: Settings,
    common: dict[str, Any],
    seed: int,
    file: Path,
    model: Path,
) -> list[dict[str, Any]]:
    """Plain sequential DPO over the most pairs at the same settings, its answers given by the engine."""
    found = []
    with open_sides([side_of(recipe_of(str(model), settings.align))]) as (side,):
        loop = Reference(side)
        for count in sorted({min(count, len(pairs)) for count in options.counts}):
            rows = loop.learn(pairs[:count], seed)
            loop.save(str(file))
            bench.adopt("loop", file)
            margins = [(c - rc) - (r - rr) for c, r, rc, rr in rows][-50:]
            accuracy = sum(margin > 0 for margin in margins) / len(margins)
            measured = bench.measure(exam, "loop", str(file), common["taste"])
            found.append({**common, "side": "loop", "pairs": count, "accuracy": accuracy, **measured})
    bench.engine.forget("loop").result()
    return found


def settings_of(text: str, guard: bool) -> Settings:
    """The defaults with `text`, such as "learning_rate=2e-4,beta=0.5", put over their section [align]."""
    chosen = dict(item.split("=", 1) for item in text.split(",") if item)
    overrides: dict[str, Any] = {f"align.{name}": value for name, value in chosen.items()}
    alone = {"feedback.pairs_per_hour": 0} if guard else _ALONE
    return load_settings(None, environ={}, overrides={**alone, **overrides, "serving.max_queue": 4096})


def line_of(run: dict[str, Any]) -> str:
    """One run in one line."""
    greedy, sampled = run["greedy"], run["sampled"]
    follow = "".join(
        f", {kind} follow {part['follow_base']:.2f} -> {part['follow']:.2f}"
        for kind, part in (("greedy", greedy), ("sampled", sampled))
        if "follow" in part
    )
    return (
        f"{run['side']} {run['taste']} seed {run['seed']} [{run['set'] or 'defaults'}] {run['pairs']} pairs: accuracy "
        f"{run['accuracy']:.2f} (held out {run['held_out_accuracy']:.2f}), NLL {run['nll_change']:+.1%} "
        f"(neutral text {run['neutral_change']:+.1%}, prompts {run['prompts_change']:+.1%}), KL "
        f"{run['kl_nats']:.3f}{follow}, tokens {sampled['tokens_base']:.0f} -> {sampled['tokens']:.0f}, repetition "
        f"{greedy['repetition_base']:.2f} -> {greedy['repetition']:.2f}, NLL under the base {greedy['base_nll']:.2f} | "
        f"{' '.join(greedy['texts'][0].split())[:90]}"
    )


def table(runs: Sequence[dict[str, Any]]) -> str:
    """Means over seeds with their ranges, as Markdown."""
    lines = [
        "| side | taste | settings | pairs | accuracy, last 50 | held out | NLL of unseen text | KL | follow, greedy "
        "| follow, sampled | repetition, greedy (base) | NLL of greedy answers under the base |",
        "| --- |" + " --- |" * 11,
    ]
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for run in runs:
        groups.setdefault((run["side"], run["taste"], run["set"] or "defaults", run["pairs"]), []).append(run)
    for key, group in groups.items():
        cells = [
            spread([run["accuracy"] for run in group]),
            spread([run["held_out_accuracy"] for run in group]),
            spread([run["nll_change"] * 100 for run in group], "{:+.1f} %"),
            spread([run["kl_nats"] for run in group], "{:.3f}"),
            follow_cell(group, "greedy"),
            follow_cell(group, "sampled"),
            f"{spread([run['greedy']['repetition'] for run in group])} "
            f"({statistics.fmean(run['greedy']['repetition_base'] for run in group):.2f})",
            spread([run["greedy"]["base_nll"] for run in group]),
        ]
        lines.append("| " + " | ".join([*map(str, key), *cells]) + " |")
    return "\n".join(lines)


def follow_cell(group: Sequence[dict[str, Any]], kind: str) -> str:
    """Share of answers that follow the taste, from the base's to the adapter's."""
    if "follow" not in group[0][kind]:
        return ""
    before = statistics.fmean(run[kind]["follow_base"] for run in group)
    return f"{before:.2f} -> {spread([run[kind]['follow'] for run in group])}"


def spread(values: Sequence[float], form: str = "{:.2f}") -> str:
    """The mean, and the range where there are several values."""
    mean = form.format(statistics.fmean(values))
    return mean if len(values) == 1 else f"{mean} ({form.format(min(values))} to {form.format(max(values))})"


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help='a model\'s directory, or "demo"')
    parser.add_argument("--pairs", type=Path, default=None, help="preference pairs: a (gzipped) JSONL file")
    parser.add_argument("--format", choices=["hh", "trl", "edged"], default="hh", help="of the file (default hh)")
    parser.add_argument("--first-line", type=int, default=FIRST_ONLINE_LINE, help="new to the base (default 1401)")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE,...", help="of [align]; repeatable")
    parser.add_argument("--tastes", default=None, help="by comma (default all that the pairs' model knows)")
    parser.add_argument("--counts", default=None, help="pairs after which it is measured (default 50,250)")
    parser.add_argument("--seeds", type=int, default=1, help="orders of the pairs: 0 to this (default 1)")
    parser.add_argument("--one-by-one", action="store_true", help="each pair comes when the one before is learned")
    parser.add_argument("--loop", action="store_true", help="plain sequential DPO beside it")
    parser.add_argument("--guard", action="store_true", help="with guard and quarantine as by default")
    parser.add_argument("--answer-tokens", type=int, default=120, help="most tokens of an answer (default 120)")
    parser.add_argument("--quick", action="store_true", help="few pairs and prompts: a smoke test")
    parser.add_argument("--output", type=Path, default=None, help="write a JSON report here")
    options = parser.parse_args()
    options.demo = str(options.model) == "demo"
    if options.pairs is None and not options.demo:
        parser.error(f"--pairs is missing: only the demo model makes its own, {options.model} needs a file")
    known: Sequence[str] = DEMO_TASTES if options.pairs is None else TASTES
    options.tastes = options.tastes.split(",") if options.tastes else list(known[:1] if options.quick else known)
    for taste in options.tastes:
        if taste not in known:
            parser.error(f'taste "{taste}" is unknown here: known are {", ".join(known)}')
    options.counts = sorted(map(int, (options.counts or ("8" if options.quick else "50,250")).split(",")))
    if options.quick:
        options.answer_tokens = 64
    return options


if __name__ == "__main__":
    main()
