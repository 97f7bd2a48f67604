"""`/v1/leases`: who writes an adapter in a fleet, and copies of a user for the other nodes. For the ingress alone."""

import asyncio
import contextlib
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from aiohttp import web
from sqlite_utils import Database

from edged.align.adapters.adapter import MANIFEST, OPTIMIZER, AdapterError, Snapshot, UnknownAdapter
from edged.align.adapters.peft_import import CONFIG, WEIGHTS, ImportRefused, max_bytes
from edged.align.versions import VersionsDiffer
from edged.api.adapters import demand_free, full_disk_told, receive, unknown_adapter, unpack
from edged.api.requests import CopiedPairsRequest, HandedOnRequest, LeaseRequest, queried_integer, read_body
from edged.api.responses import CopiedPairs, Leases, LeaseTaken, PairsTaken
from edged.api.services import Services, services_of
from edged.http.errors import ApiError, bad_request, send_pieces, upload_in_time
from edged.settings.access import USER_NAME
from edged.settings.fleet import NODE_NAME
from edged.store import utc_now, utc_text
from edged.store.archive import archive, member
from edged.store.data_dir import SCRATCH
from edged.store.fleet.copies import Copied, copied_pairs, copied_user, hand_on, take_pairs, take_user
from edged.store.fleet.leases import Lease, get_lease, known_adapters, set_lease, unsent_pairs

_ROWS = "rows.json"
_PARTS = (CONFIG, WEIGHTS, OPTIMIZER, MANIFEST)
"""Files of a version: the manifest is the last one."""
_MAX_ROWS_BYTES = 1 << 30
_AT_ONCE, _AT_ONCE_BYTES = 32, 1 << 17
"""Most pairs that are handed on at once, and the characters from which on no further one is added."""
_MAX_EPOCH = 1 << 53
_turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
"""What changes an adapter's writer or its copy takes turns."""


async def list_leases(request: web.Request) -> Leases:
    """Every adapter that this node knows, with its writer."""
    services = services_of(request)
    here = services.settings.api.node
    found = await asyncio.to_thread(services.store.read, lambda db: known_adapters(db, here))
    return Leases(leases=[{**row, "version": services.engine.version(row["adapter"]) or 0} for row in found])


async def put_lease(request: web.Request) -> LeaseTaken:
    """Take in who writes an adapter from now on.

    Where it was this node, its step under way ends first, and its version is on disk. Of two leases the greater pair of
    epoch and node holds.
    """
    services, name = services_of(request), _name(request)
    body = await read_body(request, LeaseRequest.checked)
    lease, here = Lease(body.epoch, body.node), _here(services)
    async with _turn(name):
        followed = services.engine.follows(name)
        await _hold(services, name, lease)
        if lease.node != here:
            version = await asyncio.wrap_future(services.engine.follow(name))
        else:
            version = await _write_on(services, name, body.newest, followed)
    services.feed.tell_lease(name, lease.node, lease.epoch, version)
    return LeaseTaken(adapter=name, node=lease.node, epoch=lease.epoch, version=version)


async def _hold(services: Services, name: str, lease: Lease) -> None:
    """Store a lease. Raises ApiError (409) where a greater one is known, or this node writes the adapter."""

    def hold(db: Database) -> None:
        _demand_less(db, name, lease, services)
        set_lease(db, name, lease)

    await asyncio.wrap_future(services.store.write(hold))


def _demand_less(db: Database, name: str, lease: Lease, services: Services) -> None:
    known = get_lease(db, name)
    if known is None and not lease.epoch and services.engine.version(name) is not None:
        known = Lease(0, services.settings.api.node)
    if known is not None and (lease < known or (lease.node != known.node and lease.epoch == known.epoch == 0)):
        message = f'node "{known.node}" writes adapter "{name}" with epoch {known.epoch}'
        raise ApiError(409, f'{message}, and "{lease.node}" with {lease.epoch} does not', code="newer_lease")


