"""An account that floods the event loop waits for its turns, and another one is answered meanwhile."""

from __future__ import annotations

import asyncio
import os
import pwd
import socket
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from aiohttp import web

from edged.api.app import make_app
from edged.api.services import Lifecycle
from edged.http import connections
from edged.http.connections import Site
from edged.http.loop_shares import LoopShares, LoopWork
from edged.settings.load import Settings
from tests.api.accounts import ANN, BOB, account, open_folder, root_only

MANY = 900
"""Connections: at a tenth of a millisecond each they are beyond what an account may have at once."""
ASK = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
FOREIGN = b"GET /v1/models HTTP/1.1\r\nHost: evil.example\r\n\r\n"


class Clock:
    """A clock that stands until it is turned: no account gains time of the loop meanwhile."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Daemon:
    """The application behind a socket, as it answers while the model is loading."""

    path: Path
    clock: Clock
    runner: web.AppRunner
    held: ExitStack

    def connect(self, name: str, many: int = 1) -> list[socket.socket]:
        """Connections of an account, closed at the end of the test."""
        clients = []
        for _ in range(many):
            with account(name):
                client = self.held.enter_context(socket.socket(socket.AF_UNIX))
                client.connect(str(self.path))
            client.setblocking(False)
            clients.append(client)
        return clients

    async def ask(self, name: str, request: bytes = ASK) -> bytes:
        """The status line that an account's request gets."""
        (client,) = self.connect(name)
        client.send(request)
        return await first_line(client)


async def first_line(client: socket.socket) -> bytes:
    async with asyncio.timeout(60):
        answer = await asyncio.get_running_loop().sock_recv(client, 65536)
    return answer.partition(b"\r\n")[0]


def answered(clients: Sequence[socket.socket]) -> int:
    """How many connections have an answer that was not read yet, or were closed."""
    came = 0
    for client in clients:
        try:
            client.recv(1, socket.MSG_PEEK)
            came += 1
        except BlockingIOError:
            pass
    return came


class SlowListener(socket.socket):
    """A listener that computes for 10 ms to accept a connection."""

    def accept(self) -> tuple[socket.socket, object]:
        accepted = super().accept()
        compute(0.01)
        return accepted


def compute(seconds: float) -> None:
    until_s = time.thread_time() + seconds
    while time.thread_time() < until_s:
        pass


@asynccontextmanager
async def serving(listening: type[socket.socket] = socket.socket) -> AsyncIterator[Daemon]:
    clock = Clock()
    with open_folder() as folder, listening(socket.AF_UNIX) as listener, ExitStack() as held:
        listener.bind(str(folder / "s"))
        os.chmod(folder / "s", 0o666)
        listener.listen(1024)
        runner = web.AppRunner(make_app(Settings(), Lifecycle()), handler_cancellation=True, shutdown_timeout=1.0)
        await runner.setup()
        try:
            await Site(runner, listener, Settings().limits, LoopShares(clock)).start()
            yield Daemon(folder / "s", clock, runner, held)
        finally:
            await runner.cleanup()


async def flood(daemon: Daemon, request: bytes = ASK, many: int = MANY) -> list[socket.socket]:
    """Connections of ann's, each with a request; returns when a further one of bob's was answered."""
    assert await daemon.ask(BOB)
    clients = daemon.connect(ANN, many)
    for client in clients:
        client.send(request)
    assert (await daemon.ask(BOB)).startswith(b"HTTP/1.1 503")
    return clients


@root_only
@pytest.mark.parametrize("request_", [ASK, FOREIGN], ids=["requests", "refusals"])
async def test_others_are_answered_while_one_who_floods_waits(request_: bytes) -> None:
    async with serving() as daemon:
        clients = await flood(daemon, request_)
        for _ in range(3):
            # Enough for the next question on a slow machine, and too little for all that wait.
            daemon.clock.now += 0.05
            assert await daemon.ask(BOB)
        assert answered(clients) < MANY
        daemon.clock.now += 1000.0
        assert len({await first_line(client) for client in clients}) == 1


@root_only
async def test_one_connection_with_many_requests_waits_as_many_connections_do() -> None:
    async with serving() as daemon:
        assert await daemon.ask(BOB)
        (client,) = daemon.connect(ANN)
        sent = asyncio.ensure_future(asyncio.get_running_loop().sock_sendall(client, ASK * MANY))
        read, quiet = b"", 0
        while quiet < 20 or not read:
            await asyncio.sleep(0.02)
            quiet += 1
            with suppress(BlockingIOError):
                read, quiet = read + client.recv(1 << 22), 0
        assert await daemon.ask(BOB)
        assert 0 < read.count(b"HTTP/1.1 503") < MANY
        sent.cancel()


