"""`/v1/adapters`: what was learned for each user, going back, taking out, forgetting."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from aiohttp import web
from sqlite_utils import Database

from edged.align import metrics
from edged.align.adapters.adapter import UnknownAdapter
from edged.align.adapters.peft_import import CONFIG, WEIGHTS
from edged.align.versions import UnknownVersion
from edged.api import query
from edged.api.access import Caller, caller_of
from edged.api.erasure import forget_user
from edged.api.errors import ApiError, not_found, send_pieces
from edged.api.requests import RollbackRequest, read_body
from edged.api.responses import Examined, Forgotten, RolledBack
from edged.api.services import Services, services_of
from edged.settings.load import USER_NAME
from edged.store.archive import archive
from edged.store.completions import last_answers
from edged.store.data_dir import folder_bytes

_SERIES_PAIRS = 500
MOST_SERIES_PAIRS = 100_000


async def list_adapters(request: web.Request) -> dict[str, Any]:
    """Metrics of every adapter that the caller may speak for."""
    return {"adapters": await asyncio.to_thread(_listed, services_of(request), caller_of(request))}


def _listed(services: Services, caller: Caller) -> list[dict[str, Any]]:
    """The caller's adapters, each with its size on disk and when it was taught or answered last."""
    known, answered = services.store.read(metrics.summaries), services.store.read(last_answers)
    root = services.engine.adapter_files.root
    return [
        {
            **_current(services, item),
            "disk_bytes": folder_bytes(root / item["adapter"]),
            "last_used_at": max(item["updated_at"] or "", answered.get(item["adapter"], "")) or None,
        }
        for item in known
        if caller.speaks_for(item["adapter"])
    ]


async def get_adapter(request: web.Request) -> dict[str, Any]:
    """One adapter's metrics, versions (newest first) and the series of its pairs (`?limit=`, oldest first)."""
    services, name = services_of(request), _name(request)
    limit = query.integer(request, "limit", _SERIES_PAIRS, 1, MOST_SERIES_PAIRS)

    def read(db: Database) -> dict[str, Any] | None:
        summary = metrics.summary(db, name)
        if summary is None:
            return None
        return {**summary, "versions": metrics.versions(db, name), "series": metrics.series(db, name, limit)}

    found = await asyncio.to_thread(services.store.read, read)
    if found is None:
        raise _unknown(name)
    return _current(services, found)


async def rollback(request: web.Request) -> RolledBack:
    """Serve an earlier version again, as a new one."""
    services, name = services_of(request), _name(request)
    body = await read_body(request, RollbackRequest.checked)
    try:
        version = await asyncio.wrap_future(services.engine.rollback(name, body.version))
    except UnknownAdapter:
        raise _unknown(name) from None
    except UnknownVersion as error:
        raise not_found(str(error.args[0]), "version", "unknown_version") from None
    return RolledBack(adapter=name, version=version, restored=body.version)


async def mend(request: web.Request) -> Examined:
    """Have the version that is served tested; where its language is broken, the newest that passes takes its place."""
    services, name = services_of(request), _name(request)
    version = services.engine.version(name)
    if version is None:
        raise _unknown(name)
    services.engine.examine(name)
    return Examined(adapter=name, version=version)


async def export(request: web.Request) -> web.StreamResponse:
    """The newest version that is on disk, as the tar that the import takes; `X-Edged-Version` is its number."""
    services, name = services_of(request), _name(request)
    versions = await asyncio.to_thread(services.store.read, lambda db: metrics.versions(db, name))
    saved = next((item for item in versions if item["on_disk"] and item["path"]), None)
    if saved is None and not versions and services.engine.version(name) is None:
        raise _unknown(name)
    if saved is None:
        raise _not_saved_yet(name)
    chunks = _archive(Path(saved["path"]))
    try:
        chunk = await asyncio.to_thread(next, chunks, b"")
    except FileNotFoundError:
        # A newer one took its place meanwhile.
        raise _not_saved_yet(name) from None
    pieces = chain((chunk,), chunks)
    headers = {"Content-Type": "application/x-tar", "X-Edged-Version": str(saved["version"])}
    return await send_pieces(request, "an export", headers, lambda: next(pieces, None))


def _archive(folder: Path) -> Iterator[bytes]:
    """A version's files that peft reads; they stay open, and so readable, if the version is removed meanwhile."""
    with (folder / CONFIG).open("rb") as config, (folder / WEIGHTS).open("rb") as weights:
        yield from archive((config, weights))


async def forget(request: web.Request) -> Forgotten:
    """Delete an adapter, its versions on every base, and all completions, signals and pairs of its user."""
    services, name = services_of(request), _name(request)
    # Whether the client still listens makes no difference: half of it would be learned again at the next start.
    forgetting = asyncio.create_task(forget_user(services, name))
    services.forgetting.add(forgetting)
    forgetting.add_done_callback(services.forgetting.discard)
    done = await asyncio.shield(forgetting)
    if done is None:
        raise _unknown(name)
    return Forgotten(adapter=name, forgotten=True, **done)


def _current(services: Services, summary: dict[str, Any]) -> dict[str, Any]:
    """The version that is served now: the store hears of a new one a moment later."""
    version = services.engine.version(summary["adapter"])
    return summary if version is None else {**summary, "version": version}


def _name(request: web.Request) -> str:
    """The adapter that a URL names. Raises ApiError when it cannot be one, or is not the caller's."""
    name = request.match_info["name"]
    if not USER_NAME.fullmatch(name):
        raise _unknown(name)
    caller_of(request).demand_user(name)
    return name


def _not_saved_yet(name: str) -> ApiError:
    return ApiError(409, f'adapter "{name}" has no version on disk yet: ask again in a moment', code="not_saved_yet")


def _unknown(name: str) -> ApiError:
    return not_found(f'adapter "{name[:200]}" does not exist: feedback creates it', "name", "unknown_adapter")
