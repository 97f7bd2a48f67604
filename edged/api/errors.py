"""What goes wrong, in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}` with the right status."""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from aiohttp import web

from edged.align.feedback.signals import FeedbackError
from edged.api.admission import QueueFull
from edged.api.limits import LimitReached
from edged.api.responses import Error, ErrorDetail
from edged.engine.request import EngineBusy, EngineStopping, RequestRefused
from edged.settings.load import ConfigError
from edged.store import StoreError
from edged.store.user_quota import StorageFull
from edged.text.tokenizer import TokenizerError

log = logging.getLogger("edged.api")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_HTTP_CODES = {401: "unauthorized", 404: "unknown_url", 405: "method_not_allowed", 413: "body_too_large"}
_KINDS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_RETRY_AFTER_S = 1.0
_SHOWN_CHARS = 200
"""Of a URL that is not there."""
ERROR: str = "error"
"""Where a request keeps the ApiError that it was answered with."""
_MEANINGS = {
    400: "Something in the request cannot be done; `param` names it.",
    401: "TCP without a token that is known.",
    403: "This caller may not, or not that much.",
    404: "The thing named is not there.",
    408: "The body came too slowly.",
    409: "Not yet: ask again in a moment.",
    413: "The body is larger than api.max_body_kb.",
    429: "Too many requests; `Retry-After` says how long to wait.",
    500: "edged's own failure; its log has the details.",
    503: "Not now: loading, draining, stopped, or the disk cannot be written.",
}


class ApiError(Exception):
    """An answer that is an error. `param` names the field at fault, `code` is for programs, `user` is for the log."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float = _RETRY_AFTER_S,
        user: str | None = None,
    ) -> None:
        super().__init__(message)
        self.user = user
        self.status, self.message, self.param, self.code = status, message, param, code
        self.retry_after_s = retry_after_s
        self.kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")

    def body(self) -> dict[str, Any]:
        """The JSON object."""
        detail = ErrorDetail(message=self.message, type=self.kind, param=self.param, code=self.code)
        return Error(error=detail).model_dump()

    def response(self, headers: Mapping[str, str] | None = None) -> web.Response:
        """The whole answer."""
        headers = dict(headers or {})
        if self.status in (429, 503):
            headers["Retry-After"] = str(math.ceil(self.retry_after_s))
        return web.json_response(self.body(), status=self.status, headers=headers, dumps=json.dumps)


def meaning_of(status: int) -> str:
    """What a status of an error says, for the OpenAPI document."""
    return _MEANINGS[status]


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """400: the request says something that cannot be done."""
    return ApiError(400, message, param=param, code=code)


def not_found(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """404: the thing named is not there."""
    return ApiError(404, message, param=param, code=code)


def unavailable(message: str, code: str) -> ApiError:
    """503: not now."""
    return ApiError(503, message, code=code)


def _too_much(message: str, code: str, retry_after_s: float, user: str | None = None) -> ApiError:
    return ApiError(429, message, code=code, retry_after_s=retry_after_s, user=user)


def as_api_error(error: Exception) -> ApiError:
    """What a client is told of any exception; what nobody foresaw is logged here and not told."""
    match error:
        case ApiError():
            return error
        case EngineStopping():
            return unavailable(str(error), "stopping")
        case QueueFull():
            return _too_much(str(error), "queue_full", error.retry_after_s)
        case LimitReached():
            return _too_much(str(error), "rate_limit_reached", error.retry_after_s, error.user)
        case EngineBusy():
            return _too_much(str(error), "queue_full", _RETRY_AFTER_S)
        case RequestRefused():
            return bad_request(str(error), code="request_refused")
        case FeedbackError():
            status = 404 if error.kind == "unknown_completion" else 400
            return ApiError(status, str(error), code=error.kind)
        case TokenizerError():
            return bad_request(str(error), code="bad_text")
        case StorageFull():
            return ApiError(403, str(error), code="storage_full")
        case ConfigError():
            return bad_request(str(error), code="bad_settings")
        case StoreError():
            log.error("%s", error)
            return unavailable(str(error), "store_failed")
        case web.HTTPException():
            return _http_error(error)
        case ConnectionResetError():
            # Nobody will read this.
            log.debug("a client left before its answer began")
            return unavailable("the client left", "client_left")
        case _:
            log.error("a request failed", exc_info=error)
            return ApiError(500, "edged failed on this request; its log has the details", code="internal_error")


def _http_error(error: web.HTTPException) -> ApiError:
    message = error.text or error.reason or "the request failed"
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        message = "the request body is larger than api.max_body_kb allows"
    return ApiError(error.status, message, code=_HTTP_CODES.get(error.status, "http_error"))


def _not_routed(request: web.Request, error: Exception) -> ApiError | None:
    """What to say of a URL or method that no route has; None for any other error."""
    asked = f"{request.method} {request.path[:_SHOWN_CHARS]}"
    if isinstance(error, web.HTTPMethodNotAllowed):
        takes = ", ".join(sorted(error.allowed_methods))
        return ApiError(405, f"{asked}: this URL takes {takes}", code=_HTTP_CODES[405])
    if isinstance(error, web.HTTPNotFound):
        return ApiError(404, f"{asked}: no such URL; GET /openapi.json lists all", code=_HTTP_CODES[404])
    return None


@web.middleware
async def errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every exception of a handler becomes an answer, unless the answer has begun (streams report their own)."""
    try:
        return await handler(request)
    except Exception as error:
        answer = request[ERROR] = _not_routed(request, error) or as_api_error(error)
        allowed = {"Allow": error.headers["Allow"]} if isinstance(error, web.HTTPMethodNotAllowed) else None
        return answer.response(allowed)


async def send_pieces(
    request: web.Request, what: str, headers: Mapping[str, str], next_piece: Callable[[], bytes | None]
) -> web.StreamResponse:
    """Answer with pieces of `what` (such as "an export"), each made on a worker's thread, until there is None.

    No error leaves, for the status is sent already: the log has a line for a client that left; any other error is
    logged with its traceback, and closes the connection.
    """
    response = web.StreamResponse(headers=headers)
    await response.prepare(request)
    try:
        while (piece := await asyncio.to_thread(next_piece)) is not None:
            await response.write(piece)
    except ConnectionResetError:
        log.info("a client left in the middle of %s", what)
    except Exception:
        # Only its missing end can tell the client.
        log.exception("%s broke off", what)
        if request.transport is not None:
            request.transport.close()
    return response