async def _write_on(services: Services, name: str, after: int, followed: bool) -> int:
    """Write an adapter from now on, and learn its open pairs where it was `followed`; returns its version."""
    version = await asyncio.wrap_future(services.engine.take_over(name, after))
    if followed:
        await asyncio.to_thread(services.feedback_intake.learn_anew, name)
    return version


async def get_state(request: web.Request) -> web.StreamResponse:
    """A copy of a user: the newest version with AdamW's moments, all pairs, and the user's words, as a tar.

    Raises ApiError (404) for one of whom nothing is here, as after a forgetting.
    """
    services, name = services_of(request), _name(request)

    def known(db: Database) -> bool:
        return get_lease(db, name) is not None or any(copied_user(db, name).values())

    if services.engine.version(name) is None and not await asyncio.to_thread(services.store.read, known):
        raise unknown_adapter(name)
    if not services.engine.follows(name):
        await demand_free(services, name)
    with contextlib.suppress(UnknownAdapter):  # nothing was learned yet
        await asyncio.wrap_future(services.engine.save(name))
    # What versions after these files learn is in the rows, and waits at the other node to be learned again.
    files = await asyncio.to_thread(_opened, services, name)
    rows = json.dumps(await asyncio.to_thread(services.store.read, lambda db: copied_user(db, name))).encode()
    pieces = chain(member(_ROWS, len(rows), [rows]), archive(files))
    return await send_pieces(request, "a copy", {"Content-Type": "application/x-tar"}, lambda: next(pieces, None))


def _opened(services: Services, name: str) -> list[Any]:
    """Open the files of the newest version; being open, they stay readable if it is removed."""
    files = services.engine.adapter_files
    version, _ = files.newest(name)
    return [(files.path(name, version) / part).open("rb") for part in _PARTS] if version else []


@dataclass(frozen=True, slots=True)
class _Received:
    rows: Copied
    snapshot: Snapshot | None
    known: bool
    """Whether this node has that version already."""


async def put_state(request: web.Request) -> LeaseTaken:
    """Take in a copy of a user, whose writer is `node` with `epoch`.

    Where that is this node, which had a copy before, it writes from now on.
    """
    services, name, here = services_of(request), _name(request), _here(services_of(request))
    lease = Lease(queried_integer(request, "epoch", 0, 0, _MAX_EPOCH), request.query.get("node", ""))
    if not NODE_NAME.fullmatch(lease.node):
        raise bad_request('"node" names the writer', "node")
    received = await _received(request, services, name)
    version = received.snapshot.version if received.snapshot is not None else 0
    async with _turn(name):
        if name in services.forgetting_stages:
            raise ApiError(409, f'user "{name}" is being forgotten', code="not_forgotten_yet")
        followed = services.engine.follows(name)
        if lease.node == here:
            if not followed:
                raise ApiError(409, f'this node has no copy of "{name}" yet: send one first', code="no_copy")
            services.store.read(lambda db: _demand_less(db, name, lease, services))
        else:
            await _hold(services, name, lease)
            if not followed:
                await asyncio.wrap_future(services.engine.follow(name))
        taken = services.store.write(lambda db: take_user(db, name, received.rows, version, lease.epoch))
        await asyncio.wrap_future(taken)
        if received.snapshot is not None and not received.known:
            try:
                await asyncio.wrap_future(services.engine.adopt(received.snapshot))
            except VersionsDiffer as error:
                raise ApiError(409, f"{error}", code="newer_here", param=str(error.newest)) from None
        services.tastes.refit(name)
        await asyncio.wrap_future(services.preferences.change(name, lambda db: None))
        if lease.node == here:
            await _hold(services, name, lease)
            await _write_on(services, name, 0, followed)
    services.feed.tell_lease(name, lease.node, lease.epoch, version)
    return LeaseTaken(adapter=name, node=lease.node, epoch=lease.epoch, version=version)