@root_only
@pytest.mark.slow
async def test_who_is_alone_waits_for_nobody() -> None:
    async with serving() as daemon:
        clients = daemon.connect(ANN, MANY)
        for client in clients:
            client.send(ASK)
        for client in clients:
            assert (await first_line(client)).startswith(b"HTTP/1.1 503")
        assert await daemon.ask(BOB)
        daemon.clock.now += 60.0
        assert len({await daemon.ask(ANN) for _ in range(MANY)}) == 1


@root_only
async def test_who_has_left_while_waiting_is_not_read() -> None:
    async with serving() as daemon:
        clients = await flood(daemon)
        assert daemon.runner.server is not None
        read = daemon.runner.server.requests_count
        waiting = [client for client in clients if not answered([client])]
        for client in waiting:
            client.close()
        daemon.clock.now += 1000.0
        assert await daemon.ask(ANN)
        # Those whose connection was open by then had been read, or are now.
        assert daemon.runner.server.requests_count < read + len(waiting) / 2


@root_only
async def test_connections_that_come_and_go_without_a_word_count() -> None:
    async with serving(SlowListener) as daemon:
        for _ in range(5):
            daemon.connect(ANN)[0].close()
        assert await daemon.ask(BOB)
        waits = asyncio.ensure_future(daemon.ask(ANN))
        await asyncio.sleep(0.3)
        assert not waits.done()
        daemon.clock.now += 1000.0
        assert await waits


@root_only
async def test_of_one_account_a_bounded_number_waits_and_others_connect(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connections, "_MAX_WAITING", 50)
    async with serving() as daemon:
        clients = await flood(daemon)
        assert await daemon.ask(BOB)
        refused = [client for client in clients if answered([client]) and b" 429 Too Many" in client.recv(65536)]
        assert len(refused) > MANY / 2
        assert MANY - len(refused) >= 50
    uid = pwd.getpwnam(ANN).pw_uid
    told = f"50 requests of uid {uid} wait for their turn: new connections of it are refused"
    assert [record.getMessage() for record in caplog.records].count(told) == 1


async def test_what_follows_once_an_answer_has_begun_does_not_count() -> None:
    """A stream goes on for as long as the engine makes it."""
    shares = LoopShares(Clock())
    shares.of("bob")

    async def answer(work: list[LoopWork[int]], settles: bool) -> int:
        if settles:
            work[0].settle()
        await asyncio.sleep(0.0)
        compute(0.1)
        return 1

    async def ask(settles: bool) -> int:
        work: list[LoopWork[int]] = []
        work.append(LoopWork(lambda: answer(work, settles)))
        return await shares.of("ann").run(work[0])

    for _ in range(3):
        assert await ask(settles=True)
    assert await ask(settles=False)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(ask(settles=False), 0.5)


async def test_what_came_before_an_answer_began_counts_even_without_a_pause_between_them() -> None:
    """To read a request, to tokenize it and to submit it is one step of the loop where nothing is waited for."""
    shares = LoopShares(Clock())
    shares.of("bob")

    async def answer(work: list[LoopWork[None]]) -> None:
        compute(0.1)
        work[0].settle()

    async def ask() -> None:
        work: list[LoopWork[None]] = []
        work.append(LoopWork(lambda: answer(work)))
        await shares.of("ann").run(work[0])

    await ask()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(ask(), 0.5)


async def test_to_give_up_what_had_begun_counts() -> None:
    """Clients that ask and leave make others wait by leaving, too."""
    shares = LoopShares(Clock())
    shares.of("bob")

    async def answer(work: list[LoopWork[None]]) -> None:
        work[0].settle()
        try:
            await asyncio.sleep(60.0)
        finally:
            compute(0.1)

    work: list[LoopWork[None]] = []
    work.append(LoopWork(lambda: answer(work)))
    task = asyncio.create_task(shares.of("ann").run(work[0]))
    await asyncio.sleep(0.0)
    await asyncio.sleep(0.0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(shares.of("ann").run(LoopWork(lambda: asyncio.sleep(0.0))), 0.5)


async def test_work_that_fails_or_is_cancelled_ends_as_it_would_by_itself() -> None:
    shares = LoopShares(Clock())

    async def fail() -> None:
        await asyncio.sleep(0.0)
        raise KeyError("x")

    with pytest.raises(KeyError):
        await shares.of("ann").run(LoopWork(fail))
    ended = asyncio.Event()

    async def last() -> None:
        try:
            await asyncio.sleep(60.0)
        finally:
            ended.set()

    task = asyncio.create_task(shares.of("ann").run(LoopWork(last)))
    await asyncio.sleep(0.0)
    await asyncio.sleep(0.0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()
