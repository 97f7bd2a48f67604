#!/usr/bin/env python3
"""Alignment under full serving load: four tastes, policies side by side, beside a plain sequential DPO loop.

    python tools/bench_alignment.py hh-harmless.jsonl.gz --model hh-lm --trace azure-llm-2023-conv.csv [--quick]
        [--tastes concise,elaborate] [--policies mace,ekya,adainf] [--seeds 1] [--rate R] [--output FILE]

The stream is the file's lines from 1401 on, which hh-lm was not trained on, each pair tested before it is trained on.
The loop (transformers, peft, autograd) has the machine for itself. Then each policy gets the same requests and the same
pairs at the same moments: requests at 90 % of the rate that a burst reaches, pairs at even distances. Told by quarter
of the stream: reward accuracy before training on a pair (as the loop's), and by the version that answered when the pair
came (at equal wall time); and CLPD of 64 earlier pairs, which no adapter trains on, over time. Pairs that still wait
when the load ends are learnt after it, so that every pair has a score; how many were scored in time is told. At last
two users with opposite tastes share an engine. Takes some 6 minutes a taste, policy and seed on 2 cores; --quick is a
smoke test.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import checkout  # noqa: F401
from edged.runtime.process import prepare, restart_in_huge_pages

if __name__ == "__main__":
    restart_in_huge_pages()
prepare()

import torch  # noqa: E402

from benchmarks import alignment  # noqa: E402
from benchmarks.alignment import Load, Logps, Notes  # noqa: E402
from benchmarks.sequential_dpo import Reference, recipe_of, side_of  # noqa: E402
from benchmarks.support.interleave import open_sides  # noqa: E402
from benchmarks.support.machine_limits import report_header  # noqa: E402
from benchmarks.support.preference_streams import FIRST_ONLINE_LINE, TASTES, Taste, relabel  # noqa: E402
from edged.align.feedback.pair import TokenPair  # noqa: E402
from edged.bench.replay import ReplayPlan, load_pairs, replay  # noqa: E402
from edged.bench.traces import read_trace  # noqa: E402
from edged.scheduler.policies.registry import ROWS  # noqa: E402
from edged.settings.load import Settings, load_settings  # noqa: E402
from edged.text.tokenizer import Tokenizer  # noqa: E402

OPPOSITE: tuple[Taste, Taste] = ("concise", "elaborate")
FULL_LOAD = 0.9
"""Of the requests per second that a burst reaches."""
ALLOWED = 0.03
"""Reward accuracy that a quarter may stay under the loop's."""
_SECOND_USER = 1_000_000
"""Added to the pair ids of the second of two users."""


@dataclass
class Bench:
    """What all runs share."""

    options: argparse.Namespace
    codec: Tokenizer
    online: list[TokenPair]
    earlier: list[TokenPair]
    reference: Reference
    load: Load

    def stream(self, taste: Taste, adapter: str) -> list[TokenPair]:
        """The taste's pairs, as many as asked for."""
        return relabel(self.online, taste, adapter, self.codec.decode)[: self.options.pairs_most]

    def held_out(self, taste: Taste) -> list[TokenPair]:
        """The last pairs before the stream that the taste decides."""
        return relabel(self.earlier, taste, taste, self.codec.decode)[-self.options.held_out :]


