"""The daemon's cost while it is idle, and its time to answer a trivial request while many ask.

    python -m benchmarks.daemon [--starts 5] [--idle 30] [--clients 16] [--json]

Every start is a daemon of its own with the demo model and an empty data folder; it answers one chat, rests for a
moment, and is then watched for `--idle` seconds. The share is of one core. At last, `--clients` stream answers without
pause from another process while `/healthz` is asked every 20 ms: its latency is the event loop's lag and a round trip.
"""

from __future__ import annotations

import multiprocessing
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.support.command import finish, option, parse
from benchmarks.support.interleave import Spread
from edged.client.client import Address, Client
from examples.quickstart.daemon import TemporaryDaemon

SETTLE_S = 3.0
QUESTION = {"messages": [{"role": "user", "content": "How do I cook rice?"}], "max_tokens": 32}


def main() -> None:
    """Run the benchmark."""
    options = parse(
        __doc__,
        option("--starts", "daemons to start, one after the other", 5),
        option("--idle", "seconds that each is watched", 30.0),
        option("--clients", "streams at once under load", 16),
    )
    found = [watch(options.idle) for _ in range(options.starts)]
    columns = {key: Spread.of([reading[key] for reading in found]) for key in found[0]}
    loaded = lag(options.clients, options.idle)
    lines = [f"median (quartiles) of {options.starts} starts"]
    lines += [f"{key}: {spread.text()}" for key, spread in columns.items()]
    under = ", ".join(f"{name} {ms:.1f} ms" for name, ms in loaded.items())
    lines.append(f"/healthz under {options.clients} streams: {under}")
    report: dict[str, Any] = {key: spread.as_json() for key, spread in columns.items()}
    finish(options, {**report, "under_load": loaded}, "\n".join(lines))


def watch(idle_s: float) -> dict[str, float]:
    """Watch one daemon from its start to its end."""
    daemon = TemporaryDaemon()
    try:
        ready_s = daemon.wait_until_ready()
        with daemon.client() as client:
            client.post("/v1/chat/completions", QUESTION)
        time.sleep(SETTLE_S)
        process = psutil.Process(daemon.process.pid)
        before = process.cpu_times()
        time.sleep(idle_s)
        after = process.cpu_times()
        used_s = after.user + after.system - before.user - before.system
        return {
            "ready_s": ready_s,
            "idle_cpu_percent": 100.0 * used_s / idle_s,
            "idle_memory_mb": process.memory_info().rss / 2**20,
        }
    finally:
        daemon.remove()


def lag(clients: int, seconds: float) -> dict[str, float]:
    """Return percentiles of `/healthz`'s latency, in ms, while `clients` stream."""
    daemon = TemporaryDaemon()
    load = None
    try:
        daemon.wait_until_ready()
        load = multiprocessing.get_context("spawn").Process(target=stream, args=(daemon.socket, clients), daemon=True)
        load.start()
        time.sleep(SETTLE_S)
        latencies = []
        with daemon.client() as client:
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                started = time.perf_counter()
                client.get("/healthz")
                latencies.append(1e3 * (time.perf_counter() - started))
                time.sleep(0.02)
        return {f"p{share}": float(np.percentile(latencies, share)) for share in (50, 95, 99)}
    finally:
        if load is not None:
            load.kill()
        daemon.remove()


def stream(socket: Path, clients: int) -> None:
    """Request long answers without end, `clients` at once."""

    def one() -> None:
        with Client(Address(sockets=(socket,)), 60.0) as client:
            while True:
                for _ in client.events("/v1/chat/completions", {**QUESTION, "max_tokens": 256, "stream": True}):
                    pass

    threads = [threading.Thread(target=one, daemon=True) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
