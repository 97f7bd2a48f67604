"""The ingress of a fleet: one OpenAI service over several daemons. It computes nothing of an answer itself."""

import asyncio
import contextlib
import json
import logging
import re
import ssl
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

from edged.fleet.feeds import follow, told
from edged.fleet.ids import Ids, Origin
from edged.fleet.members import Member, Members
from edged.fleet.merging import merge_events, merge_metrics
from edged.fleet.relay import NodeLost, Timing, relay
from edged.http.access import CALLER, ON_BEHALF, Access, caller_of
from edged.http.checks import PROBES, body_in_time, name_in, refuse_other_sites
from edged.http.connections import has_begun
from edged.http.errors import ApiError, Handler, http_error
from edged.http.json_format import Json, json_answer
from edged.placement.homes import rendezvous
from edged.placement.node import NodeView, RoutedRequest, blocks_of
from edged.placement.policies import POLICIES
from edged.runtime.bounded_json import loads
from edged.settings.load import Settings

log = logging.getLogger("edged.fleet")

FLEET: web.AppKey["Ingress"] = web.AppKey("ingress")
_DOTS = re.compile(r"(?:^|/)(?:\.|%2e){1,2}(?:/|$)", re.IGNORECASE)
"""Parts of a path that name a folder above: no node shall read another path than the ingress."""
_SILENT_S = 60.0
"""Longest silence of a node's events, which has a heartbeat every 15 s."""
_LIST_S = 10.0
"""Seconds that a node may take for its part of a list."""
_AT_NODES = (
    *("/v1/backup", "/v1/store", "/v1/settings", "/v1/reload", "/v1/trace", "/v1/drain", "/v1/undrain"),
    *("/v1/applications", "/v1/quarantine/"),
)
"""Beginnings of what an operator asks of a box itself."""


