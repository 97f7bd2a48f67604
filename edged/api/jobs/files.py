"""`/v1/files`: files of examples, taken in piece by piece; nothing half stays."""

import asyncio
import hashlib
import shutil
import tempfile
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO

from aiohttp import web

from edged.api.jobs.bodies import Deleted, FileList, FileObject
from edged.api.jobs.forms import FormReader
from edged.api.jobs.runner import stored_bound
from edged.api.requests import queried_integer
from edged.api.services import Services, services_of
from edged.http.access import Caller, caller_of
from edged.http.errors import ApiError, bad_request, send_pieces, upload_in_time
from edged.store.data_dir import SCRATCH
from edged.store.jobs import files

_PIECE = 1 << 18
_NOTHING = hashlib.sha256().hexdigest()
"""The digest of an empty file."""
MAX_FILES = 100
"""Most uploaded files that are kept of an account."""
_MAX_FIELDS, _MAX_FIELD = 16, 1024
_RESERVE = 64 << 20
"""Bytes that an upload leaves free on the disk."""
_LOOK_EVERY = 4 << 20
"""Bytes of an upload after which the room on the disk is looked at again."""
MAX_LISTED = 1000
_EXPIRES_S = 3600, 2_592_000
"""Least and most seconds after which a file may expire."""


async def upload(request: web.Request) -> FileObject:
    """Take a file of examples.

    A multipart form with `purpose` "fine-tune" and `file`; 200 means that the file is on disk.
    """
    services, caller = services_of(request), caller_of(request)
    demand_enabled(services)
    if services.store.suspect:
        raise ApiError(503, services.store.suspect, code="store_suspect")
    if not request.content_type == "multipart/form-data":
        raise bad_request('a file is sent as multipart/form-data with the fields "purpose" and "file"')
    services.claim("upload", caller.tenant)
    try:
        scratch = tempfile.mkdtemp(prefix=f"{SCRATCH}file-", dir=services.store.path.parent)
        try:
            return await _store_upload(request, services, caller, Path(scratch) / "file")
        finally:
            # Not by the event loop: a large file takes long.
            asyncio.get_running_loop().run_in_executor(None, shutil.rmtree, scratch, True)
    except ConnectionError:
        raise
    except OSError as error:
        raise ApiError(507, f"the file cannot be written: {error.strerror}", "file", "disk_full") from None
    finally:
        services.free("upload", caller.tenant)


async def _store_upload(request: web.Request, services: Services, caller: Caller, draft: Path) -> FileObject:
    """Receive a form into `draft`, and make a file of it. Raises ApiError."""
    most = await _bytes_left(services, caller)
    size = min(most, request.content_length or most)
    try:
        async with upload_in_time(services.settings.limits.body_s, size):
            fields, name, digest = await _receive(request, draft, most)
    except (ValueError, web.RequestPayloadError) as error:
        raise bad_request(f"the form cannot be read: {str(error)[:200]}", code="malformed_form") from None
    if fields.get("purpose") != "fine-tune":
        raise bad_request(f'purpose = "{fields.get("purpose", "")[:40]}": edged takes "fine-tune"', "purpose")
    if digest in ("", _NOTHING):
        raise bad_request(f'"file" is {"empty" if digest else "missing"}', "file")
    # Shielded from the client's disconnect: a file without its row would stay.
    about = (caller.tenant, name, "fine-tune", draft, digest, _expires_s(fields))
    return shown_file(await asyncio.shield(asyncio.to_thread(files.keep_file, services.store, *about)))


