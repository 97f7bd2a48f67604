"""The faults of a soak, and the order in which they are drawn.

Owns what each does to the daemon or its surroundings, and what is announced to fail meanwhile. Must not know how
answers are judged.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

from edged.bench.soak.subject import Subject
from edged.bench.soak.traffic import Traffic

_DISK_FULL_S = 4.0
_CONNECTIONS = 400
_SETTLE_S = 2.0


class Faults:
    """`hard` ones end the process, `soft` ones leave it running: what it holds is compared over those alone."""

    def __init__(self, subject: Subject, traffic: Traffic, chance: random.Random) -> None:
        self._subject, self._traffic, self._chance = subject, traffic, chance
        self.hard: dict[str, Callable[[], Awaitable[None]]] = {
            "kill -9": self._kill,
            "kill -9, newest adapter file cut": self._cut,
            "kill -9, newest adapter file flipped": self._flip,
        }
        self.soft: dict[str, Callable[[], Awaitable[None]]] = {
            "out of memory: prefill": lambda: self._memory("prefill"),
            "out of memory: decode": lambda: self._memory("decode"),
            "out of memory: fine-tune": lambda: self._memory("finetune"),
            "activations not finite": traffic.not_a_number,
            "the policy fails": self._policy,
            "the clock jumps back an hour": self._clock,
            "a second daemon": self._second,
            f"{_CONNECTIONS} connections": self._crowd,
            "a client that reads a byte a second": self._slow,
            "clients that vanish": self._vanish,
            "schemathesis": self._fuzz,
        }
        if subject.small_disk:
            self.soft["a full disk"] = self._full_disk

    async def _kill(self, harm: Callable[[Path], object] | None = None) -> None:
        self._traffic.expected.add("down")
        await asyncio.to_thread(self._subject.process.kill)
        await asyncio.to_thread(self._subject.process.wait)
        if harm is not None:
            for user in sorted(self._subject.data.glob("adapters/*/*")):
                if versions := sorted(user.glob("v*")):
                    harm(versions[-1] / "adapter_model.safetensors")
        self._traffic.forget_versions()
        await asyncio.to_thread(self._subject.kill_and_restart)
        await asyncio.sleep(_SETTLE_S)
        self._traffic.expected.discard("down")

    async def _cut(self) -> None:
        await self._kill(lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]))

    async def _flip(self) -> None:
        def flip(file: Path) -> None:
            data = bytearray(file.read_bytes())
            data[self._chance.randrange(len(data))] ^= 1 << self._chance.randrange(8)
            file.write_bytes(bytes(data))

        await self._kill(flip)

    async def _memory(self, where: str) -> None:
        self._subject.order(fault="memory", where=where, times=self._chance.randint(1, 3))

    async def _policy(self) -> None:
        self._subject.order(fault="policy")
        await asyncio.sleep(3.0)
        problems = (await asyncio.to_thread(self._subject.status))["degraded"]
        if not any("policy" in problem for problem in problems):
            self._traffic.tally.wrong.append(f"a policy failed and the status says {problems}")
        self._subject.order(fault="restore")

    async def _clock(self) -> None:
        self._subject.order(fault="clock", seconds=3600)

    async def _second(self) -> None:
        code = await asyncio.to_thread(self._subject.second_daemon)
        if code != 1:
            self._traffic.tally.wrong.append(f"a second daemon ended with {code}")

    async def _full_disk(self) -> None:
        self._traffic.expected.add("disk")
        filler = self._subject.data / "filler"
        await asyncio.to_thread(fill, filler)
        await asyncio.sleep(_DISK_FULL_S)
        filler.unlink()
        await asyncio.sleep(_SETTLE_S)
        self._traffic.expected.discard("disk")

    def _connect(self) -> socket.socket:
        raw = socket.socket(socket.AF_UNIX)
        raw.settimeout(30)
        raw.connect(str(self._subject.socket))
        return raw

    async def _crowd(self) -> None:
        crowd = await asyncio.to_thread(lambda: [self._connect() for _ in range(_CONNECTIONS)])
        await asyncio.sleep(3.0)
        for raw in crowd:
            raw.close()

    async def _slow(self) -> None:
        with self._connect() as raw:
            raw.sendall(_stream(tokens=200))
            for _ in range(8):
                await asyncio.to_thread(raw.recv, 1)
                await asyncio.sleep(1.0)

    async def _vanish(self) -> None:
        request = _stream(tokens=200)
        for _ in range(10):
            with self._connect() as raw:
                raw.sendall(request[: self._chance.randrange(len(request) + 1)])
                await asyncio.sleep(0.1)

    async def _fuzz(self) -> None:
        checks = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
        # The store refuses feedback, and says so with 503, while a disk is full: never beside that fault.
        url = f"http://127.0.0.1:{self._subject.tcp_port}/openapi.json"
        options = ["--checks", checks, "--max-examples", "10", "--phases", "examples,fuzzing", "--no-color"]
        options += ["--seed", str(self._chance.randrange(1 << 30)), "--exclude-path-regex", "/v1/reload"]
        command = [str(Path(sys.executable).parent / "schemathesis"), "run", url, *options]
        ended = await asyncio.to_thread(
            subprocess.run, command, cwd=self._subject.folder, capture_output=True, text=True, timeout=300
        )
        if ended.returncode:
            self._traffic.tally.wrong.append(f"schemathesis: {ended.stdout[-3000:]}")


def _stream(tokens: int) -> bytes:
    body = json.dumps({"prompt": "How do I cook rice?", "max_tokens": tokens, "ignore_eos": True, "stream": True})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: edged\r\nContent-Length: {len(body)}\r\n\r\n"
    return (head + body).encode()


def fill(filler: Path) -> None:
    """Take all the room of the disk that this file is on."""
    with filler.open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue
