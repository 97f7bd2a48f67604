"""Errors in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}` with an HTTP status."""

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import KW_ONLY, dataclass
from typing import Any

from aiohttp import web

log = logging.getLogger("edged.api")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_SLOWEST = 256 << 10
"""Bytes a second: an upload that is slower on average is aborted."""
_KINDS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
MEANINGS = {
    400: "Something in the request cannot be done; `param` names it.",
    401: "TCP without a token that is known.",
    403: "This caller may not, or not that much.",
    404: "The thing named is not there.",
    408: "The body came too slowly.",
    409: "Not yet: ask again in a moment.",
    413: "The body is larger than api.max_body_kb.",
    429: "Too many requests; `Retry-After` says how long to wait.",
    500: "edged's own failure; its log has the details.",
    507: "The disk is full.",
    503: "Not now: loading, draining, stopped, or the disk cannot be written.",
}
"""The description of each error status in the OpenAPI document."""


@dataclass(eq=False)
class ApiError(Exception):
    """An error response. `param` names the field at fault, `code` is for programs, `user` is for the log."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    _: KW_ONLY
    retry_after_s: float = 1.0
    """Seconds in `Retry-After`, for statuses 429 and 503."""
    user: str | None = None
    allowed: str = ""
    """The `Allow` header of a 405: the methods that the URL takes."""

    def __str__(self) -> str:
        return self.message

    def body(self) -> dict[str, Any]:
        """The JSON body."""
        kind = _KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> web.Response:
        """The HTTP response, with its headers."""
        response = web.json_response(self.body(), status=self.status)
        if self.allowed:
            response.headers["Allow"] = self.allowed
        if self.status in (429, 503):
            response.headers["Retry-After"] = str(math.ceil(self.retry_after_s))
        return response


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """An ApiError with status 400."""
    return ApiError(400, message, param, code)


def http_error(request: web.Request, error: web.HTTPException) -> ApiError:
    """Return the error response for a request that aiohttp refuses: mostly a URL or method that no route has."""
    asked = f"{request.method} {request.path[:200]}"
    match error:
        case web.HTTPMethodNotAllowed():
            takes = ", ".join(sorted(error.allowed_methods))
            message, allowed = f"{asked}: this URL takes {takes}", error.headers["Allow"]
            return ApiError(405, message, code="method_not_allowed", allowed=allowed)
        case web.HTTPNotFound():
            return ApiError(404, f"{asked}: no such URL; GET /openapi.json lists all", code="unknown_url")
        case web.HTTPRequestEntityTooLarge():
            return ApiError(413, "the request body is larger than api.max_body_kb allows", code="body_too_large")
        case _:
            return ApiError(error.status, error.text or error.reason or "the request failed", code="http_error")


@asynccontextmanager
async def upload_in_time(body_s: float, size: int) -> AsyncIterator[None]:
    """Raise ApiError (408) where an upload of so many bytes takes longer than `body_s` and its size allow."""
    try:
        async with asyncio.timeout(body_s + size / _SLOWEST):
            yield
    except TimeoutError:
        allowed = f"{body_s:g} s (limits.patience) and a second for every {_SLOWEST} bytes"
        raise ApiError(408, f"the body did not come within {allowed}", code="body_too_slow") from None


async def send_pieces(
    request: web.Request, what: str, headers: Mapping[str, str], next_piece: Callable[[], bytes | None]
) -> web.StreamResponse:
    """Stream pieces of `what` (such as "an export"), each made in a worker thread, until `next_piece` returns None.

    No exception is raised, since the status is sent already: a client that left is logged in one line; any other error
    is logged with its traceback and closes the connection.
    """
    response = web.StreamResponse(headers=headers)
    await response.prepare(request)
    try:
        while (piece := await asyncio.to_thread(next_piece)) is not None:
            await response.write(piece)
    except ConnectionResetError:
        log.info("a client left in the middle of %s", what)
    except Exception:
        # The client notices by the missing end.
        log.exception("%s broke off", what)
        if request.transport is not None:
            request.transport.close()
    return response
