#!/usr/bin/env python3
"""What the daemon costs while nobody asks: seconds until it is ready, and its CPU share and memory when idle.

    python tools/bench_daemon.py [--starts 5] [--idle 30] [--json]

Every start is a daemon of its own with the demo model and an empty data folder; it answers one chat, rests for a
moment, and is then watched for `--idle` seconds. The share is of one core.
"""

from __future__ import annotations

import argparse
import json
import time

import psutil

from edged.bench.turns import Spread
from edged.cli.quickstart.daemon import TemporaryDaemon

SETTLE_S = 3.0
QUESTION = {"messages": [{"role": "user", "content": "How do I cook rice?"}], "max_tokens": 32}


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=5, help="daemons to start, one after the other (default 5)")
    parser.add_argument("--idle", type=float, default=30.0, help="seconds that each is watched (default 30)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    found = [watch(options.idle) for _ in range(options.starts)]
    columns = {key: Spread.of([reading[key] for reading in found]) for key in found[0]}
    if options.json:
        print(json.dumps({key: {"median": s.median, "low": s.low, "high": s.high} for key, s in columns.items()}))
        return
    print(f"median (quartiles) of {options.starts} starts")
    for key, spread in columns.items():
        print(f"{key}: {spread.text()}")


def watch(idle_s: float) -> dict[str, float]:
    """One daemon from its start to its end."""
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


if __name__ == "__main__":
    main()
