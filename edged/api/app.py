"""The aiohttp application: the table of routes, and the checks before every one of them."""

import asyncio
import ipaddress
import warnings
from urllib.parse import urlsplit

from aiohttp import web

from edged.api import events, metrics
from edged.api.access import CALLER, Access, is_loopback
from edged.api.connections import Connection
from edged.api.errors import ApiError, Handler
from edged.api.openapi import Route
from edged.api.request_log import PROBES, add_request_id, request_lines
from edged.api.routes import ROUTES
from edged.api.services import LIFECYCLE, Lifecycle
from edged.api.sockets import over_tcp
from edged.observe.observer import Observer
from edged.settings.load import Settings

# A request's caller has a plain name, which aiohttp would rather have as an object.
warnings.filterwarnings("ignore", category=web.NotAppKeyWarning)


def make_app(settings: Settings, lifecycle: Lifecycle, access: Access | None = None) -> web.Application:
    """The application; it answers from the start, with 503 until `lifecycle` is ready."""
    access = access or Access(settings.access, settings.api.token)
    own_name = _name_in(settings.api.listen)

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        """What is asked of every request before its handler has it."""
        _refuse_other_sites(request, own_name, access.has_tokens)
        if isinstance(request.protocol, Connection):
            request.protocol.header_came()
        row = _row(request)
        # A route outside the table is for admins; a URL without a route is for anybody, and the answer is 404.
        role = row.role if row else "admin" if request.match_info.route.resource is not None else "anybody"
        if role != "anybody":
            caller = request[CALLER] = await access.caller(request)
            caller.demand_role(role)
        # While the model is loading, and from SIGTERM on, nothing new is begun.
        problem = lifecycle.problem()
        if problem and not (row and row.always):
            raise problem
        if not (row and row.streamed):
            await _body_in_time(request, settings.limits.body_s)
        return await handler(request)

    app = web.Application(middlewares=[request_lines, check], client_max_size=settings.api.max_body_kb * 1024)
    app[LIFECYCLE], app[metrics.OBSERVER] = lifecycle, Observer()
    app.on_response_prepare.append(add_request_id)
    app.on_shutdown.append(events.close_streams)
    app.cleanup_ctx.append(metrics.observing)
    for route in ROUTES:
        route.add_to(app.router)
    return app


def _row(request: web.Request) -> Route | None:
    """The row of the table that a request is for."""
    owner = getattr(request.match_info.handler, "__self__", None)
    return owner if isinstance(owner, Route) else None


async def _body_in_time(request: web.Request, body_s: float) -> None:
    """Read a request's body. Raises ApiError (408) when it is slow."""
    try:
        async with asyncio.timeout(body_s):
            await request.read()
    except TimeoutError:
        message = f"the body did not come within limits.body_s = {body_s:g} s"
        raise ApiError(408, message, code="body_too_slow") from None


def _refuse_other_sites(request: web.Request, own_name: str, has_tokens: bool) -> None:
    """Web pages of other sites must not reach a listener that asks for no token: TCP without one, and the Unix socket,
    which people forward to their browsers by ssh.

    Another site's page says so in `Origin`; one whose name was pointed to this box (DNS rebinding) says so in `Host`,
    which must be loopback's or `own_name`, that in `listen`; over the Unix socket, where programs invent one, any that
    is no name of the Internet. What a page embeds or links to has no `Origin`: there browsers say in `Sec-Fetch-Site`
    where it comes from, and only a link to the page itself is followed. Raises ApiError (403).
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
    """Whether a browser goes to the page, in a tab of its own."""
    mode, target = (request.headers.get(f"Sec-Fetch-{name}", "") for name in ("Mode", "Dest"))
    return request.method == "GET" and request.path == "/" and (mode, target) == ("navigate", "document")


def _name_in(host: str) -> str:
    """The name in NAME or NAME:PORT; "" where there is none."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _is_invented(host: str) -> bool:
    """Whether no name of the Internet can be this: one without a dot, or an address."""
    try:
        return "." not in host or bool(ipaddress.ip_address(host))
    except ValueError:
        return False
