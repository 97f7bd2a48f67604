"""The ingress of a fleet: one OpenAI service over several daemons. It computes nothing of an answer itself."""

import asyncio
import contextlib
import json
import logging
import ssl
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from aiohttp import web
from pydantic import ValidationError

from edged.fleet.feeds import follow
from edged.fleet.ids import Ids, Origin, named_in
from edged.fleet.keeper import Keeper
from edged.fleet.members import Member, Members
from edged.fleet.relay import NodeLost, Timing, break_off, relay
from edged.fleet.resume import ResumableAnswer
from edged.http.access import ON_BEHALF, caller_of
from edged.http.checks import read_unpacked
from edged.http.errors import ApiError
from edged.http.json_format import json_answer
from edged.placement.homes import rendezvous
from edged.placement.node import NodeView, RoutedRequest, blocks_of
from edged.placement.policies import POLICIES
from edged.runtime.bounded_json import loads
from edged.settings.access import USER_NAME
from edged.settings.addresses import is_loopback
from edged.settings.fleet import FleetSettings
from edged.settings.load import Settings

log = logging.getLogger("edged.fleet")

RESPONSES = "/v1/responses"
_LIST_S = 10.0
"""Seconds that a node may take for its part of a list."""


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
        self.keeper = Keeper(self.members, self.ids)
        self.feeds: dict[Member, asyncio.Task[None]] = {}
        self.event_streams: set[asyncio.Task[Any] | None] = set()

    # -- where a request goes ----------------------------------------------------------------------------------------

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """A chat, completion or response: where the policy says. Streams that broke off go on, but for responses."""
        data = await read_unpacked(request)
        body = _object(data)
        if "resume" in body:
            raise ApiError(403, '"resume" is for an ingress of a fleet: leave it out', "resume", "forbidden_role")
        caller = caller_of(request)
        if body and (named := caller.user_of(request.headers, body.get("user"))) != body.get("user"):
            # A node knows this ingress' callers by their users alone.
            body["user"] = named
            data = json.dumps(body).encode()
        user = _user_of(body, self.members.model)
        answer = ResumableAnswer(data, (body.get("n") or 1) if body and request.path != RESPONSES else 0)
        try:
            if user is None:
                return await self._anywhere(request, answer, _arrival(body, None))
            caller.demand_user(user)
            return await self._at_home(request, answer, body, user)
        except ApiError:
            if answer.response is None:
                raise
            with contextlib.suppress(ConnectionResetError):
                await break_off(request, answer.response, answer.node)
            return answer.response

    async def _at_home(
        self, request: web.Request, answer: ResumableAnswer, body: dict[str, Any], user: str
    ) -> web.StreamResponse:
        """Answer where the policy says, of the nodes that have what a user's home has.

        Where there is none the base answers; what one has begun goes on where it can.
        """
        home, arrival = self._member(self.members.homes.of(user)), _arrival(body, user)
        name, tried = home.name, set[str]()
        # Once more where it is still there: a connection that was kept may have been closed meanwhile.
        for _ in range(2):
            nodes, placed = self.keeper.readers(user, arrival)
            if not nodes or answer.response is not None:
                break
            nodes = [node for node in nodes if node.name not in tried] or nodes
            placement = self.policy.place(placed, nodes, self.members.clock())
            name = placement.ranking[0]
            tried.add(name)
            if not await self.keeper.bring(user, name):
                name = home.name
            with contextlib.suppress(NodeLost):
                about = (placed, Origin(name), self.keeper.notice(user, name), placement.forecasts.get(name))
                return await self._to(request, answer, self._member(name), *about)
        if answer.response is not None:
            # Where its version answers, as each node says itself; who is taught at home is not taught where no copy is.
            away = home.name if user in self.members.homes.taught() else ""
            return await self._anywhere(request, answer, arrival, away, tried={name})
        # The others know nothing of this user: the base answers, and learns nothing.
        answer.body = json.dumps(_without_user(body, self.members.model)).encode()
        return await self._anywhere(request, answer, _arrival(body, None), away=home.name)

    async def _anywhere(
        self,
        request: web.Request,
        answer: ResumableAnswer,
        arrival: RoutedRequest,
        away: str = "",
        tried: Collection[str] = (),
    ) -> web.StreamResponse:
        """Send a request where the policy says; where that node is lost before its answer's end, to the next one."""
        tried, headers = {*tried}, {"X-Edged-Home-Away": away} if away else {}
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
                origin = Origin(name, away if not self.keeper.follows(arrival.user, name) else "")
                return await self._to(request, answer, member, arrival, origin, headers, forecast_s, elsewhere)

    async def _to(
        self,
        request: web.Request,
        answer: ResumableAnswer,
        member: Member,
        arrival: RoutedRequest,
        origin: Origin,
        headers: Mapping[str, str] = MappingProxyType({}),
        forecast_s: float | None = None,
        elsewhere: bool = False,
    ) -> web.StreamResponse:
        """Relay a chat or a completion, and learn from its times."""
        view = member.view
        assert view is not None
        view.send(arrival, self.members.clock())
        response, timing = await relay(
            *(request, self.session, member, answer.data, headers),
            learn=lambda head: self._learn(head, origin),
            elsewhere=elsewhere,
            answer=answer,
        )
        member.placed += 1
        if response.status == 200:
            _observe(view, arrival, timing, forecast_s)
        return response

    def _learn(self, head: bytes, origin: Origin) -> None:
        self.ids.learn(head, origin)
        self.keeper.told(head)

    async def _home_of(self, user: str) -> str:
        """Return a user's home, another one where it has been away for long."""
        await self.keeper.rehome(user)
        return self.members.homes.of(user)

    def _member(self, name: str) -> Member:
        """Return the member of a name. Raises ApiError (503) for a home that is no member any more."""
        member = self.members.by_name.get(name)
        if member is None:
            message = f'"{name}" is no node of this fleet any more: name it in fleet.nodes, or correct fleet.homes'
            raise ApiError(503, message, code="no_node")
        return member

    async def relay_to(
        self,
        request: web.Request,
        name: str,
        data: bytes | aiohttp.StreamReader | None,
        has: str = "has what this is about",
    ) -> web.StreamResponse:
        """Relay to a node that alone can do it. Raises ApiError (503) where it is away; `has` says what is there.

        A busy node whose feed is silent may still answer: the connection tells whether it does.
        """
        member = self._member(name)
        if self.members.state(member) not in ("down", "refused"):
            with contextlib.suppress(NodeLost):
                about = (request, self.session, member, data)
                return (await relay(*about, learn=lambda head: self._learn(head, Origin(name))))[0]
        message = f'node "{name}" {has}, and is away: try again when it is back'
        raise ApiError(503, message, code="home_away", retry_after_s=5.0)

    # -- what is about a user, an answer or a caller -------------------------------------------------------------------

    async def feedback(self, request: web.Request) -> web.StreamResponse:
        """Feedback: to the node of the answer that it is about; a pair to its user's home."""
        data = await read_unpacked(request)
        body = _object(data)
        about, user = body.get("completion_id"), body.get("user")
        if isinstance(asked := body.get("request_id"), str) and not isinstance(about, str):
            return await self._ask_each(request, data, "answer to request", asked)
        if not isinstance(about, str):
            user = user if isinstance(user, str) else caller_of(request).tenant
            return await self.relay_to(request, await self._home_of(user), data)
        origin = self.ids.origin(about)
        if origin is None:
            return await self._ask_each(request, data, "completion", about)
        if origin.away:
            message = (
                f'answer "{about}" came from the base while "{origin.away}", its user\'s home, was away: ask again'
                " there, and judge that answer"
            )
            raise ApiError(503, message, code="home_away", retry_after_s=5.0)
        return await self.relay_to(request, origin.node, data)

    async def progress(self, request: web.Request) -> web.StreamResponse:
        """What became of a feedback, from the node that has it."""
        name = request.match_info["id"]
        origin = self.ids.origin(name)
        if origin is None:
            return await self._ask_each(request, None, "feedback", name)
        return await self.relay_to(request, origin.node, None)

    async def _ask_each(self, request: web.Request, data: bytes | None, kind: str, name: str) -> web.StreamResponse:
        """Ask one node after the other, until one knows an id; the one that it names is the first.

        Raises ApiError: 404, or 503 while one is away.
        """
        asked, away, what, named = 0, [], f'{kind} "{name[:80]}"', named_in(name)
        for member in sorted(self.members.by_name.values(), key=lambda member: member.name != named):
            if not self.members.reachable(member):
                away.append(member.name)
                continue
            async with self.ask(request, member, data) as found:
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

    def ask(self, request: web.Request, member: Member, data: bytes | None = None) -> Any:
        """Ask a node in a caller's name; a context manager of its response."""
        headers = {ON_BEHALF: caller_of(request).forwarded(), "Content-Type": "application/json"}
        timeout = aiohttp.ClientTimeout(total=_LIST_S)
        return self.session.request(
            request.method, member.url + request.path_qs, data=data, headers=headers, timeout=timeout
        )

    async def adapter(self, request: web.Request) -> web.StreamResponse:
        """Whatever is about one adapter, at its home; it is forgotten everywhere."""
        name = request.match_info["name"]
        if request.method == "DELETE" and "what" not in request.match_info:
            return await self._forget(request, name)
        home = await self._home_of(name)
        if request.method != "GET":
            self.keeper.changed(home, name)
        return await self.relay_to(request, home, await _body_of(request))

    async def _forget(self, request: web.Request, name: str) -> web.StreamResponse:
        """Forget a user at every node: at those that are away, before they are used again."""
        caller = caller_of(request)
        caller.demand_role("train")
        caller.demand_user(name)
        asked_by = caller.forwarded()
        async with self.keeper.forgetting(name, asked_by) as there:
            asked = [self.keeper.forget_at(member, name, asked_by) for member in there]
            answers = await asyncio.gather(*asked, return_exceptions=True)
        told = [answer for answer in answers if not isinstance(answer, BaseException)]
        away = sorted(node for node, users in self.members.homes.forgotten.items() if name in users)
        status, found = min(told, key=lambda answer: answer[0], default=(404, b""))
        if status == 200 or not away:
            return json_answer(_object(found) | ({"away": away} if away else {}), status)
        message = f"{', '.join(away)} is away, and forgets {name} before it is used again"
        return json_answer({"adapter": name, "forgotten": False, "away": away, "message": message}, 202)

    async def at_home(self, request: web.Request) -> web.StreamResponse:
        """What is held back of a user, or his feedback, at that user's home."""
        body = _object(await read_unpacked(request)) if request.method == "POST" else dict(request.query)
        user = body.get("user")
        if not isinstance(user, str):
            raise ApiError(400, 'a fleet is asked about one user: give "user"', "user", "user_wanted")
        return await self.relay_to(request, self.members.homes.of(user), await read_unpacked(request))

    async def jobs(self, request: web.Request) -> web.StreamResponse:
        """Files and fine-tuning jobs: all of a caller's lie on one node."""
        name = rendezvous(caller_of(request).tenant, self.members.by_name)[0]
        return await self.relay_to(request, name, await _body_of(request), "has your files and jobs")

    # -- the fleet itself ----------------------------------------------------------------------------------------------

    def there(self) -> list[Member]:
        """The nodes that can be asked."""
        return [*filter(self.members.reachable, self.members.by_name.values())]

    async def fleet(self, request: web.Request) -> web.StreamResponse:
        """The fleet: its nodes, and for an admin the homes of users."""
        return json_answer(self.members.report(caller_of(request).may("admin")))

    async def register(self, request: web.Request) -> web.StreamResponse:
        """A box says that it is a member, as Ray has it do each second, or that it leaves (DELETE)."""
        name = request.match_info["name"]
        if request.method == "DELETE":
            self.members.leave(name)
        else:
            url = _object(await read_unpacked(request)).get("url")
            try:
                (url,) = FleetSettings.model_validate({"nodes": {name: url}}).nodes.values()
            except ValidationError as error:
                raise ApiError(400, error.errors()[0]["msg"], "url", "bad_node") from None
            # It is sent the token of all nodes, and what users ask.
            if not is_loopback(urlsplit(url).hostname or "") and not (self.token and url.startswith("https:")):
                way_out = "a box beyond loopback registers with https, at an ingress that has a token (--token-file)"
                raise ApiError(400, f'node "{name}" = "{url}": {way_out}', "url", "bad_node")
            if not self.members.register(name, url):
                return json_answer({"registered": name})
        log.info("node %s has %s", name, "left" if request.method == "DELETE" else f"registered: {url}")
        self.watch()
        return json_answer({"registered": name if name in self.members.by_name else None})

    async def move(self, request: web.Request) -> web.StreamResponse:
        """Move a user's home to another node."""
        body = _object(await read_unpacked(request))
        user, node = body.get("user"), body.get("node")
        if not isinstance(user, str) or not USER_NAME.fullmatch(user) or not isinstance(node, str):
            raise ApiError(400, 'a move is {"user": NAME, "node": NAME}', "user", "bad_move")
        former = self.members.homes.of(user)
        await self.keeper.move(user, node)
        return json_answer({"user": user, "node": node, "from": former})

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
            feed = follow(self.keeper, member, self.session)
            self.feeds[member] = asyncio.get_running_loop().create_task(feed)

    async def end_event_streams(self, app: web.Application) -> None:
        """End the streams of events, which have no end of their own: the ingress stops."""
        for task in filter(None, self.event_streams):
            task.cancel()

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
        value = loads(data.decode("utf-8-sig"))
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def is_streamed(path: str) -> bool:
    """Whether a body goes to its node as it comes: files, and adapters that are imported."""
    return path.startswith("/v1/files") or path.endswith("/import")


