"""The aiohttp application: the table of routes, and the checks before every one of them."""

from __future__ import annotations

import asyncio
import ipaddress
import warnings
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.typedefs import Middleware

from edged.api import events, importing, metrics, storage
from edged.api.access import CALLER, Access, forbidden, is_loopback, over_tcp
from edged.api.connections import header_came
from edged.api.errors import ApiError, Handler, errors_as_json
from edged.api.request_log import PROBES, add_request_id, request_lines
from edged.api.route import Route
from edged.api.routes import ROUTES
from edged.api.services import LIFECYCLE, Lifecycle
from edged.api.single_flight import SingleFlight
from edged.observe.observer import Observer
from edged.settings.load import AccessSettings, ApiSettings, LimitSettings

# A request's caller has a plain name, which aiohttp would rather have as an object.
warnings.filterwarnings("ignore", category=web.NotAppKeyWarning)

_ELSEWHERE = ("cross-site", "same-site")
_PAGE = "/"
_ROWS: dict[tuple[str, str], Route] = {(route.method, route.name): route for route in ROUTES}


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
    for route in ROUTES:
        route.add_to(app.router)
    return app


def _row(request: web.Request) -> Route | None:
    """The row of the table that a request is for."""
    resource = request.match_info.route.resource
    method = "GET" if request.method == "HEAD" else request.method
    return _ROWS.get((method, resource.canonical)) if resource is not None else None


def _caller_check(access: Access) -> Middleware:
    """Every request has a caller, who needs the route's role."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        header_came(request)
        row = _row(request)
        # A route outside the table is for admins; a URL without a route is for anybody, and the answer is 404.
        role = row.role if row else "admin" if request.match_info.route.resource is not None else "anybody"
        if role != "anybody":
            caller = request[CALLER] = await access.caller(request)
            caller.demand_role(role)
        return await handler(request)

    return check


def _browser_check(listen: str, access: Access) -> Middleware:
    """Web pages of other sites must not reach a listener that asks for no token: TCP without one, and the Unix socket,
    which people forward to their browsers by ssh.

    Another site's page says so in `Origin`; one whose name was pointed to this box (DNS rebinding) says so in `Host`,
    which must be loopback's or the name in `listen`; over the Unix socket, where programs invent one, any that is no
    name of the Internet. What a page embeds or links to has no `Origin`: there browsers say in `Sec-Fetch-Site` where
    it comes from, and only a link to the page itself is followed.
    """
    own = _name_in(listen)

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        tcp = over_tcp(request)
        if not (tcp and access.has_tokens) and request.path not in PROBES:
            host, origin = request.headers.get("Host", ""), request.headers.get("Origin")
            name, way_out = _name_in(host), "; or set api.token" if tcp else ""
            if not (is_loopback(name) or (own and name == own) or (not tcp and _is_invented(name))):
                message = f'host "{host[:200]}" is not this box: use 127.0.0.1 or localhost{way_out}'
                raise forbidden(message, "forbidden_host")
            if origin is not None and origin.lower() != f"http://{host.lower()}":
                raise forbidden(f'web pages of "{origin[:200]}" may not use edged{way_out}', "forbidden_origin")
            if request.headers.get("Sec-Fetch-Site", "").lower() in _ELSEWHERE and not _follows_link(request):
                raise forbidden(f"web pages of other sites may not use edged{way_out}", "forbidden_site")
        return await handler(request)

    return check


def _follows_link(request: web.Request) -> bool:
    """Whether a browser goes to the page, in a tab of its own."""
    mode, target = (request.headers.get(f"Sec-Fetch-{name}", "") for name in ("Mode", "Dest"))
    return request.method == "GET" and request.path == _PAGE and (mode, target) == ("navigate", "document")


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


@web.middleware
async def _phase_check(request: web.Request, handler: Handler) -> web.StreamResponse:
    """While the model is loading, and from SIGTERM on, nothing new is begun."""
    problem, row = request.app[LIFECYCLE].problem(), _row(request)
    if problem and not (row and row.always):
        raise problem
    return await handler(request)


def _body_check(body_s: float) -> Middleware:
    """Bodies come in time. Handlers find them read, but for those of `streamed` rows, which see to it themselves."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        row = _row(request)
        if row and row.streamed:
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
