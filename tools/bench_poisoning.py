#!/usr/bin/env python3
"""Poisoned feedback: what the quarantine costs four honest tastes, and what an attack does with and without it.

    python tools/bench_poisoning.py hh-harmless.jsonl.gz --model hh-lm [--tastes NAMES] [--quick] [--output FILE]

Honest: each taste's whole stream goes through an engine with the default settings; how many pairs are quarantined.
Attack: 200 honest pairs of `concise`, then 40 with the opposite preference under the same user's name; reward accuracy
on 64 earlier pairs before and after, with the quarantine, without it, and without it but with the guard that takes
versions back. Takes some 10 minutes on 2 cores; --quick is a smoke test.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

from edged.engine.process import prepare, restart_in_huge_pages

if __name__ == "__main__":
    restart_in_huge_pages()
prepare()

import torch  # noqa: E402

import edged  # noqa: E402
from edged.align.pair import TokenPair  # noqa: E402
from edged.bench.poisoning import flipped, run_parts  # noqa: E402
from edged.bench.replay import load_pairs  # noqa: E402
from edged.bench.tastes import FIRST_ONLINE_LINE, TASTES, Taste, relabel  # noqa: E402
from edged.config import Settings, load_settings  # noqa: E402
from edged.engine.text import Codec  # noqa: E402

ATTACKS: dict[str, dict[str, Any]] = {
    "quarantine": {"guard.evaluate_every": 1000, "guard.max_accuracy_drop": 1.0},
    "nothing": {"guard.evaluate_every": 1000, "guard.max_accuracy_drop": 1.0, "feedback.quarantine": False},
    "guard alone": {"feedback.quarantine": False},
}


def main() -> None:
    """Run the benchmark."""
    options = parsed()
    codec = Codec.load(options.model)
    pairs, _ = load_pairs(options.pairs, "hh", codec, Settings().align.max_pair_tokens)
    online = [pair for pair in pairs if pair.pair_id >= FIRST_ONLINE_LINE]
    earlier = [pair for pair in pairs if pair.pair_id < FIRST_ONLINE_LINE]

    def stream(taste: Taste, source: list[TokenPair]) -> list[TokenPair]:
        return relabel(source, taste, taste, codec.decode)

    report: dict[str, Any] = {
        "model": options.model.name,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {os.cpu_count()} cores",
        "versions": {"edged": edged.__version__, "torch": torch.__version__},
        "measured_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "honest": {},
        "attack": {},
    }
    honest, poison, held_out = (24, 12, 8) if options.quick else (200, 40, 64)
    for taste in options.tastes:
        own = stream(taste, online)[: 40 if options.quick else None]
        done = run_parts(options.model, settings_of({}), {"all": own})
        report["honest"][taste] = done
        print(f"{taste}: {done['parts']['all']} {done['reasons']}", flush=True)
        keep(report, options.output)
    concise = stream("concise", online)
    parts = {"honest": concise[:honest], "flipped": flipped(concise[honest : honest + poison])}
    for name, overrides in ATTACKS.items():
        own_guard = {"guard.held_out_share": 0.0, "guard.held_out_pairs": held_out, **overrides}
        tests = stream("concise", earlier)[-held_out:]
        done = run_parts(options.model, settings_of(own_guard), parts, tests)
        report["attack"][name] = done
        print(f"attack, {name}: {json.dumps(done, indent=1)}", flush=True)
        keep(report, options.output)


def settings_of(overrides: dict[str, Any]) -> Settings:
    """The defaults, but for what the run is about."""
    return load_settings(None, environ={}, overrides=overrides)


def keep(report: dict[str, Any], output: Path | None) -> None:
    """Write what is known so far: a run takes long."""
    if output:
        output.write_text(json.dumps(report, indent=2) + "\n")


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pairs", type=Path, help="HH-RLHF dialogues: a (gzipped) JSONL file")
    parser.add_argument("--model", type=Path, required=True, help="a model's directory")
    parser.add_argument("--tastes", default=None, help="by comma (default all four; none: the attack alone)")
    parser.add_argument("--quick", action="store_true", help="few pairs: a smoke test")
    parser.add_argument("--output", type=Path, default=None, help="write a JSON report here")
    options = parser.parse_args()
    names = list(TASTES) if options.tastes is None else [name for name in options.tastes.split(",") if name != "none"]
    for name in names:
        if name not in TASTES:
            parser.error(f'taste "{name}" is unknown: known are {", ".join(TASTES)}')
    options.tastes = names
    return options


if __name__ == "__main__":
    main()