def _expires_s(fields: dict[str, str]) -> int:
    """Return the seconds after which a form wants its file deleted; 0: never. Raises ApiError."""
    anchor, seconds = (fields.get(f"expires_after[{name}]") for name in ("anchor", "seconds"))
    if anchor is None and seconds is None:
        return 0
    if anchor != "created_at":
        told = f'expires_after[anchor] = "{(anchor or "")[:40]}": it may be "created_at"'
        raise bad_request(told, "expires_after[anchor]")
    if not (seconds or "").isdecimal() or not _EXPIRES_S[0] <= int(seconds or 0) <= _EXPIRES_S[1]:
        told = f'expires_after[seconds] = "{(seconds or "")[:40]}": it may be {_EXPIRES_S[0]} to {_EXPIRES_S[1]}'
        raise bad_request(told, "expires_after[seconds]")
    return int(seconds or 0)


async def _bytes_left(services: Services, caller: Caller) -> int:
    """Return how many bytes the caller may add. Raises ApiError where that is none."""
    settings, folder = services.settings, services.store.path.parent
    count, kept = await asyncio.to_thread(services.job_runner.kept_of, caller.tenant)
    name, max_mb = stored_bound(settings)
    if count >= MAX_FILES or kept >= max_mb << 20:
        told = f"{MAX_FILES} files and {name} = {max_mb}"
        message = f"{count} uploaded files and {kept} bytes are kept of {caller.label}, and {told}: delete some"
        raise ApiError(403, message, "file", "storage_full")
    return min((max_mb << 20) - kept, _disk_room(folder))


def _disk_room(folder: Path) -> int:
    """Return how many bytes uploads may fill of the disk. Raises ApiError (507) where that is none."""
    free = shutil.disk_usage(folder).free - _RESERVE
    if free < 1:
        message = f"the disk has {free + _RESERVE} bytes of room, of which {_RESERVE} stay free: make room on it"
        raise ApiError(507, message, "file", "disk_full")
    return free


async def _receive(request: web.Request, draft: Path, most: int) -> tuple[dict[str, str], str, str]:
    """Return the fields of a form, the name of its file, which is written to `draft`, and the file's SHA-256 in hex.

    Raises ApiError, and ValueError for what is no form.
    """
    fields: dict[str, str] = {}
    name = digest = ""
    form = FormReader(request.content, request.headers.get("Content-Type", ""))
    for _ in range(_MAX_FIELDS):
        part = await form.next()
        if part is None:
            return fields, name, digest
        field, filename = part
        if field == "file" and not digest:
            name = (filename or "file")[:200].encode("utf-8", "replace").decode()
            digest = await _write(form, draft, most)
        else:
            value = bytearray()
            while piece := await form.read():
                value += piece
                if len(value) > _MAX_FIELD:
                    raise bad_request(f'field "{field[:40]}" is longer than {_MAX_FIELD} bytes')
            fields[field] = value.decode("utf-8", "replace")
    raise ValueError(f"it has more than {_MAX_FIELDS} fields")


async def _write(form: FormReader, draft: Path, most: int) -> str:
    """Write a part to a file; returns its SHA-256. Raises ApiError (413) for more than `most` bytes, and (507)."""
    sha, size, looked = hashlib.sha256(), 0, 0
    with draft.open("wb") as file:
        while piece := await form.read():
            size += len(piece)
            if size > most:
                bounds = "jobs.files_mb, limits.stored_mb and the room on the disk"
                raise ApiError(413, f"the file is larger than {most} bytes, by {bounds}", "file", "body_too_large")
            if size - looked > _LOOK_EVERY:
                # Others write, too.
                looked = size
                await asyncio.to_thread(_disk_room, draft.parent)
            await asyncio.to_thread(_write_piece, file, sha, piece)
    return sha.hexdigest()


def _write_piece(file: BinaryIO, sha: Any, piece: bytes) -> None:
    file.write(piece)
    sha.update(piece)


async def list_files(request: web.Request) -> FileList:
    """Files, newest first.

    The caller's own; an admin's are all.
    """
    services, caller = services_of(request), caller_of(request)
    limit, after = queried_integer(request, "limit", MAX_LISTED, 1, MAX_LISTED), queried_id(request)
    rest = (request.query.get("purpose"), request.query.get("order") == "asc")
    rows = await asyncio.to_thread(
        services.store.read, lambda db: files.list_files(db, owner_of(caller), after, limit + 1, *rest)
    )
    data = [shown_file(row) for row in rows[:limit]]
    first, last = (data[0].id, data[-1].id) if data else (None, None)
    return FileList(object="list", data=data, has_more=len(rows) > limit, first_id=first, last_id=last)