@dataclass
class Ingress:
    """The parts of an ingress. `token` is that of role "fleet" at the nodes, "" on loopback."""

    settings: Settings
    members: Members
    token: str
    tls: ssl.SSLContext
    """Of connections to https nodes."""
    ids: Ids = field(default_factory=Ids)
    session: aiohttp.ClientSession = field(init=False)

    def __post_init__(self) -> None:
        self.policy = POLICIES[self.settings.fleet.policy]()
        self.feeds: dict[Member, asyncio.Task[None]] = {}

    # -- where a request goes ----------------------------------------------------------------------------------------

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """A chat or a completion: at its user's home, or where the policy says."""
        data = await request.read()
        body = _object(data)
        user = _user_of(body, self.members.model)
        if user is not None:
            caller_of(request).demand_user(user)
            home = self._member(self.members.homes.of(user))
            # Once more where it is still there: a connection that was kept may have been closed meanwhile.
            for _ in range(2):
                if self.members.state(home) == "up":
                    with contextlib.suppress(NodeLost):
                        return await self._to(request, home, data, _arrival(body, user), Origin(home.name))
            # Until versions travel, the others know nothing of this user: the base answers, and learns nothing.
            data = json.dumps(_without_user(body, self.members.model)).encode()
            headers = {"X-Edged-Home-Away": home.name}
            return await self._anywhere(request, data, _arrival(body, None), headers, away=home.name)
        return await self._anywhere(request, data, _arrival(body, None), {})

    async def _anywhere(
        self, request: web.Request, data: bytes, arrival: RoutedRequest, headers: dict[str, str], away: str = ""
    ) -> web.StreamResponse:
        """Send a request where the policy says; where that node is lost before it answers, to the next one."""
        tried: set[str] = set()
        while True:
            nodes = [node for node in await self.members.some() if node.name not in tried]
            if not nodes:
                raise ApiError(503, "every node went away before it could answer", code="no_node")
            placement = self.policy.place(arrival, nodes, self.members.clock())
            name = placement.ranking[0]
            tried.add(name)
            with contextlib.suppress(NodeLost):
                member, forecast_s = self._member(name), placement.forecasts[name]
                # What the last one says, the client hears.
                elsewhere = len(nodes) > 1
                origin = Origin(name, away)
                return await self._to(request, member, data, arrival, origin, headers, forecast_s, elsewhere)

    async def _to(
        self,
        request: web.Request,
        member: Member,
        data: bytes,
        arrival: RoutedRequest,
        origin: Origin,
        headers: dict[str, str] | None = None,
        forecast_s: float | None = None,
        elsewhere: bool = False,
    ) -> web.StreamResponse:
        """Relay a chat or a completion, and learn from its times."""
        view = member.view
        assert view is not None
        view.send(arrival, self.members.clock())
        response, timing = await relay(
            *(request, self.session, member, data, headers or {}),
            learn=lambda head: self.ids.learn(head, origin),
            elsewhere=elsewhere,
        )
        member.placed += 1
        if response.status == 200:
            _observe(view, arrival, timing, forecast_s)
        return response

    def _member(self, name: str) -> Member:
        """Return the member of a name. Raises ApiError (503) for a home that is no member any more."""
        member = self.members.by_name.get(name)
        if member is None:
            message = f'"{name}" is no node of this fleet any more: name it in fleet.nodes, or correct fleet.homes'
            raise ApiError(503, message, code="no_node")
        return member

    async def _home(
        self,
        request: web.Request,
        name: str,
        data: bytes | aiohttp.StreamReader | None,
        has: str = "has what this is about",
        learn: Callable[[bytes], None] | None = None,
    ) -> web.StreamResponse:
        """Relay to a node that alone can do it. Raises ApiError (503) where it is away; `has` says what is there.

        `learn` gets the beginning of the answer, in place of the ids of answers.
        """
        member = self._member(name)
        if self.members.reachable(member):
            with contextlib.suppress(NodeLost):
                learn = learn or (lambda head: self.ids.learn(head, Origin(name)))
                return (await relay(request, self.session, member, data, learn=learn))[0]
        message = f'node "{name}" {has}, and is away: try again when it is back'
        raise ApiError(503, message, code="home_away", retry_after_s=5.0)

    # -- what is about a user, an answer or a caller -------------------------------------------------------------------

    async def feedback(self, request: web.Request) -> web.StreamResponse:
        """Feedback: to the node of the answer that it is about; a pair to its user's home."""
        data = await request.read()
        body = _object(data)
        about, user = body.get("completion_id"), body.get("user")
        if not isinstance(about, str):
            user = user if isinstance(user, str) else caller_of(request).tenant
            return await self._home(request, self.members.homes.of(user), data)
        origin = self.ids.origin(about, self.members.by_name)
        if origin is None:
            return await self._ask_each(request, data, f'completion "{about[:80]}"')
        if origin.away:
            message = (
                f'answer "{about}" came from the base while "{origin.away}", its user\'s home, was away: ask again'
                " there, and judge that answer"
            )
            raise ApiError(503, message, code="home_away", retry_after_s=5.0)
        return await self._home(request, origin.node, data)

    async def progress(self, request: web.Request) -> web.StreamResponse:
        """What became of a feedback, from the node that has it."""
        name = request.match_info["id"]
        origin = self.ids.origin(name, self.members.by_name)
        if origin is None:
            return await self._ask_each(request, None, f'feedback "{name[:80]}"')
        return await self._home(request, origin.node, None)

    async def _ask_each(self, request: web.Request, data: bytes | None, what: str) -> web.StreamResponse:
        """Ask one node after the other, until one knows it. Raises ApiError: 404, or 503 while one is away."""
        asked, away = 0, []
        for member in self.members.by_name.values():
            if not self.members.reachable(member):
                away.append(member.name)
                continue
            async with self._ask(request, member, data) as found:
                asked += 1
                if found.status != 404:
                    answer = await found.read()
                    self.ids.learn(answer, Origin(member.name))
                    headers = {"X-Edged-Node": member.name}
                    return web.Response(
                        status=found.status, body=answer, content_type=found.content_type, headers=headers
                    )
        if away:
            message = f"none of {asked} nodes has {what}, and {', '.join(away)} is away: try again"
            raise ApiError(503, message, code="home_away", retry_after_s=5.0)
        raise ApiError(404, f"none of {asked} nodes has {what}", code="unknown_completion")

    def _ask(self, request: web.Request, member: Member, data: bytes | None = None) -> Any:
        """Ask a node in a caller's name; a context manager of its response."""
        headers = {ON_BEHALF: caller_of(request).forwarded(), "Content-Type": "application/json"}
        timeout = aiohttp.ClientTimeout(total=_LIST_S)
        return self.session.request(
            request.method, member.url + request.path_qs, data=data, headers=headers, timeout=timeout
        )

    async def adapter(self, request: web.Request) -> web.StreamResponse:
        """Whatever is about one adapter, at its home."""
        name = request.match_info["name"]

        def learn(head: bytes) -> None:
            # Before the client hears that the user is forgotten, he is.
            if request.method == "DELETE" and _object(head).get("forgotten"):
                self.members.homes.forget(name)
                self.members.keep_homes()

        return await self._home(request, self.members.homes.of(name), await _body_of(request), learn=learn)

    async def at_home(self, request: web.Request) -> web.StreamResponse:
        """What is held back of a user, or his feedback, at that user's home."""
        body = _object(await request.read()) if request.method == "POST" else dict(request.query)
        user = body.get("user")
        if not isinstance(user, str):
            raise ApiError(400, 'a fleet is asked about one user: give "user"', "user", "user_wanted")
        return await self._home(request, self.members.homes.of(user), await request.read())

    async def jobs(self, request: web.Request) -> web.StreamResponse:
        """Files and fine-tuning jobs: all of a caller's lie on one node."""
        name = rendezvous(caller_of(request).tenant, self.members.by_name)[0]
        return await self._home(request, name, await _body_of(request), "has your files and jobs")

    # -- what is merged ------------------------------------------------------------------------------------------------

    async def _each(self, request: web.Request) -> dict[str, bytes]:
        """Ask all nodes that are there, at once; returns their answers by name."""

        async def one(member: Member) -> tuple[str, bytes | None]:
            try:
                async with self._ask(request, member) as found:
                    if found.status != 200:
                        log.warning(
                            "node %s answers %s with %d: %s", member.name, request.path, found.status, await told(found)
                        )
                        return member.name, None
                    return member.name, await found.read()
            except (aiohttp.ClientError, OSError, TimeoutError):
                return member.name, None

        if not (there := self._there()):
            await self.members.some()
            there = self._there()
        answers = await asyncio.gather(*map(one, there))
        found = {name: answer for name, answer in answers if answer is not None}
        if not found:
            raise ApiError(503, f"no node could answer {request.path}: try again", code="no_node")
        return found

    def _there(self) -> list[Member]:
        return [*filter(self.members.reachable, self.members.by_name.values())]

    async def models(self, request: web.Request) -> web.StreamResponse:
        """Every model once."""
        found: dict[str, Json] = {}
        for answer in (await self._each(request)).values():
            found = {item["id"]: item for item in json.loads(answer)["data"]} | found
        return json_answer({"object": "list", "data": [found[name] for name in sorted(found)]})

    async def model(self, request: web.Request) -> web.StreamResponse:
        """One model: the base at any node, an adapter at its home."""
        adapter = _adapter_in(request.match_info["id"], self.members.model)
        if adapter is not None:
            return await self._home(request, self.members.homes.of(adapter), None)
        return await self._home(request, (await self.members.some())[0].name, None)

    async def adapters(self, request: web.Request) -> web.StreamResponse:
        """Every adapter, with its node."""
        answers = await self._each(request)
        listed = [{**item, "node": name} for name, data in answers.items() for item in json.loads(data)["adapters"]]
        return json_answer({"adapters": listed})

    async def status(self, request: web.Request) -> web.StreamResponse:
        """The status of each node that is there, and the base model of all."""
        nodes = {name: json.loads(data) for name, data in (await self._each(request)).items()}
        return json_answer({"model": {"name": self.members.model}, "nodes": nodes})

    async def metrics(self, request: web.Request) -> web.StreamResponse:
        """The metrics of all nodes, with a label `node`."""
        texts = {name: data.decode() for name, data in (await self._each(request)).items()}
        return web.Response(text=merge_metrics(texts), headers={"Content-Type": "text/plain; version=0.0.4"})

    async def events(self, request: web.Request) -> web.StreamResponse:
        """The events of all nodes that are there, each with its node."""
        there = self._there()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        async with contextlib.AsyncExitStack() as opened:
            sources = []
            for member in there:
                timeout = aiohttp.ClientTimeout(total=None, sock_connect=2.0, sock_read=_SILENT_S)
                headers = {ON_BEHALF: caller_of(request).forwarded()}
                asked = self.session.get(member.url + request.path_qs, headers=headers, timeout=timeout)
                found = await opened.enter_async_context(asked)
                if found.status != 200:
                    raise ApiError(found.status, await told(found))
                sources.append((member.name, found.content))
            await response.prepare(request)
            has_begun(request)
            async with contextlib.aclosing(merge_events(sources)) as merged:
                with contextlib.suppress(ConnectionResetError):
                    async for piece in merged:
                        await response.write(piece)
        return response

    async def fleet(self, request: web.Request) -> web.StreamResponse:
        """The fleet: its nodes, and for an admin the homes of users."""
        return json_answer(self.members.report(caller_of(request).may("admin")))

    async def ready(self, request: web.Request) -> web.StreamResponse:
        """Whether any node takes requests."""
        if not self.members.up():
            raise ApiError(503, "no node takes requests", code="no_node")
        return json_answer({"status": "ready", "degraded": []})

    async def health(self, request: web.Request) -> web.StreamResponse:
        """Whether the ingress should be left alone."""
        return json_answer({"status": "ok", "phase": "ready"})

    # -- life ----------------------------------------------------------------------------------------------------------

    def watch(self) -> None:
        """Follow the feeds of all members, and no others."""
        wanted = set(self.members.by_name.values())
        for member in self.feeds.keys() - wanted:
            self.feeds.pop(member).cancel()
        for member in wanted - self.feeds.keys():
            feed = follow(self.members, member, self.session)
            self.feeds[member] = asyncio.get_running_loop().create_task(feed)

    def configure(self, settings: Settings) -> None:
        """Follow other settings; `fleet.listen` needs a restart."""
        if settings.fleet.policy != self.settings.fleet.policy:
            self.policy = POLICIES[settings.fleet.policy]()
        self.settings = settings
        self.members.configure(settings.fleet)
        self.watch()


