"""The faults of a soak test, by name."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import signal
import socket
import sqlite3
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path

from benchmarks.soak.manager import WATCHDOG_S
from benchmarks.soak.subject import Subject
from benchmarks.soak.traffic import Traffic
from edged.runtime.process import allow_files

_DISK_FULL_S = 4.0
_CONNECTIONS = 1000
_BETWEEN_CONNECTIONS_S = 0.005
_SETTLE_S = 2.0
_HUNG_S = 2 * WATCHDOG_S
_FUZZ_S = 900.0
_FUZZED_ANSWER_S = 60.0
"""Longest wait for an answer to a fuzzed request: one that ignores EOS is as long as the context allows."""
FUZZ_DRAWS = 6
"""Approximate number of schemathesis runs in half an hour."""
HUNG = "the engine hangs"
_CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
)

Kinds = dict[str, Callable[[], Awaitable[None]]]
"""Maps a fault's name to the coroutine function that causes it."""


class Faults:
    """The faults: `hard` ones end the process, `soft` ones leave it running; growth is measured over soft ones
    alone."""

    def __init__(self, subject: Subject, traffic: Traffic, chance: random.Random, fuzz_examples: int) -> None:
        """Prepare the faults; `fuzz_examples` are tried of every API operation in each schemathesis run."""
        self._subject, self._traffic, self._chance, self._fuzz_examples = subject, traffic, chance, fuzz_examples
        allow_files()
        self.hard: Kinds = {
            "kill -9": self._kill,
            "kill -9, newest adapter file cut": self._cut,
            "kill -9, newest adapter file flipped": self._flip,
            "kill -9, database pages damaged": self._damage,
            HUNG: self._hang,
        }
        self.soft: Kinds = {
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
            self.hard["kill -9, data folder read-only"] = self._read_only

    async def _kill(self, harm: Callable[[], None] = lambda: None) -> None:
        await self._end_and_restart(lambda: self._subject.kill(), harm)

    async def _end_and_restart(self, end: Callable[[], object], harm: Callable[[], None] = lambda: None) -> None:
        """End the process with `end`, change its files with `harm`, and start a new daemon."""
        self._traffic.expected.add("down")
        await asyncio.to_thread(end)
        try:
            await asyncio.to_thread(harm)
        finally:
            self._traffic.forget_versions()
            await asyncio.to_thread(self._subject.restart)
        await asyncio.sleep(_SETTLE_S)
        self._traffic.expected.discard("down")

    def _newest_files(self) -> list[Path]:
        users = sorted(self._subject.data.glob("adapters/*/*"))
        versions = [sorted(user.glob("v*/adapter_model.safetensors")) for user in users]
        return [files[-1] for files in versions if files]

    async def _cut(self) -> None:
        def cut() -> None:
            for file in self._newest_files():
                file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])

        await self._kill(cut)

    async def _flip(self) -> None:
        def flip() -> None:
            for file in self._newest_files():
                data = bytearray(file.read_bytes())
                data[self._chance.randrange(len(data))] ^= 1 << self._chance.randrange(8)
                file.write_bytes(bytes(data))

        await self._kill(flip)

    async def _damage(self) -> None:
        """Damage the database as a power cut may: the start must be refused; then restore a copy, as the message
        advises."""
        database, copy = self._subject.data / "edged.db", self._subject.folder / "copy.db"

        def refuse() -> None:
            with closing(sqlite3.connect(database)) as db, closing(sqlite3.connect(copy)) as whole:
                db.backup(whole)
            damage(database, self._chance)
            self._must_refuse("is damaged", "restore a copy")
            for file in database.parent.glob(f"{database.name}*"):
                file.unlink()
            shutil.move(copy, database)

        await self._kill(refuse)

    async def _read_only(self) -> None:
        def refuse() -> None:
            self._subject.read_only(True)
            self._must_refuse("data folder", "Read-only file system")
            self._subject.read_only(False)

        await self._kill(refuse)

    def _must_refuse(self, *words: str) -> None:
        code, said = self._subject.refused_start()
        if code != 1 or not all(word in said for word in words) or "Traceback" in said:
            self._traffic.tally.wrong.append(f"a start with exit code {code}, where {words} were to be said: {said}")

    async def _hang(self) -> None:
        """Hang a device call for ever: it starves the watchdog, and systemd ends the process by SIGABRT."""
        manager = self._subject.manager

        def end() -> None:
            self._subject.order(fault="hang")
            latest = time.monotonic() + _HUNG_S
            while manager.starved_s < WATCHDOG_S and time.monotonic() < latest:
                time.sleep(0.1)
            if manager.starved_s < WATCHDOG_S or not manager.status.startswith("no sign of life"):
                self._traffic.tally.wrong.append(f"a hung engine feeds the watchdog and says {manager.status!r}")
            self._subject.kill(signal.SIGABRT)

        await self._end_and_restart(end)

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
        # Without a timeout connect() waits while the accept queue is full; with one it would be refused at once.
        raw.connect(str(self._subject.socket))
        raw.settimeout(30)
        return raw

    async def _crowd(self) -> None:
        crowd = []
        for _ in range(_CONNECTIONS):
            crowd.append(await asyncio.to_thread(self._connect))
            # One at a time: the traffic's own connections share the accept queue.
            await asyncio.sleep(_BETWEEN_CONNECTIONS_S)
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
        # While a disk is full the store refuses feedback with 503, so the two faults never overlap.
        url = f"http://127.0.0.1:{self._subject.tcp_port}/openapi.json"
        options = ["--checks", ",".join(_CHECKS), "--max-examples", str(self._fuzz_examples), "--no-color"]
        options += ["--phases", "examples,fuzzing", "--seed", str(self._chance.randrange(1 << 30))]
        options += ["--request-timeout", str(_FUZZED_ANSWER_S)]
        command = [str(Path(sys.executable).parent / "schemathesis"), "run", url, *options]
        fuzzer = await asyncio.create_subprocess_exec(
            *command, cwd=self._subject.folder, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        try:
            said, _ = await asyncio.wait_for(fuzzer.communicate(), _FUZZ_S)
        except TimeoutError:
            fuzzer.kill()
            await fuzzer.wait()
            self._traffic.tally.wrong.append(f"schemathesis does not end within {_FUZZ_S:g} s")
            return
        if fuzzer.returncode:
            self._traffic.tally.wrong.append(f"schemathesis: {said.decode()[-3000:]}")


def _stream(tokens: int) -> bytes:
    body = json.dumps({"prompt": "How do I cook rice?", "max_tokens": tokens, "ignore_eos": True, "stream": True})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: edged\r\nContent-Length: {len(body)}\r\n\r\n"
    return (head + body).encode()


def fill(filler: Path) -> None:
    """Fill the file's disk."""
    with filler.open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue


def damage(database: Path, chance: random.Random) -> None:
    """Overwrite the beginnings of some pages after the first, and leave a torn write-ahead log beside them."""
    with closing(sqlite3.connect(database)) as db:
        # The log holds newer copies of pages, which would hide the damage.
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        (size,) = db.execute("PRAGMA page_size").fetchone()
    pages = range(1, database.stat().st_size // size)
    with database.open("r+b") as file:
        for page in chance.sample(pages, min(8, len(pages))):
            file.seek(page * size)
            file.write(chance.randbytes(200))
    database.with_name(f"{database.name}-wal").write_bytes(b"torn")
