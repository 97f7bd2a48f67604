"""Errors in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}` with an HTTP status."""

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import KW_ONLY, dataclass
from typing import Any

from aiohttp import web

from edged.align.adapters.adapter import AdapterError
from edged.align.feedback.signals import FeedbackError
from edged.api.admission import LimitReached
from edged.api.responses import Error, ErrorDetail
from edged.engine.request import EngineBusy, EngineStopping, FirstTokenLate, RequestRefused
from edged.settings.load import ConfigError
from edged.store import StoreError
from edged.store.user_quota import PairQueueFull, StorageFull
from edged.text.tokenizer import TokenizerError

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
        return Error(error=ErrorDetail(message=self.message, type=kind, param=self.param, code=self.code)).model_dump()

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


_ANSWERS: dict[type[Exception], tuple[int, str]] = {
    EngineStopping: (503, "stopping"),
    LimitReached: (429, "rate_limit_reached"),
    FirstTokenLate: (429, "first_token_late"),
    EngineBusy: (429, "queue_full"),
    RequestRefused: (400, "request_refused"),
    TokenizerError: (400, "bad_text"),
    PairQueueFull: (429, "pair_queue_full"),
    StorageFull: (403, "storage_full"),
    ConfigError: (400, "bad_settings"),
    StoreError: (503, "store_failed"),
    AdapterError: (409, "adapter_unusable"),
}
"""The status and code of each exception whose message the client gets."""


def as_api_error(error: Exception) -> ApiError:
    """Return the error response for an exception; an unforeseen one is logged, and the client gets no details."""
    for kind, (status, code) in _ANSWERS.items():
        if isinstance(error, kind):
            if isinstance(error, StoreError):
                log.error("%s", error)
            retry_after_s, user = getattr(error, "retry_after_s", 1.0), getattr(error, "user", None)
            return ApiError(status, str(error), code=code, retry_after_s=retry_after_s, user=user)
    match error:
        case ApiError():
            return error
        case FeedbackError():
            return ApiError(404 if error.kind == "unknown_completion" else 400, str(error), code=error.kind)
        case ConnectionResetError():
            # The client is gone and will not read this.
            log.debug("a client left before its answer began")
            return ApiError(503, "the client left", code="client_left")
        case _:
            log.error("a request failed", exc_info=error)
            return ApiError(500, "edged failed on this request; its log has the details", code="internal_error")


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
    """Raise ApiError (408) where an upload of so many bytes takes longer than `limits.body_s` and its size allow."""
    try:
        async with asyncio.timeout(body_s + size / _SLOWEST):
            yield
    except TimeoutError:
        allowed = f"limits.body_s = {body_s:g} s and a second for every {_SLOWEST} bytes"
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