async def get_file(request: web.Request) -> FileObject:
    """One file."""
    return shown_file(await asyncio.to_thread(found_file, request, request.match_info["id"]))


async def content(request: web.Request) -> web.StreamResponse:
    """The content of a file."""
    row = await asyncio.to_thread(found_file, request, request.match_info["id"])
    store = services_of(request).store
    try:
        file = await asyncio.to_thread(lambda: files.content_of(store, row.id).open("rb"))
    except FileNotFoundError:
        raise _unknown(row.id, "id") from None
    with file:
        headers = {"Content-Type": "application/octet-stream", "Content-Length": str(row.bytes)}
        return await send_pieces(request, "a file", headers, lambda: file.read(_PIECE) or None)


async def delete(request: web.Request) -> Deleted:
    """Delete a file.

    Refused while a job needs it.
    """
    services = services_of(request)
    row = await asyncio.to_thread(found_file, request, request.match_info["id"])
    # Shielded from the client's disconnect: its content would stay.
    job = await asyncio.shield(asyncio.to_thread(files.delete_file, services.store, row.id))
    if job:
        message = f'file "{row.id}" is needed by job "{job}": cancel the job first'
        raise ApiError(409, message, "id", "file_in_use")
    return Deleted(id=row.id, object="file", deleted=True)


def found_file(request: web.Request, file_id: str, param: str = "id") -> files.FileRow:
    """Return a file of the caller's. Raises ApiError (404) for one that is unknown or another's."""
    row = services_of(request).store.read(lambda db: files.find_file(db, file_id)) if file_id.isascii() else None
    if row is None or not owns(caller_of(request), row.owner):
        raise _unknown(file_id, param)
    return row


def _unknown(file_id: str, param: str) -> ApiError:
    return ApiError(404, f'file "{file_id[:80]}" does not exist: POST /v1/files takes one', param, "unknown_file")


def shown_file(row: files.FileRow) -> FileObject:
    """Return a file as the API shows it."""
    about: dict[str, Any] = {"id": row.id, "bytes": row.bytes, "filename": row.filename, "purpose": row.purpose}
    about["expires_at"] = unix_s(row.expires_at) if row.expires_at else None
    return FileObject(object="file", created_at=unix_s(row.created_at), status="processed", **about)


def queried_id(request: web.Request) -> str:
    """Return the id after which a page begins; "" for the first one. Raises ApiError."""
    after = request.query.get("after", "")
    if not after.isascii():
        raise bad_request(f'after = "{after[:40]}" is no id', "after")
    return after


def owner_of(caller: Caller) -> str | None:
    """Return whose files and jobs a caller sees; None: everybody's."""
    return None if caller.may("admin") else caller.tenant


def owns(caller: Caller, owner: str) -> bool:
    """Whether a caller may see an owner's files and jobs."""
    return owner_of(caller) in (None, owner)


def unix_s(moment: str) -> int:
    """Return a moment of the database in seconds since 1970."""
    return int(datetime.fromisoformat(moment).timestamp())


def demand_enabled(services: Services) -> None:
    """Raise ApiError (409) where files and jobs are not taken."""
    settings, tuning = services.settings, services.engine.finetuning
    if not (settings.jobs.enabled and settings.align.enabled):
        which = "jobs.enabled" if settings.align.enabled else "align.enabled"
        raise ApiError(409, f"{which} is false: neither files nor jobs are taken", code="jobs_disabled")
    if not tuning.trains:
        raise ApiError(409, f"nothing is trained here: {tuning.report()['reason']}", code="jobs_disabled")
