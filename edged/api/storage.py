"""`/v1/store`: how large the database is, what it holds, maintenance now; `/v1/backup`: all of it as one tar."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

from aiohttp import web

from edged.api.errors import send_pieces, unavailable
from edged.api.responses import Vacuumed
from edged.api.services import Services, services_of
from edged.api.single_flight import SingleFlight
from edged.settings.toml import to_toml, without_secrets
from edged.store.backup import BackupError, staged, stream
from edged.store.data_dir import folder_bytes

TURN = web.AppKey("backup", SingleFlight)


async def store_report(request: web.Request) -> dict[str, Any]:
    """Sizes, rows by table, the oldest completion: of now."""
    return await asyncio.to_thread(services_of(request).upkeep.report, True)


async def prune(request: web.Request) -> dict[str, Any]:
    """Delete at once what the settings no longer keep."""
    upkeep = services_of(request).upkeep
    deleted = await asyncio.to_thread(upkeep.sweep)
    return {"deleted": deleted, "store": upkeep.report()}


async def vacuum(request: web.Request) -> Vacuumed:
    """Rewrite the file without free pages; what is to be stored meanwhile waits for it."""
    before, after = await asyncio.to_thread(services_of(request).upkeep.vacuum)
    return Vacuumed(bytes_before=before, bytes_after=after)


async def backup(request: web.Request) -> web.StreamResponse:
    """A tar of database, adapters (`?versions=all`: every one on disk), profiles and settings, consistent with itself.

    `X-Edged-Bytes` is about its size. Its last member is the manifest: without that it broke off.
    """
    turn = request.app[TURN]
    turn.take()
    parts = _Parts(services_of(request), request.query.get("versions") == "all")
    try:
        try:
            total = await asyncio.to_thread(parts.next)
        except BackupError as error:
            raise unavailable(str(error), "no_backup") from None
        headers = {"Content-Type": "application/x-tar", "X-Edged-Bytes": str(total)}
        response = await send_pieces(request, "a backup", headers, parts.next)
    finally:
        # Behind the thread that may still make the next part for a client that left.
        closed = asyncio.get_running_loop().run_in_executor(None, parts.close)
        closed.add_done_callback(lambda _: turn.end())
        # Whoever has read the whole answer may ask for the next backup.
        await asyncio.shield(closed)
    return response


class _Parts:
    """A backup's size and chunks, made by one thread at a time."""

    def __init__(self, services: Services, all_versions: bool) -> None:
        self._lock = threading.Lock()
        self._parts = self._make(services, all_versions)

    def next(self) -> Any:
        """The size in bytes, then chunks, then None. Raises BackupError."""
        with self._lock:
            return next(self._parts, None)

    def close(self) -> None:
        """Remove what the backup holds on the disk."""
        with self._lock:
            self._parts.close()

    @staticmethod
    def _make(services: Services, all_versions: bool) -> Any:
        store, config = services.store, to_toml(without_secrets(services.settings))

        def settle() -> None:
            store.write(lambda db: None).result()

        def make() -> Iterator[Any]:
            with staged(store.path.parent, config, settle, all_versions) as folder:
                yield folder_bytes(folder)
                yield from stream(folder, store.path.parent)

        return make()