def main() -> None:
    """Run the benchmark."""
    options = parsed()
    header = report_header(options.device)
    codec = Tokenizer.load(options.model)
    pairs, _ = load_pairs(options.pairs, options.format, codec, Settings().align.max_pair_tokens)
    online = [pair for pair in pairs if pair.pair_id >= options.first_line]
    earlier = [pair for pair in pairs if pair.pair_id < options.first_line]
    if not online or not earlier:
        raise SystemExit(
            f"{options.pairs.name} has {len(earlier)} usable pairs before line {options.first_line} and {len(online)} "
            "from there on: both are needed, choose another --first-line"
        )
    rate = options.rate or FULL_LOAD * capacity(options)
    load = Load(options.model, read_trace(options.trace), rate, 0.0)
    recipe = recipe_of(str(options.model), settings_of(options, "mace").align, options.device)
    with open_sides([side_of(recipe)]) as (side,):
        bench = Bench(options, codec, online, earlier, Reference(side), load)
        report = {
            "model": options.model.name,
            **header,
            "trace": load.trace.name,
            "requests_per_s": rate,
            "pairs_per_s": options.pairs_per_s,
            "settings": options.config.read_text() if options.config else "",
            "tastes": {},
        }
        for taste in options.tastes:
            report["tastes"][taste] = one_taste(bench, taste)
            keep(report, options.output)
        if options.opposite:
            report["opposite"] = [opposite_tastes(bench, seed, report["tastes"]) for seed in range(options.seeds)]
    keep(report, options.output)
    print(table(report))


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pairs", type=Path, help="preference pairs: a (gzipped) JSONL file")
    parser.add_argument("--format", choices=["hh", "trl", "edged"], default="hh", help="of the file (default hh)")
    parser.add_argument("--first-line", type=int, default=FIRST_ONLINE_LINE, help="of the stream (default 1401)")
    parser.add_argument("--model", type=Path, required=True, help="a model's directory")
    parser.add_argument("--trace", default="poisson", help='an Azure .csv, a Mooncake .jsonl or "poisson" (default)')
    parser.add_argument("--quick", action="store_true", help="40 pairs, 2 tastes, fast: a smoke test")
    parser.add_argument("--tastes", type=names_of(TASTES), default=None, help="by comma (default all four)")
    parser.add_argument(
        "--policies", type=names_of(list(ROWS)), default=None, help="by comma (default mace,ekya,adainf)"
    )
    parser.add_argument("--opposite", action=argparse.BooleanOptionalAction, default=True, help="two users at last")
    parser.add_argument("--seeds", type=int, default=1, help="of adapters, load and loop: 0 to this (default 1)")
    parser.add_argument("--rate", type=float, default=None, help="requests/s (default 90 %% of a burst's)")
    parser.add_argument("--pairs-per-s", type=float, default=None, help="of each user (default 2; quick: 5)")
    parser.add_argument("--pairs-most", type=int, default=None, help="of a taste (default all; quick: 40)")
    parser.add_argument("--held-out", type=int, default=64, help="pairs scored over time (default 64; quick: 8)")
    parser.add_argument("--moments", type=int, default=None, help="at which they are (default 12; quick: 3)")
    parser.add_argument("--config", type=Path, help="TOML file with further settings")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, default=None, help="write a JSON report here")
    options = parser.parse_args()
    quick = options.quick
    options.tastes = options.tastes or (list(OPPOSITE) if quick else list(TASTES))
    options.policies = options.policies or (["mace"] if quick else ["mace", "ekya", "adainf"])
    options.pairs_per_s = options.pairs_per_s or (5.0 if quick else 2.0)
    options.pairs_most = options.pairs_most or (40 if quick else None)
    options.held_out = min(options.held_out, 8) if quick else options.held_out
    options.moments = options.moments or (3 if quick else 12)
    return options


def names_of(known: Sequence[str]) -> Any:
    """A parser of names by comma."""

    def names(text: str) -> list[str]:
        found = text.split(",")
        for name in found:
            if name not in known:
                raise argparse.ArgumentTypeError(f'"{name}" is unknown: known are {", ".join(known)}')
        return found

    return names


def keep(report: dict[str, Any], output: Path | None) -> None:
    """Write what is known so far: a run takes long."""
    if output:
        output.write_text(json.dumps(report, indent=2) + "\n")


def say(line: str) -> None:
    """One line of progress."""
    print(f"  {line}", flush=True)


def settings_of(options: argparse.Namespace, policy: str) -> Settings:
    """The defaults, or the file's, but for what must be told."""
    overrides = {"model.device": options.device, "scheduler.policy": policy}
    return load_settings(options.config, environ={}, overrides=overrides)


def capacity(options: argparse.Namespace) -> float:
    """Requests per second of a burst, as a replay measures it."""
    settings = settings_of(options, "fcfs")
    plan = ReplayPlan(
        options.trace, options.pairs, options.model, settings, options.format, retrain_rate=0.0, seconds=1.0
    )
    return float(replay(plan, say)["load"]["capacity_per_s"])


# -- one taste -------------------------------------------------------------------------------------------------------


def one_taste(bench: Bench, taste: Taste) -> dict[str, Any]:
    """The loop, then every policy, for every seed."""
    pairs = bench.stream(taste, taste)
    found: dict[str, Any] = {"pairs": len(pairs), "loop": [], "policies": {name: [] for name in bench.options.policies}}
    for seed in range(bench.options.seeds):
        print(f"{taste}, seed {seed}: {len(pairs)} pairs, the loop", flush=True)
        found["loop"].append(loop(bench, taste, pairs, seed))
        for policy in bench.options.policies:
            print(f"{taste}, seed {seed}: {policy}", flush=True)
            named = [replace(pair, adapter=f"{taste}-{seed}") for pair in pairs]
            found["policies"][policy].append(loaded(bench, policy, named, seed, {f"{taste}-{seed}": taste}))
    return found


