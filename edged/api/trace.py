"""`GET /v1/trace?seconds=N`: a trace of the engine's last N seconds, for ui.perfetto.dev."""

import json
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice

from aiohttp import web

import edged
from edged.api.services import services_of
from edged.http.errors import bad_request, send_pieces
from edged.observe.trace import Event, Tracer

MAX_SECONDS = 600
_ITERATIONS_A_PIECE = 16
"""Iterations that are converted at a time, so that the engine's thread never waits long for the interpreter."""


async def get_trace(request: web.Request) -> web.StreamResponse:
    """What the engine did, in Chrome's trace event format.

    The document has one event a line.
    """
    services, seconds = services_of(request), _seconds(request)
    since_s = time.monotonic() - seconds
    engine = services.engine
    records = [record for record in engine.iterations() if record.started_s + record.elapsed_s >= since_s]
    pieces = Tracer(engine.stats.labels.copy()).events(records)
    facts = {"edged": edged.__version__, "model": services.model, "seconds": seconds, "iterations": len(records)}
    document = _written(json.dumps({"displayTimeUnit": "ms", "otherData": facts}), pieces)
    return await send_pieces(request, "a trace", {"Content-Type": "application/json"}, lambda: next(document, None))


def _written(head: str, pieces: Iterator[list[Event]]) -> Iterator[bytes]:
    """Yield the document in pieces of some iterations each; `head` is a JSON object of the fields before the events."""
    yield f'{head[:-1]}, "traceEvents": [\n'.encode()
    separator = ""
    for some in iter(lambda: list(islice(pieces, _ITERATIONS_A_PIECE)), []):
        if events := [json.dumps(event, allow_nan=False) for piece in some for event in piece]:
            yield (separator + ",\n".join(events)).encode()
            separator = ",\n"
    yield b"\n]}\n"


def _seconds(request: web.Request) -> float:
    """The number in `?seconds=`. Raises ApiError."""
    text = request.query.get("seconds", "10")
    with suppress(ValueError):
        if 0.0 < float(text) <= MAX_SECONDS:
            return float(text)
    raise bad_request(f'seconds = "{text[:40]}" is not a number over 0 up to {MAX_SECONDS}', "seconds")
