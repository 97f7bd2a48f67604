"""`GET /v1/events`: iterations, status and learning of the daemon as server-sent events."""

import asyncio
from functools import lru_cache

from aiohttp import web

from edged.api.event_streams import EVENTS, MAX_BACKLOG, Event, EventReader, Feed
from edged.api.requests import queried_integer
from edged.api.services import LIFECYCLE, services_of
from edged.api.status import visible
from edged.http.access import Caller, caller_of
from edged.http.connections import has_begun
from edged.http.errors import ApiError, bad_request
from edged.http.json_format import dumps

_HEARTBEAT_S = 15.0
_HEARTBEAT = b": still here\n\n"
_MAX_READERS = 64
_MAX_OF_ONE = 8
"""Streams that one account or token may hold open: enough for a few pages, and no caller takes all."""
_RETRY = b"retry: 2000\n\n"
"""Milliseconds after which a browser that lost the stream reconnects."""


async def events(request: web.Request) -> web.StreamResponse:
    """What happens, as server-sent events.

    The stream runs until the client leaves or the daemon stops; `?events=` selects some of EVENTS.
    """
    feed, caller = services_of(request).feed, caller_of(request)
    wants, backlog = _wants(request), queried_integer(request, "backlog", 0, 0, MAX_BACKLOG)
    if "load" in wants:
        caller.demand_role("fleet")
    _demand_room(feed, caller)
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    reader = EventReader(wants, caller.speaks_for, lambda: _cut(request), caller.tenant)
    try:
        await feed.join(reader, request.headers.get("Last-Event-ID", ""), backlog)
        await response.prepare(request)
        has_begun(request)
        await response.write(_RETRY)
        while data := await _next(reader, caller):
            await response.write(data)
    except ConnectionResetError:
        # The client left, or read so slowly that its connection was aborted.
        pass
    finally:
        feed.readers.discard(reader)
    return response


def _demand_room(feed: Feed, caller: Caller) -> None:
    """Raise ApiError (429) when all streams are taken, or the caller's share of them."""
    if sum(reader.owner == caller.tenant for reader in feed.readers) >= _MAX_OF_ONE:
        full = f"{caller.label} reads {_MAX_OF_ONE} streams of events already: close one"
    elif len(feed.readers) >= _MAX_READERS:
        full = f"{_MAX_READERS} clients read events already"
    else:
        return
    raise ApiError(429, full, code="too_many_readers")


async def close_streams(app: web.Application) -> None:
    """End all streams (an `on_shutdown` handler of aiohttp)."""
    services = app[LIFECYCLE].services
    if services is not None:
        services.feed.close()


async def _next(reader: EventReader, caller: Caller) -> bytes:
    """Wait for the next bytes to send to a caller; b"" ends the stream."""
    try:
        event = await asyncio.wait_for(reader.waiting.get(), _HEARTBEAT_S)
    except TimeoutError:
        return _HEARTBEAT
    if event is None:
        return b""
    if event.name == "status":
        event = Event("status", visible(event.data, caller))
    return _encoded(event)


@lru_cache(maxsize=4)
def _encoded(event: Event) -> bytes:
    """Encode an event; cached, because all its readers take the same bytes at about the same time."""
    head = f"id: {event.id}\n" if event.id else ""
    return f"{head}event: {event.name}\ndata: {dumps(event.data)}\n\n".encode()


def _cut(request: web.Request) -> None:
    """Abort a connection with what it has buffered, which a reader that has stopped would never take."""
    if request.transport is not None:
        request.transport.abort()


def _wants(request: web.Request) -> frozenset[str]:
    """The event names in `?events=`; without it all but "load". Raises ApiError."""
    named = request.query.get("events")
    wants = frozenset(name for name in EVENTS if name != "load") if named is None else frozenset(named.split(","))
    if unknown := sorted(wants.difference(EVENTS)):
        raise bad_request(f'events = "{unknown[0][:40]}": use some of {", ".join(EVENTS)}, with commas', "events")
    return wants
