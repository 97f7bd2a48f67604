"""`/v1/starts`: the adapters that users may begin with, what a user's pairs say of them, and the one of all users."""

import asyncio
import logging
from dataclasses import asdict

from aiohttp import web

from edged.align.adapters.adapter import AdapterError, UnknownAdapter
from edged.align.journal import load_choices
from edged.align.starts import START_NAME
from edged.api.adapters import adapter_name, full_disk_told, unknown_adapter, uploaded
from edged.api.responses import StartAdded, StartList, StartRemoved, StartScores
from edged.api.services import Services, services_of
from edged.engine.request import EngineStopping
from edged.http.errors import ApiError, bad_request
from edged.store import StoreError

log = logging.getLogger("edged.api")


async def list_starts(request: web.Request) -> StartList:
    """The starts that users may begin with."""
    services = services_of(request)
    starts, files = services.engine.starts(), services.engine.start_files
    listed = [
        {**asdict(start), "default": name == services.settings.starts.default} for name, start in sorted(starts.items())
    ]
    shelved = await asyncio.to_thread(files.shelved, starts)
    return StartList(starts=listed, shelved=shelved, max=services.settings.starts.max)


async def put_start(request: web.Request) -> StartAdded:
    """Take a tar of a PEFT folder as a start.

    It is measured on neutral text, then scored on users' pairs; one of this name is replaced.
    """
    services, name = services_of(request), request.match_info["name"]
    if not START_NAME.fullmatch(name):
        raise bad_request(f'"{name[:80]}" cannot name a start: use up to 32 letters, digits and "-"', "name")
    _demand_place(services, name)
    services.claim("start")
    try:
        spec = services.engine.start_files.spec
        weights, form = await uploaded(request, services, spec)
        if (form.shapes, form.scalings) != (spec.form.shapes, spec.form.scalings):
            way_out = f"train a LoRA of align.rank = {spec.rank}, align.alpha = {spec.alpha:g} and align.target_modules"
            raise ApiError(400, f'start "{name}" has another form than [align] says: {way_out}', code="import_refused")
        _demand_place(services, name)
        with full_disk_told("the start"):
            start = await asyncio.to_thread(services.engine.start_files.add, name, weights)
        services.engine.restore_choices(await asyncio.to_thread(services.store.read, load_choices))
        await asyncio.wrap_future(services.engine.add_start(start))
    finally:
        services.free("start")
    return StartAdded(name=name, added_at=start.added_at, scale=start.scale)


async def delete_start(request: web.Request) -> StartRemoved:
    """Remove a start.

    Users who began with it keep what they have.
    """
    services, name = services_of(request), request.match_info["name"]
    if name not in services.engine.starts():
        known = ", ".join(sorted(services.engine.starts())) or "none"
        raise ApiError(404, f'there is no start "{name[:80]}": known are {known}', "name", "unknown_start")
    if name == services.settings.starts.default:
        raise ApiError(409, f'starts.default is "{name}": name another one there first', "name", "start_in_use")
    await asyncio.wrap_future(services.engine.remove_start(name))
    await asyncio.to_thread(services.engine.start_files.remove, name)
    return StartRemoved(name=name, removed=True)


async def get_scores(request: web.Request) -> StartScores:
    """What a user's pairs say of each start.

    They are scored in spare time, up to 32 pairs at each new one.
    """
    services, name = services_of(request), adapter_name(request)
    if services.engine.version(name) is None:
        raise unknown_adapter(name)
    choice = await asyncio.wrap_future(services.engine.choice(name))
    scores = [asdict(score) for score in choice.verdict]
    pairs = max((score.pairs for score in choice.verdict), default=0)
    return StartScores(adapter=name, start=choice.start, pairs=pairs, own_right=choice.own, scores=scores)


async def begin_with_default(services: Services, user: str | None) -> None:
    """Have a user of whom nothing is known begin with `starts.default`, where that is set and its language measured."""
    engine, default = services.engine, services.settings.starts.default
    if not default or user is None or engine.version(user) is not None or ("begin", user) in services.busy:
        return
    start = engine.starts().get(default)
    known = engine.follows(user) or user in engine.adapter_files.left or services.job_runner.adapters.owner(user)
    if start is None or not start.scale or known:
        return
    services.claim("begin", user)
    try:
        await asyncio.wrap_future(engine.take_start(user, start))
    except (AdapterError, UnknownAdapter, EngineStopping, StoreError) as error:
        log.warning('%s does not begin with start "%s": %s', user, default, error)
    finally:
        services.free("begin", user)


def _demand_place(services: Services, name: str) -> None:
    """Raise ApiError (409) where there are as many starts as may be."""
    starts, most = services.engine.starts(), services.settings.starts.max
    if name not in starts and len(starts) >= most:
        way_out = "remove one with `edged starts remove NAME`, or raise starts.max"
        raise ApiError(
            409, f"there are {len(starts)} starts, and starts.max = {most}: {way_out}", code="too_many_starts"
        )
