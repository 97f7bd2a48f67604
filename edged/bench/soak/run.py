"""A soak from its start to its result: load, faults by chance, and what the daemon holds over time.

Owns the order of events and the judgement. Must not know how a fault is made.

The first quarter of the time draws from all faults, also those that kill. Then one daemon lives to the end under those
that it must live through, and what it holds after a warm-up is fitted by a line.
"""

from __future__ import annotations

import asyncio
import random
import sqlite3
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from edged.bench.soak.faults import Faults
from edged.bench.soak.subject import Held, Subject
from edged.bench.soak.traffic import Traffic

_HARD_SHARE = 0.25
_WARM_SHARE = 0.3
"""Of the last daemon's life: heaps, caches and pools fill."""
_SAMPLE_EVERY_S = 1.0
_FAULT_EVERY_S = 8.0
_LARGEST_SLOPE = 2.0
"""MiB a minute that resident memory may grow, as heaps go."""
_SPARE = 8
"""Files or threads that may be open by chance."""


@dataclass(slots=True)
class Soak:
    """The course of one soak."""

    minutes: float
    load: float
    seed: int
    faults: Counter[str] = field(default_factory=Counter)
    samples: list[Held] = field(default_factory=list)

    async def run(self) -> dict[str, Any]:
        """The result, as it goes into a file; `problems` is empty when all promises held."""
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
            return await asyncio.to_thread(self._judge, subject, traffic, rate)
        finally:
            subject.remove()

    async def _under_faults(self, subject: Subject, traffic: Traffic) -> None:
        chance = random.Random(self.seed)
        faults = Faults(subject, traffic, chance)
        begun = time.monotonic()
        hard_until = begun + self.minutes * 60 * _HARD_SHARE
        end = begun + self.minutes * 60
        watching: asyncio.Task[None] | None = None
        # Each once, in a random order, before any comes twice.
        rounds: list[str] = []
        while time.monotonic() < end:
            hard = time.monotonic() < hard_until
            if not hard and watching is None:
                watching, rounds = asyncio.create_task(self._watch(subject)), []
            kinds = {**faults.hard, **faults.soft} if hard else faults.soft
            rounds = rounds or chance.sample(sorted(kinds), len(kinds))
            name = rounds.pop()
            self.faults[name] += 1
            left = (end - time.monotonic()) / 60
            print(f"{left:5.1f} min left  {name}  {sum(traffic.tally.statuses.values())} requests", flush=True)
            await kinds[name]()
            await asyncio.sleep(min(chance.expovariate(1 / _FAULT_EVERY_S), max(0.0, end - time.monotonic())))
        if watching is not None:
            watching.cancel()

    async def _watch(self, subject: Subject) -> None:
        while True:
            self.samples.append(await asyncio.to_thread(subject.held))
            await asyncio.sleep(_SAMPLE_EVERY_S)

    def _judge(self, subject: Subject, traffic: Traffic, rate: float) -> dict[str, Any]:
        problems = list(traffic.tally.wrong)
        pages = _pages_when_idle(subject)
        if held_by_nobody(pages):
            problems.append(f"pages are held by nobody: {pages}")
        growth = self._growth()
        if growth["rss_mib_per_minute"] > _LARGEST_SLOPE:
            problems.append(f"resident memory grows by {growth['rss_mib_per_minute']:.2f} MiB a minute")
        problems += [f"{what} grow by {growth[what]}" for what in ("files", "threads") if growth[what] > _SPARE]
        sockets = subject.held().sockets
        if sockets > _SPARE:
            problems.append(f"{sockets} sockets are open when nobody asks")
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
            "growth": growth,
            "rss_mib_every_30_s": [round(sample.rss_bytes / 2**20, 1) for sample in self.samples[::30]],
            "pages": pages,
            "sockets_when_idle": sockets,
            "problems": problems,
            "log_errors": sorted({line[24:200] for line in subject.log.splitlines() if " ERROR " in line})[:40],
        }

    def _growth(self) -> dict[str, float]:
        """What one daemon held more at the end than after its warm-up; medians of a fifth of the samples each."""
        kept = self.samples[int(_WARM_SHARE * len(self.samples)) :]
        if len(kept) < 10:
            return {"rss_mib_per_minute": 0.0, "files": 0, "threads": 0, "seconds": 0.0}
        at = np.array([sample.at_s for sample in kept])
        slope = np.polyfit(at - at[0], [sample.rss_bytes / 2**20 for sample in kept], 1)[0]
        part = max(1, len(kept) // 5)

        def more(name: str) -> float:
            values = [getattr(sample, name) for sample in kept]
            return float(np.median(values[-part:]) - np.median(values[:part]))

        return {
            "rss_mib_per_minute": float(slope * 60),
            "rss_mib": kept[-1].rss_bytes / 2**20,
            "files": more("files"),
            "threads": more("threads"),
            "seconds": float(at[-1] - at[0]),
        }


def held_by_nobody(pages: dict[str, int]) -> int:
    """Pages that no cache, no list of free ones and not the box has, when nothing is answered or learned."""
    return pages["total"] - pages["free"] - pages["cached"] - pages["retired"]


def _pages_when_idle(subject: Subject, within_s: float = 60.0) -> dict[str, int]:
    """The page counts once nothing is answered or learned."""
    end = time.monotonic() + within_s
    while True:
        status = subject.status()
        queue, pages = status["queue"], status["pages"]
        idle = not any(queue.values()) and not held_by_nobody(pages)
        if idle or time.monotonic() > end:
            return {name: pages[name] for name in ("total", "free", "cached", "retired")}
        time.sleep(0.5)


def _stored(database: Path, acknowledged: set[int]) -> tuple[int, list[str]]:
    """(acknowledged pairs that are missing, what is wrong with the database)."""
    with sqlite3.connect(database) as db:
        (integrity,) = db.execute("PRAGMA integrity_check").fetchone()
        pairs = db.execute("SELECT chosen, state, epochs_done FROM pairs WHERE chosen LIKE 'good %'").fetchall()
        twice = db.execute("SELECT count(*) FROM pairs WHERE epochs_done > 1").fetchone()[0]
    missing = {f"good {number}" for number in acknowledged} - {chosen for chosen, _, _ in pairs}
    problems = [f"integrity_check: {integrity}"] if integrity != "ok" else []
    problems += [f"{len(missing)} acknowledged pairs are missing"] if missing else []
    problems += [f"{twice} pairs were trained twice"] if twice else []
    skipped = [state for _, state, _ in pairs if state == "skipped"]
    return len(missing), problems + ([f"{len(skipped)} pairs were skipped"] if skipped else [])


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    growth, missing = result["growth"], result["missing"]
    rows = [
        ("minutes", f"{result['minutes']:g} at {result['load']:.0%} load, {result['requests_per_s']:.1f} requests/s"),
        ("faults", ", ".join(f"{name}: {count}" for name, count in result["faults"].items())),
        ("answers", ", ".join(f"{name}: {count}" for name, count in result["statuses"].items())),
        ("acknowledged pairs", f"{result['acknowledged']}, {f'{missing} missing' if missing else 'all there'}"),
        ("resident memory", f"{growth['rss_mib_per_minute']:+.2f} MiB a minute over {growth['seconds']:.0f} s"),
        ("open files, threads", f"{growth['files']:+g}, {growth['threads']:+g}"),
        ("pages held by nobody", str(held_by_nobody(result["pages"]))),
        ("problems", str(len(result["problems"]))),
    ]
    return "\n".join(["| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in rows)])
