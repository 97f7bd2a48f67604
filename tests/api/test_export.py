"""An export of pairs that cannot be finished."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiohttp import web

from edged.align.feedback.signals import record_pair
from edged.api import feedback
from edged.api.app import make_app
from edged.api.services import Lifecycle, Services
from edged.settings.load import Settings
from edged.store import Store, StoreError, utc_now
from edged.store.jobs.jobs import NO_ADAPTERS


class Failing:
    """A store whose reads fail from the third on: the ids and one part are read."""

    def __init__(self, store: Store) -> None:
        self._store, self._reads = store, 0

    def read(self, fn: Any) -> Any:
        self._reads += 1
        if self._reads > 2:
            raise StoreError("the disk is gone")
        return self._store.read(fn)


async def test_an_export_that_fails_midway_ends_without_a_second_response(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(feedback, "_EXPORT_ROWS", 1)
    store = Store(tmp_path / "edged.db")
    for i in range(3):
        store.write(lambda db, i=i: record_pair(db, "ann", f"good {i}", "bad", utc_now(), prompt="q")).result()
    feed = SimpleNamespace(close=lambda: None)
    jobs = SimpleNamespace(adapters=NO_ADAPTERS)
    services = SimpleNamespace(
        store=Failing(store), engine=SimpleNamespace(error=None), feed=feed, job_runner=jobs, settings=Settings()
    )
    runner = web.AppRunner(make_app(Settings(), Lifecycle("ready", cast(Services, services))))
    await runner.setup()
    path = str(tmp_path / "s")
    await web.UnixSite(runner, path).start()
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(b"GET /v1/feedback HTTP/1.1\r\nHost: edged\r\n\r\n")
    with caplog.at_level(logging.ERROR):
        data = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    await runner.cleanup()
    store.close()
    assert data.count(b"HTTP/1.1") == 1
    assert data.startswith(b"HTTP/1.1 200")
    assert data.count(b'"chosen"') == 1
    assert not data.endswith(b"0\r\n\r\n")
    assert "the disk is gone" in caplog.text
