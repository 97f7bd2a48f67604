"""How answers end that have begun and cannot go on: over a real socket."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from edged.http.errors import send_pieces


async def answered(folder: Path, error: Exception) -> bytes:
    """What a client has read when an answer of two pieces fails with `error` between them, of which it is told."""

    async def answer(request: web.Request) -> web.StreamResponse:
        def pieces() -> Iterator[bytes]:
            yield b"first"
            raise error

        made = pieces()
        return await send_pieces(request, "an export", {}, lambda: next(made, None))

    app = web.Application()
    app.router.add_get("/", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    path, read = str(folder / "s"), b""
    try:
        await web.UnixSite(runner, path).start()
        async with (
            asyncio.timeout(30),
            aiohttp.ClientSession(connector=aiohttp.UnixConnector(path)) as client,
            client.get("http://edged/") as response,
        ):
            assert response.status == 200
            async for piece in response.content.iter_any():
                read += piece
    except aiohttp.ClientPayloadError:
        return read
    finally:
        await runner.cleanup()
    raise AssertionError("the answer seems whole")


async def test_an_answer_that_breaks_off_is_not_taken_for_a_whole_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "edged.api"):
        assert await answered(tmp_path, OSError("no disk")) == b"first"
    (told,) = [record for record in caplog.records if record.name == "edged.api"]
    assert (told.levelname, told.getMessage()) == ("ERROR", "an export broke off")
    assert "no disk" in str(told.exc_info)