def _object(data: bytes) -> dict[str, Any]:
    """Return a body that is a JSON object; of what is none a node will say so: {}."""
    try:
        value = loads(data.decode())
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _is_streamed(path: str) -> bool:
    """Whether a body goes to its node as it comes: files, and adapters that are imported."""
    return path.startswith("/v1/files") or path.endswith("/import")


async def _body_of(request: web.Request) -> bytes | aiohttp.StreamReader:
    """Return a request's body: as a stream where it goes to its node as it comes."""
    return request.content if _is_streamed(request.path) and request.body_exists else await request.read()


def _adapter_in(model: object, base: str) -> str | None:
    """Return the adapter in BASE:NAME; None for a model of another form, of which its node says what is wrong."""
    if not isinstance(model, str) or not model.startswith(f"{base}:"):
        return None
    return model.removeprefix(f"{base}:") or None


def _user_of(body: dict[str, Any], base: str) -> str | None:
    """Return the user by whose adapter a request is answered."""
    adapter, user = _adapter_in(body.get("model"), base), body.get("user")
    if adapter is not None and adapter != "latest":
        return adapter
    return user if isinstance(user, str) and user else None


def _without_user(body: dict[str, Any], base: str) -> dict[str, Any]:
    """Return a request without its user and adapter: any node answers it as the base."""
    kept = {key: value for key, value in body.items() if key != "user"}
    return kept | ({"model": base} if _adapter_in(body.get("model"), base) is not None else {})


