"""The routes of an ingress, and what holds for every request."""

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Callable
from functools import partial

import aiohttp
from aiohttp import web

from edged.fleet import lists
from edged.fleet.ingress import RESPONSES, Ingress, is_streamed
from edged.http.access import CALLER, Access
from edged.http.checks import PROBES, body_in_time, name_in, preflight, refuse_other_sites, share_with_page
from edged.http.errors import ApiError, Handler, http_error

log = logging.getLogger("edged.fleet")

FLEET: web.AppKey[Ingress] = web.AppKey("ingress")
_DOTS = re.compile(r"(?:^|/)(?:\.|%2e){1,2}(?:/|$)", re.IGNORECASE)
"""Parts of a path that name a folder above: no node shall read another path than the ingress."""
_AT_NODES = (
    *("/v1/backup", "/v1/store", "/v1/settings", "/v1/reload", "/v1/trace", "/v1/drain", "/v1/undrain"),
    *("/v1/applications", "/v1/quarantine/", "/v1/leases", "/v1/federated"),
)
"""Beginnings of what an operator asks of a box itself."""
_ROUTES: tuple[tuple[str, str, str, Callable[[Ingress], Handler]], ...] = (
    ("POST", "/v1/chat/completions", "use", lambda ingress: ingress.answer),
    ("POST", "/v1/completions", "use", lambda ingress: ingress.answer),
    ("POST", RESPONSES, "use", lambda ingress: ingress.answer),
    ("GET", "/v1/models", "use", lambda ingress: partial(lists.models, ingress)),
    ("GET", "/v1/models/{id:.+}", "use", lambda ingress: partial(lists.model, ingress)),
    ("POST", "/v1/feedback", "train", lambda ingress: ingress.feedback),
    ("GET", "/v1/feedback", "train", lambda ingress: ingress.at_home),
    ("GET", "/v1/feedback/{id}", "use", lambda ingress: ingress.progress),
    ("GET", "/v1/adapters", "use", lambda ingress: partial(lists.adapters, ingress)),
    ("*", "/v1/adapters/{name}", "use", lambda ingress: ingress.adapter),
    ("*", "/v1/adapters/{name}/{what}", "use", lambda ingress: ingress.adapter),
    ("GET", "/v1/quarantine", "train", lambda ingress: ingress.at_home),
    ("POST", "/v1/quarantine", "train", lambda ingress: ingress.at_home),
    ("*", "/v1/files", "train", lambda ingress: ingress.jobs),
    ("*", "/v1/files/{rest:.+}", "train", lambda ingress: ingress.jobs),
    ("*", "/v1/fine_tuning/{rest:.+}", "train", lambda ingress: ingress.jobs),
    ("GET", "/v1/status", "use", lambda ingress: partial(lists.status, ingress)),
    ("GET", "/metrics", "metrics", lambda ingress: partial(lists.metrics, ingress)),
    ("GET", "/v1/events", "use", lambda ingress: partial(lists.events, ingress)),
    ("GET", "/v1/fleet", "metrics", lambda ingress: ingress.fleet),
    ("PUT", "/v1/fleet/nodes/{name}", "fleet", lambda ingress: ingress.register),
    ("DELETE", "/v1/fleet/nodes/{name}", "fleet", lambda ingress: ingress.register),
    ("POST", "/v1/fleet/move", "admin", lambda ingress: ingress.move),
    ("GET", "/healthz", "anybody", lambda ingress: ingress.health),
    ("GET", "/readyz", "anybody", lambda ingress: ingress.ready),
)
"""Method, path, role and handler; a node checks the role that its own table names, too."""


def make_ingress(ingress: Ingress, access: Access) -> web.Application:
    """Build the application of an ingress; it follows its nodes from its start to its cleanup."""
    settings = ingress.settings
    own_name, origins = name_in(settings.fleet.listen), frozenset(settings.api.browser_origins)
    roles: dict[web.AbstractRoute, str] = {}

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        """Check the origin and the caller of every request; errors have the shape of a daemon's."""
        try:
            refuse_other_sites(request, own_name, access.has_tokens, origins)
            if (asked := preflight(request, origins)) is not None:
                return asked
            role = roles.get(request.match_info.route, "anybody")
            if request.path.startswith(_AT_NODES):
                raise ApiError(
                    501, f"{request.path[:80]} is asked of a node itself, at its own address", code="at_node"
                )
            if role != "anybody" or request.path not in PROBES:
                request[CALLER] = caller = await access.caller(request)
                if role != "anybody":
                    caller.demand_role(role)  # type: ignore[arg-type]
            if _DOTS.search(request.raw_path.partition("?")[0]) or _DOTS.search(request.rel_url.raw_path):
                raise ApiError(400, "the path has a part of dots: write it without", code="bad_path")
            if not ingress.members.by_name and role in ("use", "train"):
                raise ApiError(503, "no box has registered yet", code="no_node", retry_after_s=1.0)
            if not is_streamed(request.path):
                await body_in_time(request, settings.limits.body_s)
            return await handler(request)
        except web.HTTPException as error:
            answer = http_error(request, error)
        except ApiError as error:
            answer = error
        except (aiohttp.ClientError, TimeoutError) as error:
            answer = ApiError(503, f"a node went away: {str(error) or type(error).__name__}", code="node_lost")
        except ConnectionResetError:
            answer = ApiError(503, "the client left", code="client_left")
        except Exception:
            log.exception("a request failed")
            answer = ApiError(500, "the ingress failed on this request; its log has the details", code="internal_error")
        response = answer.response()
        if not request.content.is_eof():
            response.force_close()
        return response

    app = web.Application(middlewares=[check], client_max_size=settings.api.max_body_kb * 1024)
    app[FLEET] = ingress
    app.on_response_prepare.append(partial(share_with_page, origins))
    for method, path, role, handler in _ROUTES:
        roles[app.router.add_route(method, path, handler(ingress))] = role
    app.cleanup_ctx.append(_following)
    app.on_shutdown.append(ingress.end_event_streams)
    return app


async def _following(app: web.Application) -> AsyncIterator[None]:
    ingress = app[FLEET]
    headers = {"Authorization": f"Bearer {ingress.token}"} if ingress.token else {}
    connector, jar = aiohttp.TCPConnector(limit=0, ssl=ingress.tls), aiohttp.DummyCookieJar()
    async with aiohttp.ClientSession(
        headers=headers, connector=connector, cookie_jar=jar, auto_decompress=False
    ) as ingress.session:
        ingress.keeper.session = ingress.session
        ingress.watch()
        keeping = asyncio.create_task(ingress.keeper.run())
        yield
        keeping.cancel()
        # What it carries ends before the session does.
        await asyncio.wait([keeping])
        for feed in ingress.feeds.values():
            feed.cancel()