async def _received(request: web.Request, services: Services, name: str) -> _Received:
    """Receive a copy and read it. Raises ApiError."""
    most = 4 * max_bytes(services.engine.adapter_files.spec) + _MAX_ROWS_BYTES
    folder = services.store.path.parent
    with (
        full_disk_told("the copy"),
        tempfile.TemporaryDirectory(prefix=f"{SCRATCH}copy-", dir=folder, ignore_cleanup_errors=True) as scratch,
    ):
        tar, files = Path(scratch) / "copy.tar", Path(scratch) / "files"
        async with upload_in_time(services.settings.limits.body_s, request.content_length or most):
            await receive(request, tar, most)

        def read() -> _Received:
            unpack(tar, files, most, (*_PARTS, _ROWS))
            rows = json.loads((files / _ROWS).read_bytes())
            if not (files / MANIFEST).exists():
                return _Received(rows, None, False)
            found = services.engine.adapter_files.received(files)
            if found.adapter != name:
                raise ImportRefused(f'it is a copy of "{found.adapter}"')
            return _Received(rows, found, services.engine.adapter_files.has(name, found.version, files))

        try:
            with full_disk_told("the copy"):
                return await asyncio.to_thread(read)
        except (AdapterError, ImportRefused, OSError, ValueError) as error:
            raise ApiError(400, f'the copy of "{name}" cannot be used: {error}', code="import_refused") from None


async def get_pairs(request: web.Request) -> CopiedPairs:
    """The oldest pairs of this node that an adapter's writer, another node, may not have."""
    services, name, here = services_of(request), _name(request), _here(services_of(request))

    def read(db: Database) -> Copied:
        return copied_pairs(db, list(_few(db, unsent_pairs(db, name, here, _AT_ONCE))))

    return CopiedPairs.model_validate(await asyncio.to_thread(services.store.read, read))


def _few(db: Database, pair_ids: list[int]) -> Iterator[int]:
    """Yield the first pair, and further ones while they are short."""
    size = 0
    for pair_id in pair_ids:
        if size < _AT_ONCE_BYTES:
            yield pair_id
        size += len(json.dumps(copied_pairs(db, [pair_id])))


async def post_pairs(request: web.Request) -> PairsTaken:
    """Take in pairs of another node, and learn those that are new; 200 means that all are on disk."""
    services, name = services_of(request), _name(request)
    body = await read_body(request, CopiedPairsRequest.checked)
    async with _turn(name):
        if services.engine.follows(name):
            raise ApiError(409, f'this node does not write adapter "{name}"', code="not_writer")

        def take(db: Database) -> tuple[list[int], list[int]]:
            fresh, dropped = take_pairs(db, body.model_dump(), utc_text(utc_now()))
            services.quota.learned(db, name, fresh)
            return fresh, dropped

        fresh, dropped = await asyncio.wrap_future(services.store.write(take))
    if dropped:
        services.engine.withdraw(dropped)
    services.feedback_intake.learn_soon(fresh)
    return PairsTaken(adapter=name, pairs=len(fresh))


async def put_pairs(request: web.Request) -> PairsTaken:
    """Record that the writer has pairs of this node on its disk."""
    services, name = services_of(request), _name(request)
    body = await read_body(request, HandedOnRequest.checked)
    await asyncio.wrap_future(services.store.write(lambda db: hand_on(db, body.origins, body.epoch)))
    return PairsTaken(adapter=name, pairs=len(body.origins))


def _turn(name: str) -> asyncio.Lock:
    return _turns.setdefault(name, asyncio.Lock())


def _name(request: web.Request) -> str:
    name = request.match_info["name"]
    if not USER_NAME.fullmatch(name):
        raise unknown_adapter(name)
    return name


def _here(services: Services) -> str:
    """Return this node's name. Raises ApiError (409) where it has none."""
    if not services.settings.api.node:
        raise ApiError(409, "this daemon has no name in a fleet: set api.node", code="no_node_name")
    return services.settings.api.node
