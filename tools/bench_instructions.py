#!/usr/bin/env python3
"""Count the instructions of a scheduling decision, of its completion and of the packing of a batch.

    python tools/bench_instructions.py [--save] [--output FILE]

Under valgrind's callgrind: unlike seconds, counts do not move with the load of the machine. They do move with the
versions of Python, numpy and torch, and with the kind of processor, so those are told with them. 64 live
tasks, the mixes of tools/bench_scheduler.py. `--save` writes docs/results/instructions.json, which later runs are
compared with.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

import checkout  # noqa: F401
from benchmarks.instructions import REPEATS, TASKS, pieces
from benchmarks.support.callgrind import Counter, missing_program

COMMITTED = Path(__file__).resolve().parent.parent / "docs" / "results" / "instructions.json"
MOVED_SHARE = 0.02
"""A count that differs by more has moved: two runs of the same code differ by far less."""


def main() -> None:
    """Count, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", action="store_true", help="write docs/results/instructions.json")
    parser.add_argument("--output", type=Path, default=None, help="write a JSON report here, with what moved")
    options = parser.parse_args()
    if missing := missing_program():
        sys.exit(f"instructions cannot be counted: {missing} is not installed (it comes with the package valgrind)")
    report = measure()
    committed = json.loads(COMMITTED.read_text()) if COMMITTED.is_file() else None
    print(table(report, committed))
    if options.save:
        COMMITTED.write_text(json.dumps(report, indent=2) + "\n")
    if options.output:
        options.output.write_text(json.dumps({**report, "moved": moved(report, committed)}, indent=2) + "\n")


def measure() -> dict[str, Any]:
    """Instructions per call, and what they depend on."""
    with Counter("benchmarks.instructions") as counter:
        counts = {name: round(counter.count(name) / REPEATS) for name in pieces()}
    valgrind = subprocess.run(["valgrind", "--version"], capture_output=True, text=True, check=True).stdout.strip()
    return {
        "versions": {
            "python": platform.python_version(),
            "numpy": np.__version__,
            "torch": torch.__version__,
            "valgrind": valgrind.removeprefix("valgrind-"),
            "machine": platform.machine(),
        },
        "live_tasks": TASKS,
        "instructions_per_call": counts,
    }


def moved(report: dict[str, Any], committed: dict[str, Any] | None) -> dict[str, float]:
    """By name, the ratio of each count that left the committed one by more than 2 %."""
    before = committed["instructions_per_call"] if committed else {}
    ratios = {name: count / before[name] for name, count in report["instructions_per_call"].items() if name in before}
    return {name: ratio for name, ratio in ratios.items() if abs(ratio - 1.0) > MOVED_SHARE}


def table(report: dict[str, Any], committed: dict[str, Any] | None) -> str:
    """The counts, what they were, and which moved."""
    before = committed["instructions_per_call"] if committed else {}
    far = moved(report, committed)
    width = max(map(len, report["instructions_per_call"]))
    lines = [f"{'instructions per call':{width}}  {'now':>11}  {'committed':>11}"]
    for name, count in report["instructions_per_call"].items():
        verdict = f"moved: {far[name]:.3f} times" if name in far else ("same" if name in before else "new")
        shown = f"{before[name]:,}" if name in before else "-"
        lines.append(f"{name:{width}}  {count:>11,}  {shown:>11}  {verdict}")
    if committed and committed["versions"] != report["versions"]:
        was, now = ({**found["versions"]} for found in (committed, report))
        changes = [f"{name} {was.get(name)} -> {now[name]}" for name in now if was.get(name) != now[name]]
        lines.append(f"counts depend on versions, and these differ: {'; '.join(changes)}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
