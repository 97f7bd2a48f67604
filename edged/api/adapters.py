"""`/v1/adapters`: list, inspect, roll back, test, export, import and forget the users' adapters."""

import asyncio
import contextlib
import errno
import shutil
import tarfile
import tempfile
from collections.abc import Collection, Iterator
from contextvars import copy_context
from dataclasses import asdict
from functools import partial
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from aiohttp import web
from sqlite_utils import Database

from edged.align import metrics
from edged.align.adapters.adapter import UnknownAdapter
from edged.align.adapters.form import AdapterForm, LoraSpec
from edged.align.adapters.peft_export import exported
from edged.align.adapters.peft_import import CONFIG, WEIGHTS, ImportRefused, max_bytes, read_adapter
from edged.align.feedback.pair import IMPORT_REASONS
from edged.align.versions import UnknownVersion
from edged.api.erasure import forget_user
from edged.api.requests import RollbackRequest, queried_integer, read_body
from edged.api.responses import Examined, Forgotten, Imported, RolledBack
from edged.api.services import Services, services_of
from edged.http.access import caller_of
from edged.http.errors import ApiError, bad_request, send_pieces, upload_in_time
from edged.settings.access import NO_USER_NAME, USER_NAME
from edged.store.completions import last_answers
from edged.store.data_dir import SCRATCH, folder_bytes
from edged.store.feedback import struck
from edged.store.jobs.jobs import checkpoint_of, open_job_of

_SERIES_PAIRS = 500
_JUDGED_ANEW = 8
"""Adapters whose answers a list of all judges anew, where there are new ones: those asked for last."""
MAX_SERIES_PAIRS = 100_000
_TAR_OVERHEAD = 1 << 20
_TOO_LARGE = "the archive is larger than any adapter of this model"
_MAX_MEMBERS, _MAX_EXTENDED = 256, 2048
"""Members of an archive, and bytes of an extended header, which holds a long name or times."""


async def list_adapters(request: web.Request) -> dict[str, Any]:
    """Every adapter with its means.

    Only those that the caller may speak for, each with its size on disk and when it was last trained or used.
    """
    services, caller = services_of(request), caller_of(request)

    # To judge all anew would take long: of those in use longest ago, what was judged last is told.
    for name in [each for each in services.tastes.fitted if caller.speaks_for(each)][-_JUDGED_ANEW:]:
        await services.practice.liked(name)
    liked = services.practice.judged

    def listed() -> list[dict[str, Any]]:
        known = services.store.read(lambda db: metrics.summaries(db, liked))
        answered = services.store.read(last_answers)
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

    return {"adapters": await asyncio.to_thread(listed)}


async def get_adapter(request: web.Request) -> dict[str, Any]:
    """One adapter with its versions and pairs.

    Its versions are newest first, the series of its pairs (`?limit=`) is oldest first.
    """
    services, name = services_of(request), adapter_name(request)
    limit = queried_integer(request, "limit", _SERIES_PAIRS, 1, MAX_SERIES_PAIRS)
    liked = await services.practice.liked(name)

    def read(db: Database) -> dict[str, Any]:
        summary = metrics.summary(db, name, liked)
        if summary is None:
            raise unknown_adapter(name)
        versions, series = metrics.versions(db, name), metrics.series(db, name, limit)
        return {**summary, "struck": sorted(struck(db, name)), "versions": versions, "series": series}

    found = _current(services, await asyncio.to_thread(services.store.read, read))
    # The words of a user are for those who may teach that user.
    if not caller_of(request).may("train"):
        return {**found, "beliefs": None, "struck": None}
    taste = await services.tastes.of(name)
    return {**found, "beliefs": [asdict(each) for each in taste.beliefs()] if taste is not None else []}


async def rollback(request: web.Request) -> RolledBack:
    """Serve an earlier version again.

    Its weights are published as a new version.
    """
    services, name = services_of(request), adapter_name(request)
    body = await read_body(request, RollbackRequest.checked)
    await demand_free(services, name)
    try:
        version = await asyncio.wrap_future(services.engine.rollback(name, body.version))
    except UnknownAdapter:
        raise unknown_adapter(name) from None
    except UnknownVersion as error:
        raise ApiError(404, str(error.args[0]), "version", "unknown_version") from None
    return RolledBack(adapter=name, version=version, restored=body.version)


async def check_version(request: web.Request) -> Examined:
    """Test the version that is served; a good one takes the place of a broken one.

    "Broken" means that its language degenerated; the newest version that passes the test is published in its place.
    """
    services, name = services_of(request), adapter_name(request)
    await demand_free(services, name)
    version = services.engine.version(name)
    if version is None:
        raise unknown_adapter(name)
    services.engine.request_test(name)
    return Examined(adapter=name, version=version)


