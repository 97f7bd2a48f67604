"""A daemon that leaves its sockets to systemd: whoever has begun is answered, and whoever comes waits in the queue."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from aiohttp import web

from edged.http.connections import Site
from edged.http.loop_shares import LoopShares
from edged.settings.load import Settings

ASK = b"GET /slow HTTP/1.1\r\nHost: edged\r\n\r\n"


class Served:
    """A site whose only resource answers when `answer` is set."""

    def __init__(self, path: Path, site: Site, answer: asyncio.Event) -> None:
        self.path, self.site, self.answer = path, site, answer

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_unix_connection(str(self.path))

    async def becomes(self, idle: bool) -> None:
        async with asyncio.timeout(10):
            while self.site.is_idle is not idle:  # noqa: ASYNC110 - nothing tells it
                await asyncio.sleep(0.01)


@asynccontextmanager
async def serving(listener: socket.socket, path: Path) -> AsyncIterator[Served]:
    answer = asyncio.Event()

    async def slow(request: web.Request) -> web.Response:
        await answer.wait()
        return web.Response(text="done")

    app = web.Application()
    app.router.add_get("/slow", slow)
    runner = web.AppRunner(app)
    await runner.setup()
    site = Site(runner, listener.dup(), Settings().limits, LoopShares())
    await site.start()
    try:
        yield Served(path, site, answer)
    finally:
        await runner.cleanup()


@pytest.fixture
def listener(tmp_path: Path) -> socket.socket:
    made = socket.socket(socket.AF_UNIX)
    made.bind(str(tmp_path / "s"))
    made.listen()
    return made


def run(test: Callable[[Served], object], listener: socket.socket) -> None:
    async def within() -> None:
        async with serving(listener, Path(str(listener.getsockname()))) as served:
            await test(served)  # type: ignore[misc]

    asyncio.run(within())


def test_a_connection_is_idle_between_its_requests_alone(listener: socket.socket) -> None:
    async def test(served: Served) -> None:
        assert served.site.is_idle
        reader, writer = await served.connect()
        await served.becomes(idle=False)
        await asyncio.sleep(0.1)
        assert not served.site.is_idle, "its first request is waited for"
        writer.write(ASK)
        await asyncio.sleep(0.1)
        assert not served.site.is_idle, "its request is answered"
        served.answer.set()
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        await served.becomes(idle=True)
        writer.write(ASK)
        assert not served.site.is_idle, "its next request was not read yet"
        await served.becomes(idle=True)

    run(test, listener)


def test_a_client_that_is_gone_when_its_body_is_refused_makes_no_error(caplog: pytest.LogCaptureFixture) -> None:
    async def test(served: Served) -> None:
        client = socket.create_connection(listener.getsockname())
        client.sendall(b"GET /slow HTTP/1.1\r\nHost: edged\r\nContent-Length: 9999999\r\n\r\n")
        await served.becomes(idle=False)
        client.setblocking(False)
        # The daemon stops reading what nobody asks for, and so does not hear of the end.
        with suppress(BlockingIOError, TimeoutError):
            async with asyncio.timeout(1):
                await asyncio.get_running_loop().sock_sendall(client, b"x" * 9_999_999)
        client.close()
        served.answer.set()
        await served.becomes(idle=True)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        run(test, listener)
    assert not [record.message for record in caplog.records if record.levelname == "ERROR"]


def test_who_leaves_closes_idle_connections_and_who_comes_is_served_by_the_next(listener: socket.socket) -> None:
    async def first(served: Served) -> None:
        served.answer.set()
        reader, writer = await served.connect()
        writer.write(ASK)
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        await served.becomes(idle=True)
        served.site.leave()
        assert (await reader.read()).endswith(b"done")
        late.connect(listener.getsockname())
        late.sendall(ASK)
        await asyncio.sleep(0.1)

    async def second(served: Served) -> None:
        served.answer.set()
        assert (await asyncio.get_running_loop().sock_recv(late, 64)).startswith(b"HTTP/1.1 200")

    with socket.socket(socket.AF_UNIX) as late:
        late.setblocking(False)
        run(first, listener)
        with pytest.raises(BlockingIOError):
            late.recv(1)
        run(second, listener)
