"""The aiohttp application: routes, who may call them, and when.

Owns the table of routes and the checks before every one of them. Must not know what they do.
"""

from __future__ import annotations

import hmac
import ipaddress
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.typedefs import Middleware

from edged.api import adapters, completions, feedback, importing, models, quarantine, status
from edged.api.errors import ApiError, Handler, errors_as_json
from edged.api.services import LIFECYCLE, Lifecycle
from edged.config import ApiSettings

_PROBES = ("/healthz", "/readyz")
_ALWAYS = (*_PROBES, "/v1/status")


def make_app(settings: ApiSettings, lifecycle: Lifecycle) -> web.Application:
    """The application; it answers from the start, with 503 until `lifecycle` is ready."""
    app = web.Application(
        middlewares=[
            errors_as_json,
            _token_check(settings.token) if settings.token else _browser_check(settings.listen),
            _phase_check,
        ],
        client_max_size=settings.max_body_kb * 1024,
    )
    app[LIFECYCLE] = lifecycle
    app.add_routes(
        [
            web.post("/v1/chat/completions", completions.chat_completions),
            web.post("/v1/completions", completions.completions),
            web.get("/v1/models", models.list_models),
            web.get("/v1/models/{id:.+}", models.get_model),
            web.post("/v1/feedback", feedback.post_feedback),
            web.get("/v1/feedback", feedback.get_feedback),
            web.get("/v1/adapters", adapters.list_adapters),
            web.get("/v1/adapters/{name}", adapters.get_adapter),
            web.delete("/v1/adapters/{name}", adapters.forget),
            web.post("/v1/adapters/{name}/rollback", adapters.rollback),
            web.get("/v1/adapters/{name}/export", adapters.export),
            web.post("/v1/adapters/{name}/import", importing.import_adapter),
            web.get("/v1/quarantine", quarantine.list_quarantined),
            web.post("/v1/quarantine/{pair}", quarantine.decide),
            web.get("/v1/status", status.status),
            web.get("/healthz", status.healthz),
            web.get("/readyz", status.readyz),
        ]
    )
    return app


def _token_check(token: str) -> Middleware:
    """Callers over TCP show the token; who may open the Unix socket is the file system's matter."""
    expected = f"Bearer {token}".encode()

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if _over_tcp(request) and request.path not in _PROBES:
            shown = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
            if not hmac.compare_digest(shown, expected):
                raise ApiError(
                    401, 'send "Authorization: Bearer TOKEN" with api.token', code="invalid_api_key",
                    kind="authentication_error",
                )  # fmt: skip
        return await handler(request)

    return check


def _browser_check(listen: str) -> Any:
    """Without a token, web pages that this box's browser shows must not reach the TCP listener.

    Another site's page says so in `Origin`; one whose name was pointed to this box (DNS rebinding) says so in `Host`,
    which must be loopback's or the name in `listen`.
    """
    own = _name_in(listen)

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if _over_tcp(request) and request.path not in _PROBES:
            host, origin = request.headers.get("Host", ""), request.headers.get("Origin")
            if not _is_loopback(_name_in(host)) and (not own or _name_in(host) != own):
                raise _forbidden(f'host "{host[:200]}" is not this box: use 127.0.0.1 or localhost', "forbidden_host")
            if origin is not None and origin.lower() != f"http://{host.lower()}":
                raise _forbidden(f'web pages of "{origin[:200]}" may not use edged', "forbidden_origin")
        return await handler(request)

    return check


def _name_in(host: str) -> str:
    """The name in NAME or NAME:PORT; "" where there is none."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _is_loopback(name: str) -> bool:
    try:
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _forbidden(message: str, code: str) -> ApiError:
    return ApiError(403, f"{message}; or set api.token", code=code, kind="permission_error")


def _over_tcp(request: web.Request) -> bool:
    name = request.transport.get_extra_info("sockname") if request.transport else None
    return isinstance(name, tuple)


@web.middleware
async def _phase_check(request: web.Request, handler: Handler) -> web.StreamResponse:
    """While the model is loading, and from SIGTERM on, nothing new is begun."""
    problem = request.app[LIFECYCLE].problem()
    if problem and request.path not in _ALWAYS:
        raise problem
    return await handler(request)
