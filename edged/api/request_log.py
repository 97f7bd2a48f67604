"""Each request's id, and the one line that the log has of it."""

import asyncio
import logging
import re
import secrets
import time
from typing import Any

from aiohttp import web

from edged.api.access import CALLER
from edged.api.errors import ApiError, Handler, as_api_error, http_error
from edged.api.services import LIFECYCLE
from edged.runtime import logs

log = logging.getLogger("edged.api")

HEADER = "X-Request-Id"
_VALID = re.compile(r"[A-Za-z0-9._:@/+=-]{1,128}")
"""What a client may call its request: it comes back in a header and stands in the log."""
_ID, _CHOSEN, _NOTES = "request_id", "request_id_chosen", "request_notes"
"""Where a request keeps its id, whether that is the client's choice, and what `note` was told."""
PROBES = ("/healthz", "/readyz")
_FAILED_BURST, _FAILED_EVERY_S = 20, 1.0
"""Of failed and slow requests of one route and status: a box that is overloaded need not say so a thousand times."""
_sparing = logs.Sparing(_FAILED_BURST, _FAILED_EVERY_S)
_SHOWN = ("caller", "peer", "code", "user", "completion_tokens", "ttft_ms", "left_out")
"""Fields that people want to see at once of a completion or a refusal."""


def name_request(request: web.Request, name: str) -> None:
    """Call a request `name`, such as its completion's id, unless the client has named it."""
    if not request.get(_CHOSEN):
        request[_ID] = name
        logs.request_id.set(name)


def note(request: web.Request, **fields: Any) -> None:
    """Say more of a request in its line: counts and ids, nobody's text."""
    request[_NOTES] = {**request.get(_NOTES, {}), **fields}


@web.middleware
async def request_lines(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Give the request its id and, when it ends, its line; 400 for an id that cannot be one.

    Every exception of the handler becomes an answer, unless the answer has begun (streams report their own).
    """
    given = request.headers.get(HEADER, "")
    valid = request[_CHOSEN] = bool(_VALID.fullmatch(given))
    request[_ID] = given if valid else f"req-{secrets.token_hex(16)}"
    token = logs.request_id.set(request[_ID])
    started, error = time.monotonic(), None
    try:
        try:
            if given and not valid:
                message = f"{HEADER} {given[:40]!r} cannot be used: 1 to 128 of letters, digits and . _ : @ / + = -"
                raise ApiError(400, message, HEADER, "bad_request_id")
            response = await handler(request)
        except Exception as failure:
            error = http_error(request, failure) if isinstance(failure, web.HTTPException) else as_api_error(failure)
            response = error.response()
        _write_line(request, response.status, time.monotonic() - started, error)
        return response
    except asyncio.CancelledError:
        note(request, left=True)
        _write_line(request, 499, time.monotonic() - started)
        raise
    finally:
        logs.request_id.reset(token)


async def add_request_id(request: web.Request, response: web.StreamResponse) -> None:
    """Every answer names its request (a handler of `on_response_prepare`)."""
    if name := request.get(_ID):
        response.headers[HEADER] = name


def _write_line(request: web.Request, status: int, seconds: float, error: ApiError | None = None) -> None:
    """Failed and slow requests are warnings; others only show at level debug."""
    route = request.match_info.route.resource
    path = route.canonical if route is not None else "unknown"
    fields: dict[str, Any] = {"method": request.method, "path": path, "status": status, "seconds": round(seconds, 4)}
    fields |= _refusal(request, error) | request.get(_NOTES, {})
    problem = _problem(request, fields)
    level = logging.WARNING if problem else logging.DEBUG
    if problem:
        missed = _sparing.left_out(f"{path} {status} {problem}")
        if missed is None:
            return
        if missed:
            fields["left_out"] = missed
    elif not log.isEnabledFor(level):
        return
    sentence = f"{request.method} {path}: {problem or status} after {seconds:.2f} s"
    if shown := ", ".join(f"{key} {fields[key]}" for key in _SHOWN if key in fields):
        sentence += f" ({shown})"
    logs.event(log, level, "request", sentence, request_id=request[_ID], **fields)


def _refusal(request: web.Request, error: ApiError | None) -> dict[str, Any]:
    """Of a request that was answered with an error: whose it was, and which error; of nobody known, where from."""
    if error is None:
        return {}
    caller = request.get(CALLER)
    who = {"caller": caller.label} if caller is not None else {"peer": request.remote or "a Unix socket"}
    return who | ({"code": error.code} if error.code else {}) | ({"user": error.user} if error.user else {})


def _problem(request: web.Request, fields: dict[str, Any]) -> str:
    """What was wrong; "" for nothing that anybody need hear of."""
    lifecycle, status = request.app[LIFECYCLE], fields["status"]
    if request.path in PROBES:
        return ""
    if error := fields.get("error"):
        return f"failed ({error})"
    # Before the model is there, and from SIGTERM on, 503 is what there is to say.
    if status >= 500 and lifecycle.phase == "ready":
        return f"failed ({status})"
    if status in (401, 403, 429):
        return f"refused ({status})"
    if (ttft_ms := fields.get("ttft_ms")) is None or lifecycle.services is None:
        return ""
    return "slow" if ttft_ms > lifecycle.services.settings.log.slow_ttft_s * 1e3 else ""
