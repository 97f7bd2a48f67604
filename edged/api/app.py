"""The aiohttp application: routes, who may call them, and when.

Owns the table of routes and the checks before every one of them. Must not know what they do.
"""

from __future__ import annotations

import asyncio
import warnings
from typing import Literal
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.typedefs import Middleware

from edged.api import (
    adapters,
    completions,
    events,
    feedback,
    importing,
    metrics,
    models,
    openapi,
    page,
    progress,
    quarantine,
    settings_route,
    status,
    storage,
    trace,
)
from edged.api.access import CALLER, Access, forbidden, is_loopback, over_tcp
from edged.api.connections import header_came
from edged.api.errors import ApiError, Handler, errors_as_json
from edged.api.request_log import add_request_id, request_lines
from edged.api.services import LIFECYCLE, Lifecycle
from edged.api.single_flight import SingleFlight
from edged.observe.observer import Observer
from edged.settings.access import Role
from edged.settings.load import AccessSettings, ApiSettings, LimitSettings

# A request's caller has a plain name, which aiohttp would rather have as an object.
warnings.filterwarnings("ignore", category=web.NotAppKeyWarning)

_PROBES = ("/healthz", "/readyz")
_ALWAYS = (*_PROBES, "/v1/status", "/metrics")
_ELSEWHERE = ("cross-site", "same-site")
_STREAMED = ("/v1/adapters/{name}/import",)

ROLES: dict[str, Role | Literal["anybody"]] = {
    "POST /v1/chat/completions": "use",
    "POST /v1/completions": "use",
    "GET /v1/models": "use",
    "GET /v1/models/{id}": "use",
    "POST /v1/feedback": "train",
    "GET /v1/feedback": "train",
    "GET /v1/feedback/{id}": "use",
    "GET /v1/adapters": "use",
    "GET /v1/adapters/{name}": "use",
    "DELETE /v1/adapters/{name}": "train",
    "POST /v1/adapters/{name}/rollback": "train",
    "POST /v1/adapters/{name}/mend": "train",
    "GET /v1/adapters/{name}/export": "train",
    "POST /v1/adapters/{name}/import": "train",
    "GET /v1/quarantine": "train",
    "POST /v1/quarantine": "train",
    "POST /v1/quarantine/{pair}": "train",
    "GET /v1/status": "use",
    "GET /v1/events": "use",
    "GET /metrics": "metrics",
    "GET /openapi.json": "anybody",
    "GET /": "anybody",
    "GET /page/{name}": "anybody",
    "GET /healthz": "anybody",
    "GET /readyz": "anybody",
}
"""The role that a route needs; one that is not here is for admins. For whom a caller may speak, its handler checks."""


def make_app(
    settings: ApiSettings,
    lifecycle: Lifecycle,
    access: Access | None = None,
    limits: LimitSettings | None = None,
) -> web.Application:
    """The application; it answers from the start, with 503 until `lifecycle` is ready."""
    access = access or Access(AccessSettings(), settings.token)
    checks = (_browser_check(settings.listen, access), _caller_check(access), _phase_check)
    body_check = _body_check((limits or LimitSettings()).body_s)
    middlewares = [request_lines, errors_as_json, *checks, body_check]
    app = web.Application(middlewares=middlewares, client_max_size=settings.max_body_kb * 1024)
    app[LIFECYCLE], app[metrics.OBSERVER] = lifecycle, Observer()
    app[importing.TURN], app[storage.TURN] = SingleFlight("import"), SingleFlight("backup")
    app.on_response_prepare.append(add_request_id)
    app.on_shutdown.append(events.close_streams)
    app.cleanup_ctx.append(metrics.observing)
    app.add_routes(
        [
            web.post("/v1/chat/completions", completions.chat_completions),
            web.post("/v1/completions", completions.completions),
            web.get("/v1/models", models.list_models),
            web.get("/v1/models/{id:.+}", models.get_model),
            web.post("/v1/feedback", feedback.post_feedback),
            web.get("/v1/feedback", feedback.get_feedback),
            web.get("/v1/feedback/{id}", progress.get_feedback_progress),
            web.get("/v1/adapters", adapters.list_adapters),
            web.get("/v1/adapters/{name}", adapters.get_adapter),
            web.delete("/v1/adapters/{name}", adapters.forget),
            web.post("/v1/adapters/{name}/rollback", adapters.rollback),
            web.post("/v1/adapters/{name}/mend", adapters.mend),
            web.get("/v1/adapters/{name}/export", adapters.export),
            web.post("/v1/adapters/{name}/import", importing.import_adapter),
            web.get("/v1/quarantine", quarantine.list_quarantined),
            web.post("/v1/quarantine", quarantine.decide_all),
            web.post("/v1/quarantine/{pair}", quarantine.decide),
            web.get("/v1/backup", storage.backup),
            web.get("/v1/store", storage.store_report),
            web.post("/v1/store/prune", storage.prune),
            web.post("/v1/store/vacuum", storage.vacuum),
            web.get("/v1/status", status.status),
            web.get("/v1/settings", settings_route.get_settings),
            web.post("/v1/reload", settings_route.reload),
            web.get("/v1/trace", trace.get_trace),
            web.get("/metrics", metrics.metrics),
            web.get("/v1/events", events.events, allow_head=False),
            web.get("/healthz", status.healthz),
            web.get("/readyz", status.readyz),
            web.get(page.PAGE, page.page),
            web.get(page.FILES + "{name}", page.file),
            web.get("/openapi.json", openapi.get_document),
        ]
    )
    return app