def _arrival(body: dict[str, Any], user: str | None) -> RoutedRequest:
    """Return what placing a request needs to know of it."""
    prompt = body.get("messages", body.get("prompt", ""))
    text = (prompt if isinstance(prompt, str) else json.dumps(prompt)).encode("utf-8", "replace")
    return RoutedRequest(len(text), blocks_of(user or "", text), user)


def _observe(view: NodeView, arrival: RoutedRequest, timing: Timing, forecast_s: float | None) -> None:
    """Learn from an answer's times; one of which only the end is known tells nothing of its first token."""
    if timing.prompt_tokens:
        view.count_tokens(arrival.num_bytes, timing.prompt_tokens)
    if forecast_s is not None and timing.streamed:
        view.observe(forecast_s, timing.first_s - timing.sent_s, timing.ended_s - timing.first_s)


_ROUTES: tuple[tuple[str, str, str, Callable[["Ingress"], Handler]], ...] = (
    ("POST", "/v1/chat/completions", "use", lambda ingress: ingress.answer),
    ("POST", "/v1/completions", "use", lambda ingress: ingress.answer),
    ("GET", "/v1/models", "use", lambda ingress: ingress.models),
    ("GET", "/v1/models/{id:.+}", "use", lambda ingress: ingress.model),
    ("POST", "/v1/feedback", "train", lambda ingress: ingress.feedback),
    ("GET", "/v1/feedback", "train", lambda ingress: ingress.at_home),
    ("GET", "/v1/feedback/{id}", "use", lambda ingress: ingress.progress),
    ("GET", "/v1/adapters", "use", lambda ingress: ingress.adapters),
    ("*", "/v1/adapters/{name}", "use", lambda ingress: ingress.adapter),
    ("*", "/v1/adapters/{name}/{what}", "use", lambda ingress: ingress.adapter),
    ("GET", "/v1/quarantine", "train", lambda ingress: ingress.at_home),
    ("POST", "/v1/quarantine", "train", lambda ingress: ingress.at_home),
    ("*", "/v1/files", "train", lambda ingress: ingress.jobs),
    ("*", "/v1/files/{rest:.+}", "train", lambda ingress: ingress.jobs),
    ("*", "/v1/fine_tuning/{rest:.+}", "train", lambda ingress: ingress.jobs),
    ("GET", "/v1/status", "use", lambda ingress: ingress.status),
    ("GET", "/metrics", "metrics", lambda ingress: ingress.metrics),
    ("GET", "/v1/events", "use", lambda ingress: ingress.events),
    ("GET", "/v1/fleet", "metrics", lambda ingress: ingress.fleet),
    ("GET", "/healthz", "anybody", lambda ingress: ingress.health),
    ("GET", "/readyz", "anybody", lambda ingress: ingress.ready),
)
"""Method, path, role and handler; a node checks the role that its own table names, too."""


def make_ingress(ingress: Ingress, access: Access) -> web.Application:
    """Build the application of an ingress; it follows its nodes from its start to its cleanup."""
    settings = ingress.settings
    own_name = name_in(settings.fleet.listen)
    roles: dict[web.AbstractRoute, str] = {}

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        """Check the origin and the caller of every request; errors have the shape of a daemon's."""
        try:
            refuse_other_sites(request, own_name, access.has_tokens)
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
            if not _is_streamed(request.path):
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
    for method, path, role, handler in _ROUTES:
        roles[app.router.add_route(method, path, handler(ingress))] = role
    app.cleanup_ctx.append(_following)
    return app


async def _following(app: web.Application) -> AsyncIterator[None]:
    ingress = app[FLEET]
    headers = {"Authorization": f"Bearer {ingress.token}"} if ingress.token else {}
    connector, jar = aiohttp.TCPConnector(limit=0, ssl=ingress.tls), aiohttp.DummyCookieJar()
    async with aiohttp.ClientSession(
        headers=headers, connector=connector, cookie_jar=jar, auto_decompress=False
    ) as ingress.session:
        ingress.watch()
        yield
        for feed in ingress.feeds.values():
            feed.cancel()
