"""Count the instructions of a scheduling decision, of its completion and of the packing of a batch.

    python -m benchmarks.instructions [--save] [--output FILE]

Under valgrind's callgrind: unlike seconds, counts do not move with the load of the machine. They do move with the
versions of Python, numpy and torch, and with the kind of processor, so those are told with them. 64 live
tasks, the mixes of benchmarks/scheduler.py. `--save` writes docs/results/instructions.json, which later runs are
compared with.
"""

from __future__ import annotations

import copy
import json
import platform
import random
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.scheduler import Mix, all_mixes
from benchmarks.support.callgrind import Counter, missing_program
from benchmarks.support.checkout import ROOT
from benchmarks.support.command import finish, flag, parse
from edged.engine.attention.packed_batch import Segment, pack
from edged.engine.kv.store import KvStore
from edged.engine.lora.segments import NO_SLOT
from edged.scheduler.task import IterationResult

COMMITTED = ROOT / "docs" / "results" / "instructions.json"
MOVED_SHARE = 0.02
"""Relative difference beyond which a count has moved: two runs of the same code differ by far less."""
TASKS = 64
REPEATS = 20
"""Calls of a piece that one count covers; reports are per call."""
_WARM_ROUNDS = 20
_PAGE_SIZE, _CONTEXT_TOKENS = 16, 2048
_DECODES, _PROMPTS, _PROMPT_TOKENS, _SLOTS = 32, 3, 256, 4

Pieces = dict[str, Callable[[], None]]


def pieces() -> Pieces:
    """Return every piece by name; each may run once, and runs its call REPEATS times."""
    found: Pieces = {}
    for name, mix in all_mixes("mace", TASKS).items():
        found |= _decisions(name, mix)
    return found | _packing()


def _decisions(name: str, mix: Mix) -> Pieces:
    """Return the plans and completions of successive iterations, from copies of the states before them."""
    plans: list[Mix] = []
    completions: list[tuple[Mix, IterationResult]] = []
    for number in range(_WARM_ROUNDS + REPEATS):
        warm = number < _WARM_ROUNDS
        if not warm:
            plans.append(copy.deepcopy(mix))
        result = mix.run(mix.plan())
        if not warm:
            completions.append(copy.deepcopy((mix, result)))
        mix.complete(result)
        mix.refill()

    def plan() -> None:
        for state in plans:
            state.plan()

    def complete() -> None:
        for state, result in completions:
            state.complete(result)

    return {f"plan, {name}": plan, f"complete, {name}": complete}


def _packing() -> Pieces:
    """Return the packing of a decode batch, and of one with prompts, one in its second chunk, and several adapters."""
    torch.set_num_threads(1)
    chance = random.Random(0)
    pages_each = _CONTEXT_TOKENS // _PAGE_SIZE
    kv = KvStore(
        (_DECODES + _PROMPTS) * pages_each, _PAGE_SIZE, 1, 3, 8, dtype=torch.float32, device=torch.device("cpu")
    )

    def segment(index: int, context: int, tokens: int, slot: int) -> Segment:
        ids = [chance.randrange(1000) for _ in range(tokens)]
        pages = np.arange(index * pages_each, (index + 1) * pages_each)
        return Segment(ids, context, pages, slot, context, samples=True)

    decodes = [segment(index, chance.randint(50, 1500), 1, NO_SLOT) for index in range(_DECODES)]
    mixed = [segment(index, chance.randint(50, 1500), 1, index % _SLOTS) for index in range(_DECODES)]
    for number in range(_PROMPTS):
        mixed.append(segment(_DECODES + number, _PROMPT_TOKENS * (number % 2), _PROMPT_TOKENS, number % _SLOTS))

    def packed(segments: list[Segment]) -> Callable[[], None]:
        pack(segments, kv, kv.keys.device)  # warm-up: code that is imported lazily is loaded here

        def run() -> None:
            for _ in range(REPEATS):
                pack(segments, kv, kv.keys.device)

        return run

    return {f"pack, {_DECODES} decodes": packed(decodes), f"pack, {_DECODES} decodes and prompts": packed(mixed)}


# -- the command -------------------------------------------------------------------------------------------------------


def main() -> None:
    """Count, compare, print."""
    options = parse(__doc__, flag("--save", "write docs/results/instructions.json"))
    if missing := missing_program():
        sys.exit(f"instructions cannot be counted: {missing} is not installed (it comes with the package valgrind)")
    report = measure()
    committed = json.loads(COMMITTED.read_text()) if COMMITTED.is_file() else None
    if options.save:
        COMMITTED.write_text(json.dumps(report, indent=2) + "\n")
    finish(options, {**report, "moved": moved(report, committed)}, table(report, committed))


def measure() -> dict[str, Any]:
    """Return instructions per call, and the versions and processor that they depend on."""
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
    """Return, by name, the ratio of each count that differs from the committed one by more than 2 %."""
    before = committed["instructions_per_call"] if committed else {}
    ratios = {name: count / before[name] for name, count in report["instructions_per_call"].items() if name in before}
    return {name: ratio for name, ratio in ratios.items() if abs(ratio - 1.0) > MOVED_SHARE}


def table(report: dict[str, Any], committed: dict[str, Any] | None) -> str:
    """Return a table of the counts, the committed ones, and which moved."""
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
