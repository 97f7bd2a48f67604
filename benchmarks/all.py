"""Run the benchmarks in one go and tell which ratios moved beyond their spread since the committed results.

    tools/bench --pairs hh-harmless.jsonl.gz --trace mooncake-conversation.jsonl            about 10 minutes
    tools/bench --pairs hh-harmless.jsonl.gz --trace mooncake-conversation.jsonl --quick    small models, no comparison

Only ratios are compared: both sides of each were measured in one run on one machine. `--save` makes this run the one
that later runs are compared with (docs/results/bench.json). At last instructions are counted and compared with
docs/results/instructions.json, which `python -m benchmarks.instructions --save` writes. With `--check` the exit status
is 1 where a ratio or a count moved, up or down.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from pathlib import Path
from typing import Any, TextIO

from benchmarks.support.checkout import ROOT, environment
from benchmarks.support.command import existing_file, flag, keep, make_parser, option, resolve, say

COMMITTED = ROOT / "docs" / "results" / "bench.json"
OUTSIDE_AT_BATCH = 8

Ratios = dict[str, dict[str, float]]
"""Maps a ratio's name to its median, low and high."""


def main() -> None:
    """Run all benchmarks, print the table, compare."""
    given = (
        option("--pairs", "preference pairs for the DPO steps; without them these are left out", type=existing_file),
        option("--trace", "a Mooncake trace; without it shared prefixes are left out", type=existing_file),
        flag("--save", f"write {COMMITTED.relative_to(ROOT)}"),
        flag("--check", "exit with 1 where a ratio or a count moved"),
    )
    parser = make_parser(__doc__, *given, quick="small models", program="tools/bench")
    options = resolve(parser, *given)
    if options.save and (options.quick or not options.pairs or not options.trace):
        parser.error("--save needs a full run with --pairs and --trace: later runs are compared with it")
    if options.check and options.quick:
        parser.error("--check needs a full run: what --quick measures is compared with nothing")
    with tempfile.TemporaryDirectory(prefix="edged-bench-") as folder:
        output = Path(folder) / "report.json"
        found = measure(options, output)
        committed = {} if options.quick or not COMMITTED.is_file() else json.loads(COMMITTED.read_text())["ratios"]
        judged = {name: {**ratio, "verdict": verdict(ratio, committed.get(name))} for name, ratio in found.items()}
        if not options.json:
            show(found, committed)
        counts = count_instructions(output, sys.stderr if options.json else sys.stdout)
    told = {"ratios": judged, "instructions": counts}
    if options.json:
        print(json.dumps(told))
    keep(options, told)
    if options.save:
        report = {
            "measured_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "cores": os.cpu_count(),
            "ratios": found,
        }
        COMMITTED.write_text(json.dumps(report, indent=2) + "\n")
    if options.check and (names := moved(judged, counts)):
        sys.exit(f"tools/bench: moved since the committed results: {', '.join(names)}")


def measure(options: Namespace, output: Path) -> Ratios:
    """Return every benchmark's ratios, run one after the other; each report is written to `output` first."""
    found: Ratios = {}
    quick = ["--quick"] if options.quick else []
    found |= iteration(run("iteration", output, *quick, "--batch", str(OUTSIDE_AT_BATCH)))
    found |= serving(run("serving", output, *(quick or ["--rounds", "3"])))
    if options.pairs:
        steps = quick or ["--steps", "3"]
        found |= dpo(run("dpo", output, str(options.pairs), "--peer", "TRL", *steps))
        arrivals = quick or ["--requests", "40", "--gap-s", "0.3"]
        found |= preemption(run("preemption", output, str(options.pairs), *arrivals))
    if options.trace:
        requests = quick or ["--requests", "24", "--rounds", "1"]
        found |= prefix(run("prefix", output, str(options.trace), "--workload", "conversations", *requests))
    return found | adapters(run("adapters", output, *(quick or ["--rounds", "3"])))


def run(name: str, output: Path, *arguments: str) -> dict[str, Any]:
    """Run one benchmark and return its report; its progress and its table go to stderr."""
    say(f"== {name} {' '.join(arguments)}")
    began = time.monotonic()
    if call(name, output, *arguments, table=sys.stderr):
        raise SystemExit(f"tools/bench: {name} failed; its last lines are above")
    say(f"== {name} took {time.monotonic() - began:.0f} s")
    report: dict[str, Any] = json.loads(output.read_text())
    return report


