"""The page's files: who gets them, and what a browser may do with them."""

from __future__ import annotations

import gzip
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import unused_port

from edged.api.app import make_app
from edged.api.services import Lifecycle
from edged.page import NAMES, page_file
from edged.settings.load import ApiSettings, Settings


@asynccontextmanager
async def listener(token: str = "") -> AsyncIterator[aiohttp.ClientSession]:
    """A client of a daemon that is loading its model."""
    runner = web.AppRunner(make_app(Settings(api=ApiSettings(token=token)), Lifecycle()))
    await runner.setup()
    port = unused_port()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}", auto_decompress=False) as client:
            yield client
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("token", ["", "secret"])
async def test_the_page_is_there_while_the_model_loads_and_needs_no_token(token: str) -> None:
    async with listener(token) as client:
        async with client.get("/") as response:
            assert (response.status, response.content_type) == (200, "text/html")
        async with client.get("/v1/events") as response:
            assert response.status == (401 if token else 503)


async def test_other_sites_pages_do_not_get_it() -> None:
    async with listener() as client, client.get("/", headers={"Origin": "https://evil.example"}) as response:
        assert response.status == 403


@pytest.mark.parametrize("name", NAMES)
async def test_every_file_is_sent_compressed_and_only_when_it_has_changed(name: str) -> None:
    async with listener() as client:
        async with client.get(f"/page/{name}", headers={"Accept-Encoding": "gzip"}) as response:
            content, tag = gzip.decompress(await response.read()), response.headers["ETag"]
            assert response.headers["Content-Type"].startswith("text/")
        async with client.get(f"/page/{name}", headers={"Accept-Encoding": "identity"}) as response:
            assert await response.read() == content
        async with client.get(f"/page/{name}", headers={"If-None-Match": tag}) as response:
            assert (response.status, await response.read()) == (304, b"")


async def test_nothing_inline_and_nothing_from_elsewhere_is_allowed() -> None:
    async with listener() as client, client.get("/") as response:
        policy = response.headers["Content-Security-Policy"]
        text = gzip.decompress(await response.read()).decode()
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "http" not in policy
    assert "<style" not in text
    assert " style=" not in text
    assert "<script>" not in text


@pytest.mark.parametrize("name", ["nothing.js", "..%2Fapp.py", "__init__.py", "%2Fetc%2Fpasswd"])
async def test_there_are_no_other_files(name: str) -> None:
    async with listener() as client, client.get(f"/page/{name}") as response:
        assert response.status == 404


def test_a_telephone_gets_the_whole_page_in_a_moment() -> None:
    assert sum(len(page_file(name).body_gzip) for name in NAMES) < 100_000