async def _body_of(request: web.Request) -> bytes | aiohttp.StreamReader:
    """Return a request's body: as a stream where it goes to its node as it comes."""
    return request.content if is_streamed(request.path) and request.body_exists else await read_unpacked(request)


def adapter_in(model: object, base: str) -> str | None:
    """Return the adapter in BASE:NAME; None for a model of another form, of which its node says what is wrong."""
    if not isinstance(model, str) or not model.startswith(f"{base}:"):
        return None
    return model.removeprefix(f"{base}:") or None


def _user_of(body: dict[str, Any], base: str) -> str | None:
    """Return the user by whose adapter a request is answered."""
    adapter, user = adapter_in(body.get("model"), base), body.get("user")
    if adapter is not None and adapter != "latest":
        return adapter
    return user if isinstance(user, str) and user else None


def _without_user(body: dict[str, Any], base: str) -> dict[str, Any]:
    """Return a request without its user and adapter: any node answers it as the base."""
    kept = {key: value for key, value in body.items() if key != "user"}
    return kept | ({"model": base} if adapter_in(body.get("model"), base) is not None else {})


def _arrival(body: dict[str, Any], user: str | None) -> RoutedRequest:
    """Return what placing a request needs to know of it."""
    prompt = body.get("messages", body.get("prompt", body.get("input", "")))
    text = (prompt if isinstance(prompt, str) else json.dumps(prompt)).encode("utf-8", "replace")
    return RoutedRequest(len(text), blocks_of(user or "", text), user)


def _observe(view: NodeView, arrival: RoutedRequest, timing: Timing, forecast_s: float | None) -> None:
    """Learn from an answer's times; one of which only the end is known tells nothing of its first token."""
    if timing.prompt_tokens:
        view.count_tokens(arrival.num_bytes, timing.prompt_tokens)
    if forecast_s is not None and timing.streamed:
        view.observe(forecast_s, timing.first_s - timing.sent_s, timing.ended_s - timing.first_s)
