"""Comparison of policies: one replay (or simulation) for each policy, retrain rate, request rate and seed."""

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

MANIFEST = "manifest.json"
CAPACITY_POLICY = "fcfs"
"""Policy that serves without training: its throughput in a burst is the machine's capacity."""
_OWN = "edged: "
"""Prefix of edged's own error lines."""
_SLOWEST, _START_S = 10.0, 600.0
"""Time limit of a run: this many times its window, and this many seconds to load and warm up."""

Progress = Callable[[str], None]


class CompareError(RuntimeError):
    """The comparison cannot start or continue; the message says why."""


class RunFailed(RuntimeError):
    """A run ended without a report; the message is the last line that it printed."""


@dataclass(frozen=True, slots=True)
class ComparedLoad:
    """The settings that all runs of a comparison share; `device` names a simulated device, None measures this
    machine."""

    trace: str
    model: str
    seconds: float
    pairs: str | None = None
    """File of preference pairs, for measured runs only: simulated pairs have lengths alone."""
    pair_format: str = "hh"
    config: str | None = None
    device: str | None = None
    arrivals: str | None = None

    program: ClassVar[tuple[str, ...]] = ("edged", "bench")
    """The words before "replay" or "simulate" on the command line: `edged`'s, or `python -m` and a module."""

    def command(self, policy: str, retrain_rate: float, rate_per_s: float | None, seed: int) -> list[str]:
        """Return the command of one run; without a rate the run measures the machine's capacity first."""
        learned = {} if self.device else {"--pairs": self.pairs, "--format": self.pair_format}
        options = {
            "--device": self.device,
            "--trace": self.trace,
            "--arrivals": self.arrivals,
            **learned,
            "--model": self.model,
            "--config": self.config,
            "--policy": policy,
            "--rate": rate_per_s,
            "--retrain-rate": retrain_rate,
            "--seconds": self.seconds,
            "--seed": seed,
        }
        given = [text for name, value in options.items() if value is not None for text in (name, f"{value}")]
        return [*self.program, "simulate" if self.device else "replay", *given, "--json"]


@dataclass(frozen=True, slots=True)
class Run:
    """One point of the comparison; `load` is the rate as a share of the capacity where it was given so."""

    policy: str
    retrain_rate: float
    rate_per_s: float
    load: float | None
    seed: int

    @property
    def file(self) -> str:
        """Name of the report's file in the comparison's folder."""
        rate = f"rate{self.rate_per_s:g}" if self.load is None else f"load{self.load:g}"
        return f"{self.policy}_retrain{self.retrain_rate:g}_{rate}_seed{self.seed}.json"


@dataclass(frozen=True, slots=True)
class Axes:
    """The axes of a comparison. Rates are requests per second, loads shares of the machine's capacity; both may be
    given."""

    policies: tuple[str, ...]
    retrain_rates: tuple[float, ...]
    seeds: tuple[int, ...]
    rates_per_s: tuple[float, ...] = ()
    loads: tuple[float, ...] = ()

    def runs(self, capacity_per_s: float | None) -> Iterator[Run]:
        """Yield all runs in order: policies take turns within a point, and the first one changes from point to point.

        A machine's slow phases (heat, a neighbour) last longer than a run; the rotation makes them meet every policy
        alike.
        """
        rates: list[tuple[float, float | None]] = [(rate, None) for rate in self.rates_per_s]
        rates += [(load * (capacity_per_s or 0.0), load) for load in self.loads]
        first = 0
        for seed in self.seeds:
            for rate, load in rates:
                for retrain_rate in self.retrain_rates:
                    for policy in self.policies[first:] + self.policies[:first]:
                        yield Run(policy, retrain_rate, rate, load, seed)
                    first = (first + 1) % len(self.policies)


def compare(
    workload: ComparedLoad, axes: Axes, folder: Path, progress: Progress = lambda _line: None, jobs: int = 1
) -> dict[str, Any]:
    """Do the runs that are missing in the folder, `jobs` at once; return its manifest.

    A run that fails is recorded with its error and does not end the others; the next call tries it again. Raises
    CompareError when the folder holds runs of another workload, or the capacity cannot be measured.
    """
    folder.mkdir(parents=True, exist_ok=True)
    manifest = _manifest(workload, folder)
    if axes.loads and manifest["capacity_per_s"] is None:
        manifest["capacity_per_s"] = _capacity(workload, progress)
    runs = list(axes.runs(manifest["capacity_per_s"]))
    known = {row["file"]: row for row in manifest["runs"] if "file" in row}
    manifest["runs"] = list((known | {run.file: {**asdict(run), "file": run.file} for run in runs}).values())
    _write(folder / MANIFEST, manifest)
    # An error is not a report: that run is done again.
    missing = [run for run in runs if not ((path := folder / run.file).is_file() and "report" in read_object(path))]
    ended: list[Run] = []
    started_s = time.monotonic()

    def remaining() -> str:
        left = len(missing) - len(ended)
        each_s = (time.monotonic() - started_s) / len(ended) if ended else workload.seconds / jobs
        return f"{len(runs) - left} of {len(runs)} runs, about {max(1, round(left * each_s / 60))} min left"

    def do(run: Run) -> None:
        command = workload.command(run.policy, run.retrain_rate, run.rate_per_s, run.seed)
        record: dict[str, Any] = {"run": asdict(run), "command": command}
        name, began_s = run.file.removesuffix(".json"), time.monotonic()
        try:
            record["report"] = call(command, workload.seconds, lambda line: progress(f"{remaining()}; {name}: {line}"))
        except RunFailed as error:
            record["error"] = str(error)
            progress(f"{name} failed: {error}")
        record["wall_s"] = time.monotonic() - began_s
        _write(folder / run.file, record)
        ended.append(run)

    # A measured run has the machine to itself; simulated runs share its cores.
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(do, missing))
    return manifest