def loop(bench: Bench, taste: Taste, pairs: Sequence[TokenPair], seed: int) -> dict[str, Any]:
    """The reference: what a script without a server reaches, and what the base model does without learning."""
    started = time.monotonic()
    rows = bench.reference.learn(pairs, seed)
    seconds = time.monotonic() - started
    held_out = bench.held_out(taste)
    with tempfile.TemporaryDirectory(prefix="edged-bench-") as folder:
        file = Path(folder) / "loop.safetensors"
        bench.reference.save(str(file))
        after = bench.reference.score(held_out)
        said = language(bench, held_out, str(file))
    return {
        "seed": seed,
        "seconds": seconds,
        "before_training": alignment.figures(rows),
        "base": alignment.figures(as_base(rows)),
        "held_out_before": alignment.means(as_base(after)),
        "held_out_after": alignment.means(after),
        "language": said,
    }


def language(bench: Bench, pairs: Sequence[TokenPair], file: str | None) -> dict[str, float]:
    """KL to the base in nats a token, and the change of NLL, of both answers of pairs under an adapter's weights."""
    texts = [(pair.prompt, answer) for pair in pairs for answer in (pair.chosen, pair.rejected)]
    nll, base, kl = map(sum, zip(*bench.reference.language(texts, file, keep=True), strict=True)) if file else (1, 1, 0)
    return {"kl_nats": kl / sum(len(answer) for _, answer in texts), "nll_change": nll / base - 1.0}


def as_base(rows: Sequence[Logps]) -> list[Logps]:
    """The same pairs by the reference policy itself."""
    return [[rc, rr, rc, rr] for _, _, rc, rr in rows]


def loaded(
    bench: Bench, policy: str, pairs: Sequence[TokenPair], seed: int, tastes: dict[str, Taste]
) -> dict[str, Any]:
    """One engine under load; `tastes` names each adapter's."""
    options = bench.options
    seconds = len(pairs) / len(tastes) / options.pairs_per_s
    with tempfile.TemporaryDirectory(prefix="edged-bench-") as folder:
        load = replace(bench.load, seconds=seconds, seed=seed)
        notes = alignment.run_under_load(load, settings_of(options, policy), pairs, Path(folder), say)
        say(f"scoring {len(notes.files)} versions")
        users = {name: one_user(bench, notes, pairs, name, taste, seconds) for name, taste in tastes.items()}
    return {"seed": seed, "seconds": seconds, **notes.report, **alignment.learning(notes), "users": users}


def one_user(
    bench: Bench, notes: Notes, pairs: Sequence[TokenPair], name: str, taste: Taste, seconds: float
) -> dict[str, Any]:
    """What is told of an adapter."""
    own = [pair for pair in pairs if pair.adapter == name]
    count = bench.options.moments
    moments_s = [seconds * (number + 1) / count for number in range(count)]
    held_out = bench.held_out(taste)
    return {
        "taste": taste,
        "before_training": alignment.before_training(notes, own),
        "on_arrival": alignment.on_arrival(notes, own, bench.reference),
        "held_out": alignment.held_out_over_time(notes, name, held_out, bench.reference, moments_s),
        "language": language(bench, held_out, notes.file_at(name, math.inf)),
    }


def opposite_tastes(bench: Bench, seed: int, tastes: dict[str, Any]) -> dict[str, Any]:
    """Two users of one engine who want the opposite of each other, their pairs in turns."""
    names = {f"{taste}-{seed}": taste for taste in OPPOSITE}
    streams = [bench.stream(taste, name) for name, taste in names.items()]
    print(f"{' and '.join(OPPOSITE)} at once, seed {seed}", flush=True)
    mixed = [
        replace(pair, pair_id=pair.pair_id + user * _SECOND_USER)
        for together in zip(*streams, strict=False)
        for user, pair in enumerate(together)
    ]
    return loaded(bench, "mace", mixed, seed, names)


# -- the table -------------------------------------------------------------------------------------------------------


