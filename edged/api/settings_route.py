"""`GET /v1/settings`, `POST /v1/reload`."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from edged.api.services import services_of
from edged.settings.toml import without_secrets


async def get_settings(request: web.Request) -> dict[str, Any]:
    """The settings in use, with the data folder's place and without tokens."""
    services = services_of(request)
    settings = without_secrets(services.settings).model_dump(mode="json")
    settings["store"]["data_dir"] = str(services.store.path.parent.absolute())
    return settings


async def reload(request: web.Request) -> dict[str, Any]:
    """Read the settings again: what was applied, and what needs a restart. 400 leaves everything as it was."""
    return (await services_of(request).reload()).report()