async def export(request: web.Request) -> web.StreamResponse:
    """The newest version on disk as a tar of a PEFT folder.

    The import takes the same tar; `X-Edged-Version` is the version's number.
    """
    services, name = services_of(request), adapter_name(request)
    versions = await asyncio.to_thread(services.store.read, lambda db: metrics.versions(db, name))
    saved = next((item for item in versions if item["on_disk"] and item["path"]), None)
    if saved is None and not versions and services.engine.version(name) is None:
        raise unknown_adapter(name)
    try:
        if saved is None:
            raise FileNotFoundError
        chunks = exported(Path(saved["path"]), services.engine.adapter_files.spec)
        pieces = chain([await asyncio.to_thread(next, chunks, b"")], chunks)
    except FileNotFoundError:
        # No version was saved, or a newer one replaced it meanwhile.
        message = f'adapter "{name}" has no version on disk yet: ask again in a moment'
        raise ApiError(409, message, code="not_saved_yet") from None
    headers = {"Content-Type": "application/x-tar", "X-Edged-Version": str(saved["version"])}
    return await send_pieces(request, "an export", headers, lambda: next(pieces, None))


async def import_adapter(request: web.Request) -> Imported:
    """Take a tar of a PEFT folder as a user's newest version.

    It becomes a new version, which can be rolled back.
    """
    services, name = services_of(request), request.match_info["name"]
    if not USER_NAME.fullmatch(name):
        raise bad_request(f'"{name[:80]}" cannot name a user', "name")
    reason = request.query.get("reason", IMPORT_REASONS[0])
    if reason not in IMPORT_REASONS:
        raise bad_request(f'reason = "{reason[:40]}": use {" or ".join(IMPORT_REASONS)}', "reason")
    spec = services.engine.adapter_files.spec
    if name in services.engine.adapter_files.left:
        message = f'"{name}" was forgotten, and files of it could not be deleted; the daemon\'s log says why, and '
        raise ApiError(409, f"{message}`edged adapters forget {name}` tries again", code="not_forgotten_yet")
    await demand_free(services, name)
    whose = caller_of(request).tenant
    services.claim("import", whose)
    try:
        weights, form = await uploaded(request, services, spec)
    finally:
        services.free("import", whose)
    version = await asyncio.wrap_future(services.engine.import_adapter(name, weights, reason, form))
    return Imported(adapter=name, version=version, reason=reason)


async def demand_free(services: Services, name: str) -> None:
    """Raise ApiError (409) while a fine-tuning job makes an adapter, where it is, or was, a job's checkpoint, and where
    another node writes it."""
    demand_writer(services, name)
    read = services.store.read
    if job := await asyncio.to_thread(read, lambda db: open_job_of(db, name)):
        raise ApiError(409, f'job "{job}" makes adapter "{name}": wait for its end, or cancel it', code="job_runs")
    if job := await asyncio.to_thread(read, lambda db: checkpoint_of(db, name)):
        told = f'adapter "{name}" is a checkpoint of job "{job}", which stays as it is: begin another job with it'
        raise ApiError(409, told, code="checkpoint")


def demand_writer(services: Services, name: str) -> None:
    """Raise ApiError (409) where another node of a fleet writes an adapter: what changed here would be lost."""
    if services.engine.follows(name):
        way_out = "ask at the fleet's ingress, which knows the one that does"
        raise ApiError(409, f'adapter "{name}" is written by another node: {way_out}', code="not_writer")


async def uploaded(
    request: web.Request, services: Services, spec: LoraSpec
) -> tuple[dict[str, torch.Tensor], AdapterForm]:
    """Return the weights that a request uploads, and their form. Raises ApiError."""
    most = max_bytes(spec) + _TAR_OVERHEAD
    prefix = f"{SCRATCH}import-"
    with tempfile.TemporaryDirectory(prefix=prefix, dir=services.store.path.parent, ignore_cleanup_errors=True) as name:
        archive, files = Path(name) / "upload.tar", Path(name) / "files"
        size = min(most, request.content_length or most)
        try:
            async with upload_in_time(services.settings.limits.body_s, size):
                await receive(request, archive, most)
            reading = asyncio.ensure_future(_read_upload(services.reading_import, archive, files, most, spec))
            try:
                return await asyncio.shield(reading)
            except asyncio.CancelledError:
                # The threads read on, in this folder, though the client has left.
                await asyncio.wait([reading])
                raise
        except ImportRefused as error:
            raise ApiError(400, f"the adapter is not imported: {error}", code="import_refused") from None


async def _read_upload(
    turn: asyncio.Lock, archive: Path, files: Path, most: int, spec: LoraSpec
) -> tuple[dict[str, torch.Tensor], AdapterForm]:
    """Unpack and read an upload: one at a time is in memory, and none while a body comes. Raises ImportRefused."""
    async with turn:
        await asyncio.to_thread(unpack, archive, files, most)
        return await asyncio.to_thread(read_adapter, files, spec)