def call(command: list[str], seconds: float, progress: Progress) -> dict[str, Any]:
    """Run a workload's command in a process of its own; return the JSON that it prints. Raises RunFailed."""
    python = [sys.executable, "-P", "-m", "edged.cli"] if command[0] == "edged" else [sys.executable]
    limit_s = _SLOWEST * seconds + _START_S
    with tempfile.TemporaryFile("w+", encoding="utf-8") as output:
        child = subprocess.Popen([*python, *command[1:]], stdout=output, stderr=subprocess.PIPE, encoding="utf-8")
        timer = threading.Timer(limit_s, child.kill)
        timer.start()
        last, said = "", ""
        try:
            assert child.stderr is not None
            for line in child.stderr:
                if line.strip():
                    last = line.strip()
                    # Libraries may print warnings when the process ends.
                    said = last if last.startswith(_OWN) else said
                    progress(last)
            code = child.wait()
        finally:
            late = not timer.is_alive()
            timer.cancel()
            child.kill()
            child.wait()
        if late:
            raise RunFailed(f"no report within {limit_s:.0f} s")
        if code:
            raise RunFailed(said.removeprefix(_OWN) or f"ended with exit code {code}: {last}")
        output.seek(0)
        try:
            report: dict[str, Any] = json.load(output)
        except ValueError as error:
            raise RunFailed(f"printed no JSON: {error}") from None
        return report


def _capacity(workload: ComparedLoad, progress: Progress) -> float:
    """Return the requests per second that a burst reaches. Raises CompareError."""
    short = replace(workload, seconds=1.0, arrivals=None)
    try:
        command = short.command(CAPACITY_POLICY, 0.0, None, 0)
        report = call(command, short.seconds, lambda line: progress(f"capacity: {line}"))
    except RunFailed as error:
        raise CompareError(f"the capacity, which --load is a share of, could not be measured: {error}") from None
    return float(report["load"]["capacity_per_s"])


def _manifest(workload: ComparedLoad, folder: Path) -> dict[str, Any]:
    """Return the folder's manifest, or a new one. Raises CompareError when it belongs to another workload."""
    config = Path(workload.config).read_text("utf-8") if workload.config else ""
    wanted = {**asdict(workload), "config_text": config}
    path = folder / MANIFEST
    present: dict[str, dict[str, Any]] = {
        "versions": {name: version(name) for name in ("edged", "torch")},
        "sizes": {name: _size(file) for name, file in (("trace", workload.trace), ("pairs", workload.pairs))},
    }
    if not path.is_file():
        created_at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        new: dict[str, Any] = {"cores": os.cpu_count(), "capacity_per_s": None, "runs": []}
        return {"created_at": created_at, "workload": wanted, **present, **new}
    manifest = read_manifest(folder)
    before = manifest["workload"]
    for name in before | wanted:
        # Fields that only some workloads have are falsy in the others.
        _refuse_other(folder, name.replace("_", " "), before.get(name) or None, wanted.get(name) or None)
    for part, named in present.items():
        known = manifest.get(part)
        if not isinstance(known, dict):
            raise CompareError(f'"{path}" tells no {part}, as an older edged wrote it: give another folder')
        for name, value in named.items():
            what = f"{name} version" if part == "versions" else f"a {name} file of bytes"
            # A file that was missing before has no run that used it.
            if known.get(name) is not None:
                _refuse_other(folder, what, known[name], value)
    return {**manifest, **present}


def _refuse_other(folder: Path, what: str, before: Any, now: Any) -> None:
    if before != now:
        way_out = "runs of different workloads cannot be compared; give another folder"
        raise CompareError(f'"{folder}" has runs with {what} {before!r}, not {now!r}: {way_out}')


def _size(file: str | None) -> int | None:
    """Return a file's size in bytes; None if there is no such file, as for a trace that is drawn at random."""
    return Path(file).stat().st_size if file and Path(file).is_file() else None


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read a folder's manifest. Raises CompareError when there is none, or its fields are missing."""
    path = folder / MANIFEST
    if not path.is_file():
        raise CompareError(f'"{folder}" has no {MANIFEST}: give a folder that edged bench compare wrote')
    manifest = read_object(path)
    for name, kind in (("workload", dict), ("runs", list)):
        if not isinstance(manifest.get(name), kind):
            raise CompareError(f'"{path}" has no "{name}": give a folder that edged bench compare wrote')
    return {"capacity_per_s": None, **manifest}


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON file's object. Raises CompareError."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise CompareError(f'"{path}" cannot be read: {error}') from None
    if not isinstance(value, dict):
        raise CompareError(f'"{path}" holds no JSON object: give what a benchmark wrote')
    return value


def _write(path: Path, value: dict[str, Any]) -> None:
    """Write atomically, so that an interrupted comparison leaves no half report."""
    partial = path.with_suffix(".part")
    partial.write_text(json.dumps(value, indent=1) + "\n", "utf-8")
    partial.replace(path)
