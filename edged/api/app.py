"""The aiohttp application: the routes of the table, and the checks that every request passes before its handler."""

import asyncio
import ipaddress
import warnings
from urllib.parse import urlsplit

from aiohttp import web

from edged.api import events, metrics
from edged.api.access import CALLER, Access, is_loopback
from edged.api.errors import ApiError, Handler, bad_request
from edged.api.openapi import Route
from edged.api.request_log import PROBES, add_request_id, request_lines
from edged.api.routes import ROUTES
from edged.api.services import LIFECYCLE, Lifecycle
from edged.api.sockets import over_tcp
from edged.observe.observer import Observer
from edged.observe.stalls import StallMonitor
from edged.settings.load import Settings
from edged.store.jobs.jobs import NO_ADAPTERS

# A request keeps its caller under a plain string key, about which aiohttp warns.
warnings.filterwarnings("ignore", category=web.NotAppKeyWarning)

_NO_BODY = 64
"""Bytes of a body that are read and dropped where none is taken."""


def make_app(settings: Settings, lifecycle: Lifecycle, access: Access | None = None) -> web.Application:
    """Build the application; it answers from the start, with 503 until `lifecycle` is ready."""
    access = access or Access(settings.access, settings.api.token)
    own_name = _name_in(settings.api.listen)

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        """Check the origin, the caller's role, the daemon's phase and the body of every request."""
        _refuse_other_sites(request, own_name, access.has_tokens)
        owner = getattr(request.match_info.handler, "__self__", None)
        row = owner if isinstance(owner, Route) else None
        # A route outside the table is for admins; a URL without a route needs no role and gets 404.
        role = row.role if row else "admin" if request.match_info.route.resource is not None else "anybody"
        if role != "anybody":
            job_adapters = NO_ADAPTERS if lifecycle.services is None else lifecycle.services.job_runner.adapters
            request[CALLER] = caller = await access.caller(request, job_adapters)
            caller.demand_role(role)
        # While the model is loading, and from SIGTERM on, no new work is begun.
        problem = lifecycle.problem()
        if problem and not (row and row.always):
            raise problem
        if not (row and row.streamed):
            if not (row and row.body):
                _refuse_body(request)
            await _body_in_time(request, settings.limits.body_s)
        return await handler(request)

    app = web.Application(middlewares=[request_lines, check], client_max_size=settings.api.max_body_kb * 1024)
    app[LIFECYCLE], app[metrics.OBSERVER], app[metrics.STALLS] = lifecycle, Observer(), StallMonitor()
    app.on_response_prepare.append(add_request_id)
    app.on_shutdown.append(events.close_streams)
    app.cleanup_ctx.append(metrics.observing)
    for route in ROUTES:
        route.add_to(app.router)
    return app


def _refuse_body(request: web.Request) -> None:
    """Raise ApiError (400) for a body where none is taken, before it is read; some clients send `{}` for none."""
    size = request.content_length
    if request.body_exists and (size is None or size > _NO_BODY):
        told = f"{request.method} {request.path[:200]} takes no body, and this one has "
        raise bad_request(told + ("chunks" if size is None else f"{size} bytes"), code="body_not_taken")


async def _body_in_time(request: web.Request, body_s: float) -> None:
    """Read a request's body into memory. Raises ApiError (408) after `body_s` seconds."""
    try:
        async with asyncio.timeout(body_s):
            await request.read()
    except TimeoutError:
        message = f"the body did not come within limits.body_s = {body_s:g} s"
        raise ApiError(408, message, code="body_too_slow") from None


def _refuse_other_sites(request: web.Request, own_name: str, has_tokens: bool) -> None:
    """Refuse web pages of other sites on a listener that asks for no token. Raises ApiError (403).

    Those listeners are TCP without tokens, and the Unix socket, which people forward to their browsers by ssh. Browsers
    send a page's site in `Origin`. For a site whose name was pointed to this box (DNS rebinding) `Host` has that name:
    it must be loopback's or `own_name`, the host in `api.listen`; over the Unix socket, where programs make one up, any
    that is not an Internet name. Requests for what a page embeds or links to have no `Origin`: there browsers send
    `Sec-Fetch-Site`, and only a link to the page itself is followed.
    """
    tcp = over_tcp(request)
    if (tcp and has_tokens) or request.path in PROBES:
        return
    host, origin = request.headers.get("Host", ""), request.headers.get("Origin")
    name, way_out = _name_in(host), "; or set api.token" if tcp else ""
    if not (is_loopback(name) or (own_name and name == own_name) or (not tcp and _is_invented(name))):
        message = f'host "{host[:200]}" is not this box: use 127.0.0.1 or localhost{way_out}'
        raise ApiError(403, message, code="forbidden_host")
    if origin is not None and origin.lower() != f"http://{host.lower()}":
        raise ApiError(403, f'web pages of "{origin[:200]}" may not use edged{way_out}', code="forbidden_origin")
    if request.headers.get("Sec-Fetch-Site", "").lower() in ("cross-site", "same-site") and not _follows_link(request):
        raise ApiError(403, f"web pages of other sites may not use edged{way_out}", code="forbidden_site")


def _follows_link(request: web.Request) -> bool:
    """Whether a browser navigates to edged's page in a top-level tab."""
    mode, target = (request.headers.get(f"Sec-Fetch-{name}", "") for name in ("Mode", "Dest"))
    return request.method == "GET" and request.path == "/" and (mode, target) == ("navigate", "document")


def _name_in(host: str) -> str:
    """The host name in NAME or NAME:PORT; "" where there is none."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _is_invented(host: str) -> bool:
    """Whether a host cannot be an Internet name: it has no dot, or is an address."""
    try:
        return "." not in host or bool(ipaddress.ip_address(host))
    except ValueError:
        return False
