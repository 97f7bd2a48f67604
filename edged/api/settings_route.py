"""`POST /v1/reload`.

Owns this route. Must not know what settings do or which of them can change.
"""

from __future__ import annotations

from aiohttp import web

from edged.api import wire
from edged.api.services import services_of


async def reload(request: web.Request) -> web.Response:
    """Read the settings again: what was applied, and what needs a restart. 400 leaves everything as it was."""
    result = await services_of(request).reload()
    return web.json_response(result.report(), dumps=wire.dumps)