def count_instructions(output: Path, table: TextIO) -> dict[str, Any] | None:
    """Return benchmarks.instructions' report, its table in `table`; None, and a line why, if it cannot count."""
    table.flush()
    if call("instructions", output, table=table):
        say("tools/bench: instructions were not counted; the line above says why")
        return None
    report: dict[str, Any] = json.loads(output.read_text())
    return report


def call(name: str, output: Path, *arguments: str, table: TextIO) -> int:
    """Run a benchmark in a process of its own; return its exit code."""
    command = [sys.executable, "-m", f"benchmarks.{name}", *arguments, "--output", str(output)]
    return subprocess.run(command, stdout=table, env=environment()).returncode


def moved(judged: dict[str, dict[str, Any]], counts: dict[str, Any] | None) -> list[str]:
    """Return the names of ratios that left their range and of counts that changed. New ones do not count."""
    ratios = [name for name, ratio in judged.items() if ratio["verdict"] in ("higher", "lower")]
    return ratios + [f"instructions of {name}" for name in (counts["moved"] if counts else {})]


def iteration(report: dict[str, Any]) -> Ratios:
    """Return the share of an iteration that is not the model's forward."""
    ratios = {}
    for name, mix in report["decodes"][str(OUTSIDE_AT_BATCH)].items():
        share = _spread(mix["outside_share"])
        # One run: a difference of a hundredth of an iteration is noise.
        wide = {"median": share["median"], "low": share["low"] - 0.01, "high": share["high"] + 0.01}
        ratios[f"share outside the model, {OUTSIDE_AT_BATCH} answers, {name}"] = wide
    return ratios


def serving(report: dict[str, Any]) -> Ratios:
    """Return ratios of output tokens/s to each peer's."""
    return {f"serving over {name}": _spread(ratio) for name, ratio in report["ratios"].items()}


def dpo(report: dict[str, Any]) -> Ratios:
    """Return ratios of pairs/s and of peak memory to each peer's."""
    found = {f"DPO pairs/s over {name}": _spread(ratio) for name, ratio in report["speed_ratios"].items()}
    for name, ratio in report["memory_ratios"].items():
        # A peak is one reading, and the allocator moves it by a few percent.
        found[f"DPO memory of {name}'s"] = {"median": ratio, "low": 0.95 * ratio, "high": 1.05 * ratio}
    return found


def prefix(report: dict[str, Any]) -> Ratios:
    """Return the ratio of requests/s with prefix sharing to without."""
    found = report["workloads"]
    ratios = {name: item["ratios"]["requests_per_s"]["median"] for name, item in found.items()}
    # One round; rounds differ by a few percent.
    return {
        f"shared prefixes, {name}": {"median": ratio, "low": 0.95 * ratio, "high": 1.05 * ratio}
        for name, ratio in ratios.items()
    }


def preemption(report: dict[str, Any]) -> Ratios:
    """Return an arrival's wait in lengths of the piece that ran when it came."""
    waits = report["all"]["delay_in_pieces"]
    if waits is None:
        return {}
    return {"wait in pieces of fine-tuning": {"median": waits["p50"], "low": waits["p50"], "high": waits["p100"]}}


def adapters(report: dict[str, Any]) -> Ratios:
    """Return ratios of a decode batch's time to the time with one adapter."""
    ratios = report["batch"]["over_one_adapter"]
    return {
        f"batch time with {count} adapters over one": _spread(ratio) for count, ratio in ratios.items() if count != "1"
    }


def _spread(ratio: dict[str, float]) -> dict[str, float]:
    return {key: ratio[key] for key in ("median", "low", "high")}


def verdict(now: dict[str, float], before: dict[str, float] | None) -> str:
    """Return a word for whether a ratio left its committed range."""
    if before is None:
        return "new"
    if now["low"] > before["high"]:
        return "higher"
    return "lower" if now["high"] < before["low"] else "same"


def show(found: Ratios, committed: Ratios) -> None:
    """Print the table, and the ratios that moved."""
    width = max(map(len, found))
    print(f"{'ratio':{width}}  now                   committed             ")
    for name, ratio in found.items():
        before = committed.get(name)
        print(f"{name:{width}}  {_text(ratio):20}  {_text(before) if before else '-':20}  {verdict(ratio, before)}")


def _text(ratio: dict[str, float]) -> str:
    return f"{ratio['median']:.2f} ({ratio['low']:.2f}-{ratio['high']:.2f})"


if __name__ == "__main__":
    main()
