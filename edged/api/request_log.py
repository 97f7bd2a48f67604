"""The request log: an id for each request, and one log line when it ends."""

import asyncio
import logging
import re
import secrets
import time
from typing import Any

from aiohttp import web

from edged.api.errors import as_api_error
from edged.api.services import LIFECYCLE
from edged.http.access import CALLER
from edged.http.checks import PROBES
from edged.http.errors import ApiError, Handler, http_error
from edged.runtime import logs

log = logging.getLogger("edged.api")

HEADER = "X-Request-Id"
_VALID = re.compile(r"[A-Za-z0-9._:@/+=-]{1,128}")
"""Ids that a client may give its request; they are returned in a header and logged."""
_ID, _CHOSEN, _NOTES = "request_id", "request_id_chosen", "request_notes"
"""Keys of a request for its id, whether the client chose that, and the fields of `note`."""
_ANSWERING = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
_BAD_TEXT = "bad_text"
"""The code of refusals that a model's files may be the reason of, as a chat template that refuses every chat."""
_FAILED_BURST, _FAILED_EVERY_S = 20, 1.0
"""Lines at once, then seconds between lines, for failed and slow requests of one route, status and problem."""
SLOW_TTFT_MS = 10_000.0
"""Milliseconds until the first token from which a request's line is a warning."""
_sparing = logs.Sparing(_FAILED_BURST, _FAILED_EVERY_S)
_SHOWN = ("caller", "peer", "code", "user", "completion_tokens", "ttft_ms", "left_out")
"""Fields that the sentence of a line shows."""


def name_request(request: web.Request, name: str) -> None:
    """Set a request's id to `name`, such as its completion's id, unless the client chose one."""
    if not request.get(_CHOSEN):
        request[_ID] = name
        logs.request_id.set(name)


def chosen_id(request: web.Request) -> str | None:
    """Return the id that the client gave its request; None where it gave none."""
    return str(request[_ID]) if request.get(_CHOSEN) else None


def note(request: web.Request, **fields: Any) -> None:
    """Add fields to a request's log line: counts and ids, never a user's text."""
    request[_NOTES] = {**request.get(_NOTES, {}), **fields}


@web.middleware
async def request_lines(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Give the request its id and, when it ends, its log line; answer 400 for an invalid id.

    Every exception of the handler becomes a response; streaming handlers report errors after the first byte.
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
        if not request.content.is_eof():
            # The rest of the body may still arrive, and must not be read as the next request.
            response.force_close()
        _write_line(request, response.status, time.monotonic() - started, error)
        return response
    except asyncio.CancelledError:
        note(request, left=True)
        _write_line(request, 499, time.monotonic() - started)
        raise
    finally:
        logs.request_id.reset(token)


async def add_request_id(request: web.Request, response: web.StreamResponse) -> None:
    """Add the request's id to the response headers (a handler of `on_response_prepare`)."""
    if name := request.get(_ID):
        response.headers[HEADER] = name


def _write_line(request: web.Request, status: int, seconds: float, error: ApiError | None = None) -> None:
    """Log a request: failed and slow ones as warnings, others at level debug."""
    route = request.match_info.route.resource
    path = route.canonical if route is not None else "unknown"
    fields: dict[str, Any] = {"method": request.method, "path": path, "status": status, "seconds": round(seconds, 4)}
    fields |= _refusal(request, error) | request.get(_NOTES, {})
    _note_outcome(request, path, status, error, fields.get("error", ""))
    problem = problem_of(request.path, fields, request.app[LIFECYCLE].phase)
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
    """Fields for a request that was answered with an error: its caller (or else its address), and the error's code."""
    if error is None:
        return {}
    caller = request.get(CALLER)
    who = {"caller": caller.label} if caller is not None else {"peer": request.remote or "a Unix socket"}
    return who | ({"code": error.code} if error.code else {}) | ({"user": error.user} if error.user else {})


def _note_outcome(request: web.Request, path: str, status: int, error: ApiError | None, broke_off: str) -> None:
    """Note how a request for an answer ended, but for those that were refused through the caller's own doing."""
    services = request.app[LIFECYCLE].services
    if services is None or path not in _ANSWERING or request.app[LIFECYCLE].phase != "ready":
        return
    tenant = request[CALLER].tenant if CALLER in request else ""
    if error is not None and (status >= 500 or error.code == _BAD_TEXT):
        services.outcomes.note("requests", tenant, error.message)
    elif status < 400:
        services.outcomes.note("requests", tenant, broke_off)


def problem_of(path: str, fields: dict[str, Any], phase: str) -> str:
    """Return why a request's line is a warning, in a phase of the daemon's life; "" for none."""
    status = fields["status"]
    if path in PROBES:
        return ""
    if error := fields.get("error"):
        return f"failed ({error})"
    # While the model is loading, and from SIGTERM on, 503 is the expected answer.
    if status >= 500 and phase == "ready":
        return f"failed ({status})"
    if status in (401, 403, 429):
        return f"refused ({status})"
    return "slow" if fields.get("ttft_ms", 0.0) > SLOW_TTFT_MS else ""
