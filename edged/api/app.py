"""The aiohttp application: the routes of the table, and the checks that every request passes before its handler."""

import warnings
from functools import partial

from aiohttp import web

from edged.api import events, metrics
from edged.api.openapi import Route
from edged.api.request_log import add_request_id, request_lines
from edged.api.routes import ROUTES
from edged.api.services import LIFECYCLE, Lifecycle
from edged.http.access import CALLER, Access, caller_of
from edged.http.checks import body_in_time, name_in, preflight, refuse_body, refuse_other_sites, share_with_page
from edged.http.errors import Handler
from edged.observe.observer import Observer
from edged.observe.stalls import StallMonitor
from edged.settings.load import Settings
from edged.store.jobs.jobs import NO_ADAPTERS

# A request keeps its caller under a plain string key, about which aiohttp warns.
warnings.filterwarnings("ignore", category=web.NotAppKeyWarning)


def make_app(settings: Settings, lifecycle: Lifecycle, access: Access | None = None) -> web.Application:
    """Build the application; it answers from the start, with 503 until `lifecycle` is ready."""
    access = access or Access(settings.access, settings.api.token)
    own_name, origins = name_in(settings.api.listen), frozenset(settings.api.browser_origins)

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        """Check the origin, the caller's role and user, the daemon's phase and the body of every request."""
        refuse_other_sites(request, own_name, access.has_tokens, origins)
        # Browsers send no token along.
        if (answer := preflight(request, origins)) is not None:
            return answer
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
        if row and row.speaks_for:
            caller_of(request).demand_user(row.user_of(request))
        if not (row and row.streamed):
            if not (row and row.body):
                refuse_body(request)
            await body_in_time(request, settings.limits.body_s)
        return await handler(request)

    app = web.Application(middlewares=[request_lines, check], client_max_size=settings.api.max_body_kb * 1024)
    app[LIFECYCLE], app[metrics.OBSERVER], app[metrics.STALLS] = lifecycle, Observer(), StallMonitor()
    app.on_response_prepare.append(add_request_id)
    app.on_response_prepare.append(partial(share_with_page, origins))
    app.on_shutdown.append(events.close_streams)
    app.cleanup_ctx.append(metrics.observing)
    for route in ROUTES:
        route.add_to(app.router)
    return app
