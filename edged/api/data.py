"""`/v1/store`: how large the database is, what it holds, and keeping it in order now.

Owns these routes. Must not know what may be deleted.
"""

from __future__ import annotations

import asyncio

from aiohttp import web

from edged.api import wire
from edged.api.services import services_of


async def store_report(request: web.Request) -> web.Response:
    """Sizes, rows by table, the oldest completion: of now."""
    upkeep = services_of(request).upkeep
    return web.json_response(await asyncio.to_thread(upkeep.report, True), dumps=wire.dumps)


async def prune(request: web.Request) -> web.Response:
    """Delete at once what the settings no longer keep."""
    upkeep = services_of(request).upkeep
    deleted = await asyncio.to_thread(upkeep.sweep)
    return web.json_response({"deleted": deleted, "store": upkeep.report()}, dumps=wire.dumps)


async def vacuum(request: web.Request) -> web.Response:
    """Rewrite the file without free pages; what is to be stored meanwhile waits for it."""
    upkeep = services_of(request).upkeep
    before, after = await asyncio.to_thread(upkeep.vacuum)
    return web.json_response({"bytes_before": before, "bytes_after": after}, dumps=wire.dumps)