def _caller_check(access: Access) -> Middleware:
    """Every request has a caller, who needs the route's role."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        header_came(request)
        resource = request.match_info.route.resource
        method = "GET" if request.method == "HEAD" else request.method
        role = ROLES.get(f"{method} {resource.canonical}", "admin") if resource is not None else "anybody"
        if role != "anybody":
            caller = request[CALLER] = await access.caller(request)
            caller.demand_role(role)
        return await handler(request)

    return check


def _browser_check(listen: str, access: Access) -> Middleware:
    """Without a token, web pages that this box's browser shows must not reach the TCP listener.

    Another site's page says so in `Origin`; one whose name was pointed to this box (DNS rebinding) says so in `Host`,
    which must be loopback's or the name in `listen`. What it embeds or links to has no `Origin`: there browsers say in
    `Sec-Fetch-Site` where it comes from, and only a link to the page itself is followed.
    """
    own = _name_in(listen)

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if over_tcp(request) and not access.has_tokens and request.path not in _PROBES:
            host, origin = request.headers.get("Host", ""), request.headers.get("Origin")
            if not is_loopback(_name_in(host)) and (not own or _name_in(host) != own):
                raise _forbidden(f'host "{host[:200]}" is not this box: use 127.0.0.1 or localhost', "forbidden_host")
            if origin is not None and origin.lower() != f"http://{host.lower()}":
                raise _forbidden(f'web pages of "{origin[:200]}" may not use edged', "forbidden_origin")
            if request.headers.get("Sec-Fetch-Site", "").lower() in _ELSEWHERE and not _follows_link(request):
                raise _forbidden("web pages of other sites may not use edged", "forbidden_site")
        return await handler(request)

    return check


def _follows_link(request: web.Request) -> bool:
    """Whether a browser goes to the page, in a tab of its own."""
    mode, target = (request.headers.get(f"Sec-Fetch-{name}", "") for name in ("Mode", "Dest"))
    return request.method == "GET" and request.path == page.PAGE and (mode, target) == ("navigate", "document")


def _name_in(host: str) -> str:
    """The name in NAME or NAME:PORT; "" where there is none."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _forbidden(message: str, code: str) -> ApiError:
    return forbidden(f"{message}; or set api.token", code)


@web.middleware
async def _phase_check(request: web.Request, handler: Handler) -> web.StreamResponse:
    """While the model is loading, and from SIGTERM on, nothing new is begun."""
    problem = request.app[LIFECYCLE].problem()
    if problem and request.path not in _ALWAYS and not page.is_page(request.path):
        raise problem
    return await handler(request)


def _body_check(body_s: float) -> Middleware:
    """Bodies come in time. Handlers find them read, but for those of `_STREAMED`, who see to it themselves."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        resource = request.match_info.route.resource
        if resource is not None and resource.canonical in _STREAMED:
            return await handler(request)
        try:
            async with asyncio.timeout(body_s):
                await request.read()
        except TimeoutError:
            error = ApiError(408, f"the body did not come within limits.body_s = {body_s:g} s", code="body_too_slow")
            answer = error.response()
            answer.force_close()
            return answer
        return await handler(request)

    return check
