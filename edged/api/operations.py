"""`/v1/store`, `/v1/backup`, `/v1/settings`, `/v1/reload`: the routes for operators."""

import asyncio
import threading
from collections.abc import Generator
from typing import Any

from aiohttp import web

from edged.api.responses import Drained, Vacuumed
from edged.api.services import LIFECYCLE, Services, services_of
from edged.http.errors import ApiError, send_pieces
from edged.settings.toml import to_toml, without_secrets
from edged.store.backup import BackupError, staged, stream
from edged.store.data_dir import folder_bytes


async def get_settings(request: web.Request) -> dict[str, Any]:
    """The settings in use.

    `store.data_dir` is the absolute path in use; tokens are left out.
    """
    services = services_of(request)
    settings = without_secrets(services.settings).model_dump(mode="json")
    settings["store"]["data_dir"] = str(services.store.path.parent.absolute())
    return settings


async def reload(request: web.Request) -> dict[str, Any]:
    """Read the settings again.

    The answer says what was applied and what needs a restart. A 400 leaves everything as it was.
    """
    return (await services_of(request).reload()).report()


async def drain(request: web.Request) -> Drained:
    """Have a fleet send no new requests here.

    Readiness over TCP is 503; running answers go on, and so do requests over the box's own socket.
    """
    return _drain(request, True)


async def undrain(request: web.Request) -> Drained:
    """End a drain."""
    return _drain(request, False)


def _drain(request: web.Request, drained: bool) -> Drained:
    request.app[LIFECYCLE].drained = drained
    services_of(request).feed.tell_load()
    return Drained(drained=drained)


async def store_report(request: web.Request) -> dict[str, Any]:
    """The database's sizes and rows."""
    return await asyncio.to_thread(services_of(request).maintenance.report, True)


async def prune(request: web.Request) -> dict[str, Any]:
    """Delete now what the settings no longer keep."""
    maintenance = services_of(request).maintenance
    deleted = await asyncio.to_thread(maintenance.sweep)
    return {"deleted": deleted, "store": maintenance.report()}


async def vacuum(request: web.Request) -> Vacuumed:
    """Rewrite the database without free pages.

    Writes wait until it is done.
    """
    before, after = await asyncio.to_thread(services_of(request).maintenance.vacuum)
    return Vacuumed(bytes_before=before, bytes_after=after)


async def backup(request: web.Request) -> web.StreamResponse:
    """Database, adapters, profiles and settings as one tar.

    The backup is consistent, and has the newest version on disk of each adapter, with `?versions=all` every one.
    `X-Edged-Bytes` is its approximate size. Its last member is the manifest: a tar without it is incomplete.
    """
    services = services_of(request)
    services.claim("backup")
    parts, one_at_a_time = _parts(services, request.query.get("versions") == "all"), threading.Lock()

    def next_part() -> Any:
        with one_at_a_time:
            return next(parts, None)

    def close() -> None:
        with one_at_a_time:
            parts.close()

    try:
        try:
            total = await asyncio.to_thread(next_part)
        except BackupError as error:
            raise ApiError(503, str(error), code="no_backup") from None
        headers = {"Content-Type": "application/x-tar", "X-Edged-Bytes": str(total)}
        response = await send_pieces(request, "a backup", headers, next_part)
    finally:
        # `close` waits for the thread that may still make the next part for a client that left.
        closed = asyncio.get_running_loop().run_in_executor(None, close)
        closed.add_done_callback(lambda _: services.free("backup"))
        # A client that has read the whole answer may ask for the next backup.
        await asyncio.shield(closed)
    return response


def _parts(services: Services, all_versions: bool) -> Generator[Any, None, None]:
    """Yield a backup's size in bytes, then its chunks; its staging folder is deleted at the end. Raises BackupError."""
    store, config = services.store, to_toml(without_secrets(services.settings))
    with staged(store.path.parent, config, lambda: store.write(lambda db: None).result(), all_versions) as folder:
        yield folder_bytes(folder)
        yield from stream(folder, store.path.parent)
