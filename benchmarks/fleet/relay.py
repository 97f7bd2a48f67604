"""What the relay of an ingress adds: the same streams through it and from the daemon itself, in turns.

    python -m benchmarks.fleet.relay [--streams 1,8,32] [--rounds 5] [--json]

One daemon with the demo model and one ingress before it. A round asks `streams` answers at once, directly and through
the ingress, in turns. Printed: medians of the rounds' medians, and quartiles of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import aiohttp
import psutil

from benchmarks.support.machine_limits import report_header
from examples.fleet.__main__ import Ingress
from examples.quickstart.daemon import TemporaryDaemon, free_port

_TOKENS = 48


async def one(session: aiohttp.ClientSession, url: str, number: int) -> tuple[float, list[float], int]:
    """Read a stream; returns seconds to its first token, seconds between its chunks, and their number."""
    content = f"Question {number}: how do I cook rice?"
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": _TOKENS, "stream": True}
    began, times = time.perf_counter(), []
    async with session.post(f"{url}/v1/chat/completions", json={**body, "ignore_eos": True}) as response:
        async for line in response.content:
            if line.startswith(b"data: {") and b'"content"' in line:
                times.append(time.perf_counter())
    return times[0] - began, [after - before for before, after in pairwise(times)], len(times)


async def burst(session: aiohttp.ClientSession, url: str, streams: int, first: int) -> tuple[float, float, int]:
    """Read so many streams at once; returns medians of both times in ms, and the number of chunks."""
    read = await asyncio.gather(*(one(session, url, first + number) for number in range(streams)))
    between = [gap for _, gaps, _ in read for gap in gaps]
    return median(ttft for ttft, _, _ in read) * 1e3, median(between) * 1e3, sum(count for _, _, count in read)


async def measure(direct: str, through: str, ingress: psutil.Process, counts: list[int], rounds: int) -> dict[str, Any]:
    """Measure all numbers of streams."""
    found: dict[str, Any] = {}
    async with aiohttp.ClientSession() as session:
        await burst(session, direct, 8, 0)
        await burst(session, through, 8, 0)
        for streams in counts:
            rows, cpu_s, chunks = [], 0.0, 0
            for number in range(rounds):
                both = {}
                for name, url in sorted((("direct", direct), ("through", through)), reverse=bool(number % 2)):
                    before = sum(ingress.cpu_times()[:2])
                    *_, count = both[name] = await burst(session, url, streams, 1000 * number)
                    if name == "through":
                        cpu_s, chunks = cpu_s + sum(ingress.cpu_times()[:2]) - before, chunks + count
                rows.append(both)
            parts = {}
            for place, part in enumerate(("ttft", "tbt")):
                ratios = [row["through"][place] / row["direct"][place] for row in rows]
                parts[part] = {
                    **{
                        f"{name}_ms": round(median(row[name][place] for row in rows), 3)
                        for name in ("direct", "through")
                    },
                    "ratio": round(median(ratios), 3),
                    "quartiles": [round(value, 3) for value in quantiles(ratios, n=4)[::2]],
                }
            found[str(streams)] = {**parts, "ingress_ms_a_chunk": round(1e3 * cpu_s / chunks, 4)}
    return found


def main() -> None:
    """Run the measurement and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", default="1,8,32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="edged-relay-") as name:
        folder, port, own = Path(name), free_port(), free_port()
        (folder / "node").mkdir()
        daemon = TemporaryDaemon("--listen", f"127.0.0.1:{port}", folder=folder / "node")
        ingress = Ingress(folder, own, {"node": port}, {})
        try:
            daemon.wait_until_ready()
            ingress.wait_until_ready()
            while ingress.client().get("/v1/fleet")["nodes"][0]["state"] != "up":
                time.sleep(0.1)
            process = psutil.Process(ingress.process.pid)
            counts = [int(part) for part in options.streams.split(",")]
            urls = (f"http://127.0.0.1:{port}", f"http://127.0.0.1:{own}")
            found = asyncio.run(measure(*urls, process, counts, options.rounds))
            told = {**report_header(), "ingress_rss_mb": process.memory_info().rss >> 20, "streams": found}
        finally:
            ingress.stop()
            daemon.stop()
    if options.json:
        print(json.dumps(told, indent=1))
        return
    print(f"{told['device']}; the ingress has {told['ingress_rss_mb']} MB")
    for streams, row in found.items():
        for part in ("ttft", "tbt"):
            known = row[part]
            low, high = known["quartiles"]
            print(f"{streams:>3} streams, {part}: {known['direct_ms']} ms, through {known['through_ms']} ms,", end=" ")
            print(f"{known['ratio']} ({low} to {high})")
        print(f"{streams:>3} streams: {row['ingress_ms_a_chunk']} ms of the ingress' CPU a chunk")


if __name__ == "__main__":
    main()
