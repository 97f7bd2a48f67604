"""A soak test from start to result: load, random faults, and the daemon's resources over time.

Faults that end the process come first, each once; up to a quarter of the time any may follow. Then one daemon lives to
the end under the faults that it must survive, and its resources are sampled.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import sqlite3
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.soak.faults import FUZZ_DRAWS, HUNG, Faults, Kinds
from benchmarks.soak.growth import LARGEST_MIB_PER_MINUTE, MIN_JUDGED_S, Held, growth
from benchmarks.soak.subject import Subject
from benchmarks.soak.traffic import Traffic
from edged.client.client import DaemonError
from edged.settings.load import AlignSettings

_HARD_SHARE = 0.25
_SAMPLE_EVERY_S = 2.0
_FAULT_EVERY_S = 8.0
_SOCKETS = 8
"""Expected sockets: the listening ones, the event loop's own, and a connection that is being served or closed."""


@dataclass(slots=True)
class Soak:
    """The course of one soak test."""

    minutes: float
    load: float
    seed: int
    fuzz_examples: int
    """Examples that schemathesis tries of every operation, over all its runs."""
    faults: Counter[str] = field(default_factory=Counter)
    samples: list[Held] = field(default_factory=list)

    async def run(self) -> dict[str, Any]:
        """Run the test; return the result as it is written to a file; `problems` is empty if it passed."""
        subject = Subject(Path(tempfile.mkdtemp(prefix="edged-soak-")))
        try:
            await asyncio.to_thread(subject.wait_until_ready)
            traffic = Traffic(subject.socket, self.seed)
            rate = self.load * await traffic.capacity()
            print(f"{rate:.1f} requests a second are {self.load:.0%} of what it can answer", flush=True)
            running = asyncio.create_task(traffic.run(rate))
            await self._under_faults(subject, traffic)
            traffic.stop()
            await running
            if (code := subject.process.poll()) is not None:
                traffic.tally.wrong.append(f"it ended by itself with exit code {code}: {subject.log[-3000:]}")
                await asyncio.to_thread(subject.restart)
            return await asyncio.to_thread(self._judge, subject, traffic, rate)
        finally:
            subject.remove()

    async def _under_faults(self, subject: Subject, traffic: Traffic) -> None:
        chance = random.Random(self.seed)
        faults = Faults(subject, traffic, chance, -(-self.fuzz_examples // FUZZ_DRAWS))
        begun = time.monotonic()
        hard_until, end = begun + self.minutes * 60 * _HARD_SHARE, begun + self.minutes * 60
        kinds = {**faults.hard, **faults.soft}
        for number, name in enumerate(first_each_then_any(faults.hard, kinds, chance)):
            if number >= len(faults.hard) and time.monotonic() >= hard_until:
                break
            await self._have(name, kinds, traffic, chance, end)
        watching = asyncio.create_task(self._watch(subject))
        for name in in_rounds(faults.soft, chance):
            if time.monotonic() >= end:
                break
            await self._have(name, faults.soft, traffic, chance, end)
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError, psutil.Error):
            await watching

    async def _have(self, name: str, kinds: Kinds, traffic: Traffic, chance: random.Random, end: float) -> None:
        """Cause one fault, and let some time pass."""
        self.faults[name] += 1
        left, now = (end - time.monotonic()) / 60, f"{sum(traffic.tally.statuses.values())} requests"
        print(f"{left:5.1f} min left  {now}  {len(traffic.tally.wrong)} wrong  {name}", flush=True)
        try:
            await kinds[name]()
        except (OSError, RuntimeError, DaemonError, psutil.Error) as error:
            traffic.tally.wrong.append(f"{name}: {error!r}")
        await asyncio.sleep(min(chance.expovariate(1 / _FAULT_EVERY_S), max(0.0, end - time.monotonic())))

    async def _watch(self, subject: Subject) -> None:
        while True:
            self.samples.append(await asyncio.to_thread(subject.held))
            await asyncio.sleep(_SAMPLE_EVERY_S)

    def _judge(self, subject: Subject, traffic: Traffic, rate: float) -> dict[str, Any]:
        problems, queue = list(traffic.tally.wrong), subject.status()["queue"]
        pages = _pages_when_idle(subject)
        if held_by_nobody(pages):
            problems.append(f"pages are held by nobody: {pages}")
        held = growth(self.samples)
        problems += held.problems()
        sockets = subject.held().sockets
        if sockets > _SOCKETS:
            problems.append(f"{sockets} sockets are open when nobody asks")
        hung = subject.log.count("has shown no sign of life") - self.faults[HUNG]
        if hung > 0:
            problems.append(f"the engine hung {hung} times by itself")
        code = subject.stop()
        if code:
            problems.append(f"SIGTERM: exit code {code}")
        missing, found = _stored(subject.data / "edged.db", traffic.tally.acknowledged)
        problems += found
        return {
            "minutes": self.minutes,
            "load": self.load,
            "seed": self.seed,
            "requests_per_s": rate,
            "small_disk": subject.small_disk,
            "faults": dict(sorted(self.faults.items())),
            "statuses": dict(sorted(traffic.tally.statuses.items())),
            "acknowledged": len(traffic.tally.acknowledged),
            "missing": missing,
            "fuzz_examples_per_draw": -(-self.fuzz_examples // FUZZ_DRAWS),
            "queue_at_the_end": queue,
            "growth": asdict(held),
            "held_every_10_s": held_over_time(self.samples[::5]),
            "data_mib": round(subject.data_bytes / 2**20, 1),
            "pages": pages,
            "sockets_when_idle": sockets,
            "problems": problems,
            "log_errors": sorted({line[24:200] for line in subject.log.splitlines() if " ERROR " in line})[:40],
        }


def first_each_then_any(first: Collection[str], names: Collection[str], chance: random.Random) -> Iterator[str]:
    """Yield each of `first` once, in a random order; then any of `names`, without end."""
    yield from chance.sample(sorted(first), len(first))
    while True:
        yield chance.choice(sorted(names))


def in_rounds(names: Collection[str], chance: random.Random) -> Iterator[str]:
    """Yield names without end, in a random order: each once before any comes twice."""
    while True:
        yield from chance.sample(sorted(names), len(names))


def held_by_nobody(pages: dict[str, int]) -> int:
    """Return the leaked pages: neither free, cached nor retired, while no request or step is open."""
    return pages["total"] - pages["free"] - pages["cached"] - pages["retired"]


def _pages_when_idle(subject: Subject, within_s: float = 600.0) -> dict[str, int]:
    """Return the page counts once no request and no learning is pending."""
    end = time.monotonic() + within_s
    while True:
        status = subject.status()
        queue, pages = status["queue"], status["pages"]
        idle = not any(queue.values()) and not held_by_nobody(pages)
        if idle or time.monotonic() > end:
            return {name: pages[name] for name in ("total", "free", "cached", "retired")}
        time.sleep(0.5)


def held_over_time(samples: Sequence[Held]) -> dict[str, list[Any]]:
    """Return samples as they are written to a file; None if the daemon did not answer."""
    return {
        "at_s": [round(sample.at_s - samples[0].at_s, 1) for sample in samples],
        "rss_mib": [round(sample.rss_bytes / 2**20, 1) for sample in samples],
        "heap_mib": [item.said and round(item.said.heap_bytes / 2**20, 1) for item in samples],
        "python_blocks": [item.said and item.said.python_blocks for item in samples],
        "iterations": [item.said and item.said.iterations for item in samples],
    }


def _stored(database: Path, acknowledged: set[int]) -> tuple[int, list[str]]:
    """Return (number of acknowledged pairs that are missing, problems of the database)."""
    with sqlite3.connect(database) as db:
        (integrity,) = db.execute("PRAGMA integrity_check").fetchone()
        pairs = db.execute("SELECT chosen, state, note FROM pairs WHERE chosen LIKE 'good %'").fetchall()
        most = AlignSettings().epochs
        again = db.execute("SELECT count(*) FROM pairs WHERE epochs_done > ?", [most]).fetchone()[0]
    missing = {f"good {number}" for number in acknowledged} - {chosen for chosen, _, _ in pairs}
    problems = [f"integrity_check: {integrity}"] if integrity != "ok" else []
    problems += [f"{len(missing)} acknowledged pairs are missing"] if missing else []
    problems += [f"{again} pairs were trained more than {most} times"] if again else []
    # Pairs that schemathesis drops from quarantine count as an admin's decision.
    skipped = [note for _, state, note in pairs if state == "skipped" and note != "dropped from quarantine"]
    reasons = "; ".join(sorted(set(skipped)))
    return len(missing), problems + ([f"{len(skipped)} pairs were skipped: {reasons}"] if skipped else [])


def table(result: dict[str, Any]) -> str:
    """Return the result as Markdown."""
    grown, missing = result["growth"], result["missing"]
    rows = [
        ("minutes", f"{result['minutes']:g} at {result['load']:.0%} load, {result['requests_per_s']:.1f} requests/s"),
        ("faults", ", ".join(f"{name}: {count}" for name, count in result["faults"].items())),
        ("answers", ", ".join(f"{name}: {count}" for name, count in result["statuses"].items())),
        ("acknowledged pairs", f"{result['acknowledged']}, {f'{missing} missing' if missing else 'all there'}"),
        (
            "resident memory",
            f"{grown['slope']:+.2f} MiB a minute over {grown['seconds']:.0f} s (Theil-Sen), "
            f"{grown['steady']:+.2f} from one sixth of it to the next; "
            + (
                f"bound of both: {LARGEST_MIB_PER_MINUTE:g}"
                if grown["seconds"] >= MIN_JUDGED_S
                else "too short to judge"
            ),
        ),
        ("in use", f"heap {grown['heap']:+.2f} MiB a minute, Python {grown['python_blocks']:+,.0f} blocks a minute"),
        ("open files, threads", f"{grown['files']:+g}, {grown['threads']:+g}"),
        ("pages held by nobody", str(held_by_nobody(result["pages"]))),
        ("problems", str(len(result["problems"]))),
    ]
    return "\n".join(["| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in rows)])
