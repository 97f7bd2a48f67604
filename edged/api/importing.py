"""`POST /v1/adapters/{name}/import`: an adapter from elsewhere becomes a user's newest version.

Owns the upload: a tar archive or a folder on this box, its bounds, and what is refused. Must not know what an adapter's
files have to hold.
"""

from __future__ import annotations

import asyncio
import tarfile
import tempfile
from pathlib import Path, PurePosixPath

from aiohttp import web

from edged.align.importing import CONFIG, WEIGHTS, ImportRefused, most_bytes, read_adapter
from edged.api import wire
from edged.api.access import caller_of
from edged.api.errors import ApiError, bad_request
from edged.api.services import services_of
from edged.config import USER_NAME

_TAR_OVERHEAD = 1 << 20
REASONS = ("imported", "rebuilt")
"""What a version that came this way may be called; `edged align rebuild` says the second."""


async def import_adapter(request: web.Request) -> web.Response:
    """Take a tar archive of a PEFT folder as the newest version of {name}: a new version, which can be rolled back."""
    services, name = services_of(request), request.match_info["name"]
    if not USER_NAME.fullmatch(name):
        raise bad_request(f'"{name[:80]}" cannot name a user', "name")
    caller_of(request).demand_user(name)
    reason = request.query.get("reason", REASONS[0])
    if reason not in REASONS:
        raise bad_request(f'reason = "{reason[:40]}": use {" or ".join(REASONS)}', "reason")
    spec = services.engine.adapter_files.spec
    most = most_bytes(spec) + _TAR_OVERHEAD
    with tempfile.TemporaryDirectory(prefix="import-", dir=services.store.path.parent) as folder:
        archive = Path(folder) / "upload.tar"
        await _receive(request, archive, most, services.settings.limits.body_s)
        files = Path(folder) / "files"
        try:
            await asyncio.to_thread(_unpack, archive, files, most)
            weights = await asyncio.to_thread(read_adapter, files, spec)
        except ImportRefused as error:
            raise ApiError(400, f"the adapter is not imported: {error}", code="import_refused") from None
    version = await asyncio.wrap_future(services.engine.import_adapter(name, weights, reason))
    return web.json_response({"adapter": name, "version": version, "reason": reason}, dumps=wire.dumps)


async def _receive(request: web.Request, target: Path, most: int, pause_s: float) -> None:
    """Write the body to a file. Raises ApiError for more than `most` bytes, or when nothing comes for `pause_s`."""
    size = 0
    with target.open("wb") as file:
        while piece := await _piece(request, pause_s):
            size += len(piece)
            if size > most:
                raise ApiError(
                    413, f"the archive is larger than any adapter of this model ({most} bytes)", code="body_too_large"
                )
            await asyncio.to_thread(file.write, piece)


async def _piece(request: web.Request, pause_s: float) -> bytes:
    try:
        async with asyncio.timeout(pause_s):
            return await request.content.read(1 << 18)
    except TimeoutError:
        raise ApiError(
            408, f"nothing of the body came for limits.body_s = {pause_s:g} s", code="body_too_slow"
        ) from None


def _unpack(archive: Path, folder: Path, most: int) -> None:
    """Take the two files of an adapter out of an archive, and nothing else. Raises ImportRefused."""
    folder.mkdir()
    try:
        # "r:" and not "r": nothing is decompressed, so nothing can become larger than it was.
        with tarfile.open(archive, "r:") as tar:
            for member in tar:
                _check_member(member, most)
                name = PurePosixPath(member.name).name
                if name in (CONFIG, WEIGHTS):
                    source = tar.extractfile(member)
                    assert source is not None
                    with source, (folder / name).open("wb") as target:
                        while piece := source.read(1 << 20):
                            target.write(piece)
                elif name.endswith((".bin", ".pt", ".pth", ".pkl", ".ckpt")):
                    # Its name alone is kept, so that the refusal can tell it; of its bytes nothing is.
                    (folder / "adapter_model.bin").touch()
    except tarfile.TarError as error:
        raise ImportRefused(f"the upload is not a tar archive ({error}): send one that is not compressed") from None


def _check_member(member: tarfile.TarInfo, most: int) -> None:
    path = PurePosixPath(member.name)
    if path.is_absolute() or ".." in path.parts:
        raise ImportRefused(f'"{member.name[:200]}" in the archive leads out of it')
    if not (member.isfile() or member.isdir()):
        raise ImportRefused(f'"{member.name[:200]}" in the archive is neither a file nor a folder')
    if member.size > most:
        raise ImportRefused(
            f'"{member.name[:200]}" has {member.size} bytes, an adapter of this model fewer than {most}'
        )