@contextlib.contextmanager
def full_disk_told(what: str) -> Iterator[None]:
    """Raise ApiError (507) in the place of an OSError that says that the disk is full."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        message = f"{what} cannot be written: {error.strerror}; free some room"
        raise ApiError(507, message, code="disk_full") from None


async def receive(request: web.Request, target: Path, most: int, too_large: str = _TOO_LARGE) -> None:
    """Write the request body to a file. Raises ApiError: 413 for more than `most` bytes, 507 where the disk is full."""
    size = 0
    with full_disk_told("the upload"), target.open("wb") as file:
        while piece := await request.content.read(1 << 18):
            size += len(piece)
            if size > most:
                raise ApiError(413, f"{too_large} ({most} bytes)", code="body_too_large")
            await asyncio.to_thread(file.write, piece)


class _Member(tarfile.TarInfo):
    """A member whose extended header, which tarfile searches in quadratic time, is bounded before it is read."""

    def _proc_member(self, tar: tarfile.TarFile) -> tarfile.TarInfo:
        if not self.isreg() and self.size > _MAX_EXTENDED:
            raise ImportRefused(f"a header in the archive has {self.size} bytes: at most {_MAX_EXTENDED}")
        member: tarfile.TarInfo = super()._proc_member(tar)  # type: ignore[misc]
        return member


def unpack(archive: Path, folder: Path, most: int, names: Collection[str] = (CONFIG, WEIGHTS)) -> None:
    """Extract the two files of an adapter, or those of `names`, and nothing else. Raises ImportRefused."""
    folder.mkdir()
    try:
        # "r:" and not "r": nothing is decompressed, so the contents cannot exceed the upload.
        with tarfile.open(archive, "r:", tarinfo=_Member) as tar:
            for number, member in enumerate(tar, 1):
                if number > _MAX_MEMBERS:
                    raise ImportRefused(f"the archive has more than {_MAX_MEMBERS} members: an adapter has two files")
                _check_member(member, most)
                # Members may overlap in the archive, so the sum of their stated sizes is what is limited.
                most -= member.size
                name = PurePosixPath(member.name).name
                if name in names:
                    _extract(tar, member, folder / name)
                elif name.endswith((".bin", ".pt", ".pth", ".pkl", ".ckpt")):
                    # An empty file in its place, so that the refusal can name the format; its bytes are not read.
                    (folder / "adapter_model.bin").touch()
    except ImportRefused:
        raise
    except (tarfile.TarError, ValueError, RecursionError) as error:
        raise ImportRefused(f"the upload is not a tar archive ({error}): send one that is not compressed") from None


def _extract(tar: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> None:
    """Write a member to a new file. Raises ImportRefused where the file exists."""
    source = tar.extractfile(member)
    assert source is not None
    try:
        with source, path.open("xb") as target:
            shutil.copyfileobj(source, target)
    except FileExistsError:
        raise ImportRefused(f"{path.name} is in the archive twice: nobody can tell which one is meant") from None


def _check_member(member: tarfile.TarInfo, most: int) -> None:
    """Raise ImportRefused for a member that leaves the folder, is no plain file, or is larger than `most` bytes."""
    path = PurePosixPath(member.name)
    if path.is_absolute() or ".." in path.parts:
        raise ImportRefused(f'"{member.name[:200]}" in the archive leads out of it')
    # A sparse file has a few bytes in the archive and any number when it is unpacked.
    if member.issparse() or not (member.isfile() or member.isdir()):
        raise ImportRefused(f'"{member.name[:200]}" in the archive is neither a file nor a folder')
    if member.size > most:
        excess = member.size - most
        raise ImportRefused(f'with "{member.name[:200]}" the archive is {excess} bytes too large for this model')


async def forget(request: web.Request) -> Forgotten:
    """Forget an adapter and everything that came from its user.

    Deletes its versions on every base model, and all completions, signals and pairs of its user.
    """
    services, name, caller = services_of(request), adapter_name(request), caller_of(request)
    if not caller.may("admin"):
        services.limits.erasure(caller.tenant)
    # Shielded from the client's disconnect: what is half forgotten would be learned again at the next start.
    forgetting = asyncio.create_task(_erase(services, name))
    services.forgetting.add(forgetting)
    forgetting.add_done_callback(services.forgetting.discard)
    done = await asyncio.shield(forgetting)
    if done is None:
        raise unknown_adapter(name)
    return Forgotten(adapter=name, forgotten=True, **done)


async def _erase(services: Services, name: str) -> dict[str, Any] | None:
    run = partial(copy_context().run, forget_user, services, name)
    done = await asyncio.get_running_loop().run_in_executor(services.eraser, run)
    await services.runs.forget_user(name)
    await services.rounds.forget_user(name)
    return done


def _current(services: Services, summary: dict[str, Any]) -> dict[str, Any]:
    """Return `summary` with the version that is served now, which the store records a moment later."""
    version = services.engine.version(summary["adapter"])
    return summary if version is None else {**summary, "version": version}


def adapter_name(request: web.Request) -> str:
    """The adapter that a URL names. Raises ApiError for a name that none can have (404)."""
    name = request.match_info["name"]
    if not USER_NAME.fullmatch(name):
        raise unknown_adapter(name)
    return name


def unknown_adapter(name: str) -> ApiError:
    """Build the error of a name that no adapter has (404)."""
    if not USER_NAME.fullmatch(name):
        return ApiError(404, NO_USER_NAME.format(name[:80]), "name", "unknown_adapter")
    return ApiError(404, f'adapter "{name[:200]}" does not exist: feedback creates it', "name", "unknown_adapter")