def average(rows: Sequence[Sequence[float | None]]) -> list[float | None]:
    """Over seeds, by quarter."""
    columns = [[value for value in column if value is not None] for column in zip(*rows, strict=True)]
    return [sum(column) / len(column) if column else None for column in columns]


def quarter_text(values: Sequence[float | None], digits: int = 2) -> str:
    """`0.61 0.72 0.80 0.91`."""
    return " ".join("-" if value is None else f"{value:.{digits}f}" for value in values)


def worst_gap(ours: Sequence[float | None], loop_quarters: Sequence[float | None]) -> float | None:
    """How far the worst quarter is over (+) or under (-) the loop's."""
    gaps = [a - b for a, b in zip(ours, loop_quarters, strict=True) if a is not None and b is not None]
    return min(gaps, default=None)


def table(report: dict[str, Any]) -> str:
    """Quarters and the last held-out CLPD as Markdown."""
    lines = [
        f"{report['model']}, {report['trace']} at {report['requests_per_s']:.2f} requests/s, "
        f"{report['pairs_per_s']:g} pairs/s a user, {report['device']}",
        "",
        "| taste | who | scored while the load lasted | reward accuracy before training, by quarter "
        "| worst against the loop | at the pair's arrival | its CLPD | held-out CLPD, last | held-out accuracy, last "
        "| KL | NLL |",
        "| --- |" + " --- |" * 10,
    ]
    for taste, found in report["tastes"].items():
        lines += rows_of_taste(taste, found)
    for run in report.get("opposite", []):
        for user in run["users"].values():
            loops = report["tastes"].get(user["taste"], {}).get("loop", [])
            lines.append(row(f"{user['taste']} beside its opposite", "mace", [run], [user], loops))
    return "\n".join(lines)


def rows_of_taste(taste: str, found: dict[str, Any]) -> list[str]:
    """The loop's row, nobody's, and every policy's."""
    loops = found["loop"]

    def mean(part: str, name: str) -> str:
        return quarter_text(average([run[part][name] for run in loops]), 2 if name == "reward_accuracy" else 0)

    before, after = (
        sum(run[when]["clpd_nats"] for run in loops) / len(loops) for when in ("held_out_before", "held_out_after")
    )
    accuracy = sum(run["held_out_after"]["reward_accuracy"] for run in loops) / len(loops)
    lines = [
        f"| {taste} ({found['pairs']}) | the loop alone | | {mean('before_training', 'reward_accuracy')} | | "
        f"| {mean('before_training', 'clpd_nats')} | {after:.0f} | {accuracy:.2f} | {strayed(loops)} |",
        f"| | no training | | | | | {mean('base', 'clpd_nats')} | {before:.0f} | | | |",
    ]
    for policy, runs in found["policies"].items():
        lines.append(row("", policy, runs, [user for run in runs for user in run["users"].values()], loops))
    return lines


def row(
    label: str,
    policy: str,
    runs: Sequence[dict[str, Any]],
    users: Sequence[dict[str, Any]],
    loops: Sequence[dict[str, Any]],
) -> str:
    """A policy's row over its seeds; what was scored in time is told of all users of a run together."""
    in_time, sent = (sum(run[name] for run in runs) for name in ("scored_in_time", "pairs_sent"))
    ours = average([user["before_training"]["reward_accuracy"] for user in users])
    gap = worst_gap(ours, average([run["before_training"]["reward_accuracy"] for run in loops])) if loops else None
    verdict = "" if gap is None else f"{gap:+.3f}{'' if gap >= -ALLOWED else ' (!)'}"
    arrival = quarter_text(average([user["on_arrival"]["reward_accuracy"] for user in users]))
    clpd = quarter_text(average([user["on_arrival"]["clpd_nats"] for user in users]), 0)
    last, accuracy = (
        sum(user["held_out"][-1][name] for user in users) / len(users) for name in ("clpd_nats", "reward_accuracy")
    )
    return (
        f"| {label} | {policy} | {in_time} of {sent} | {quarter_text(ours)} | {verdict} | {arrival} | {clpd} "
        f"| {last:.0f} | {accuracy:.2f} | {strayed(users)} |"
    )


def strayed(runs: Sequence[dict[str, Any]]) -> str:
    """Means of how far the language went: two cells."""
    kl, nll = (sum(run["language"][key] for run in runs) / len(runs) for key in ("kl_nats", "nll_change"))
    return f"{kl:.3f} | {nll:+.1%}"


if __name__ == "__main__":
    main()
