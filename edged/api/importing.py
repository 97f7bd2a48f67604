"""`POST /v1/adapters/{name}/import`: an adapter from elsewhere becomes a user's newest version."""

from __future__ import annotations

import asyncio
import tarfile
import tempfile
from pathlib import Path, PurePosixPath

import torch
from aiohttp import web

from edged.align.adapters.adapter import LoraSpec
from edged.align.adapters.peft_import import CONFIG, WEIGHTS, ImportRefused, most_bytes, read_adapter
from edged.api.access import caller_of
from edged.api.errors import ApiError, bad_request
from edged.api.responses import Imported
from edged.api.services import Services, services_of
from edged.api.single_flight import SingleFlight
from edged.settings.load import USER_NAME
from edged.store.data_dir import SCRATCH

TURN = web.AppKey("importing", SingleFlight)
_TAR_OVERHEAD = 1 << 20
_MOST_MEMBERS = 256
_SLOWEST = 256 << 10
"""Bytes a second: an upload that is slower on the whole is given up."""
REASONS = ("imported", "rebuilt")
"""What a version that came this way may be called; `edged align rebuild` says the second."""


async def import_adapter(request: web.Request) -> Imported:
    """Take a tar archive of a PEFT folder as the newest version of {name}: a new version, which can be rolled back."""
    services, name = services_of(request), request.match_info["name"]
    if not USER_NAME.fullmatch(name):
        raise bad_request(f'"{name[:80]}" cannot name a user', "name")
    caller_of(request).demand_user(name)
    reason = request.query.get("reason", REASONS[0])
    if reason not in REASONS:
        raise bad_request(f'reason = "{reason[:40]}": use {" or ".join(REASONS)}', "reason")
    spec = services.engine.adapter_files.spec
    if name in services.engine.adapter_files.left:
        raise ApiError(
            409,
            f'"{name}" was forgotten, and files of it could not be deleted; the daemon\'s log says why, and '
            f"`edged adapters forget {name}` tries again",
            code="not_forgotten_yet",
        )
    turn = request.app[TURN]
    turn.take()
    try:
        weights = await _uploaded(request, services, spec)
    finally:
        turn.end()
    version = await asyncio.wrap_future(services.engine.import_adapter(name, weights, reason))
    return Imported(adapter=name, version=version, reason=reason)


async def _uploaded(request: web.Request, services: Services, spec: LoraSpec) -> dict[str, torch.Tensor]:
    """The weights that a request brings. Raises ApiError."""
    most = most_bytes(spec) + _TAR_OVERHEAD
    prefix = f"{SCRATCH}import-"
    with tempfile.TemporaryDirectory(prefix=prefix, dir=services.store.path.parent, ignore_cleanup_errors=True) as name:
        archive, files = Path(name) / "upload.tar", Path(name) / "files"
        body_s = services.settings.limits.body_s
        size = min(most, request.content_length or most)
        try:
            async with asyncio.timeout(body_s + size / _SLOWEST):
                await _receive(request, archive, most)
        except TimeoutError:
            raise ApiError(
                408,
                f"the body did not come within limits.body_s = {body_s:g} s and a second for every {_SLOWEST} bytes",
                code="body_too_slow",
            ) from None
        try:
            await asyncio.to_thread(_unpack, archive, files, most)
            return await asyncio.to_thread(read_adapter, files, spec)
        except ImportRefused as error:
            raise ApiError(400, f"the adapter is not imported: {error}", code="import_refused") from None


async def _receive(request: web.Request, target: Path, most: int) -> None:
    """Write the body to a file. Raises ApiError for more than `most` bytes."""
    size = 0
    with target.open("wb") as file:
        while piece := await request.content.read(1 << 18):
            size += len(piece)
            if size > most:
                raise ApiError(
                    413, f"the archive is larger than any adapter of this model ({most} bytes)", code="body_too_large"
                )
            await asyncio.to_thread(file.write, piece)


def _unpack(archive: Path, folder: Path, most: int) -> None:
    """Take the two files of an adapter out of an archive, and nothing else. Raises ImportRefused."""
    folder.mkdir()
    try:
        # "r:" and not "r": nothing is decompressed, so nothing can become larger than it was.
        with tarfile.open(archive, "r:") as tar:
            for number, member in enumerate(tar, 1):
                if number > _MOST_MEMBERS:
                    raise ImportRefused(f"the archive has more than {_MOST_MEMBERS} members: an adapter has two files")
                _check_member(member, most)
                # Members may lie one over the other: it is what they say together that is written.
                most -= member.size
                name = PurePosixPath(member.name).name
                if name in (CONFIG, WEIGHTS):
                    _extract(tar, member, folder / name)
                elif name.endswith((".bin", ".pt", ".pth", ".pkl", ".ckpt")):
                    # Its name alone is kept, so that the refusal can tell it; of its bytes nothing is.
                    (folder / "adapter_model.bin").touch()
    except tarfile.TarError as error:
        raise ImportRefused(f"the upload is not a tar archive ({error}): send one that is not compressed") from None


def _extract(tar: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> None:
    """Write a member to a file that is not there yet. Raises ImportRefused."""
    source = tar.extractfile(member)
    assert source is not None
    try:
        with source, path.open("xb") as target:
            while piece := source.read(1 << 20):
                target.write(piece)
    except FileExistsError:
        raise ImportRefused(f"{path.name} is in the archive twice: nobody can tell which one is meant") from None


def _check_member(member: tarfile.TarInfo, most: int) -> None:
    path = PurePosixPath(member.name)
    if path.is_absolute() or ".." in path.parts:
        raise ImportRefused(f'"{member.name[:200]}" in the archive leads out of it')
    # A sparse file is a few bytes here and any number where it is unpacked.
    if member.issparse() or not (member.isfile() or member.isdir()):
        raise ImportRefused(f'"{member.name[:200]}" in the archive is neither a file nor a folder')
    if member.size > most:
        raise ImportRefused(
            f'with "{member.name[:200]}" the archive is {member.size - most} bytes too large for this model'
        )
