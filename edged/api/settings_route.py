"""`GET /v1/settings`, `POST /v1/reload`.

Owns these routes. Must not know what settings do or which of them can change.
"""

from __future__ import annotations

from aiohttp import web

from edged.api import openai_format
from edged.api.services import services_of
from edged.settings.toml import without_secrets


async def get_settings(request: web.Request) -> web.Response:
    """The settings in use, with the data folder's place and without tokens."""
    services = services_of(request)
    settings = without_secrets(services.settings).model_dump(mode="json")
    settings["store"]["data_dir"] = str(services.store.path.parent.absolute())
    return web.json_response(settings, dumps=openai_format.dumps)


async def reload(request: web.Request) -> web.Response:
    """Read the settings again: what was applied, and what needs a restart. 400 leaves everything as it was."""
    result = await services_of(request).reload()
    return web.json_response(result.report(), dumps=openai_format.dumps)
