"""One method of one path: how it is called, by which role, and what it takes and answers."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal

from aiohttp import web
from pydantic import BaseModel

from edged.api.openai_format import json_answer
from edged.settings.access import Role

EVENTS = "text/event-stream"


@dataclass(frozen=True, slots=True)
class Route:
    """A row of `edged.api.routes.ROUTES`. The handler checks for which users the caller may speak.

    `handler` returns a response, or a model or JSON object that becomes one with the status `status`.
    """

    method: Literal["GET", "POST", "DELETE"]
    path: str
    handler: Callable[[web.Request], Awaitable[web.StreamResponse | BaseModel | dict[str, Any]]]
    _: KW_ONLY
    role: Role | Literal["anybody"] = "admin"
    summary: str
    query: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    """The schemas of the query's fields."""
    body: tuple[type[BaseModel], ...] = ()
    """The models of a JSON body: alternatives."""
    answer: type[BaseModel] | None = None
    """The model of a JSON answer."""
    media: tuple[str, ...] = ()
    """The other media types of an answer without an error."""
    status: int = 200
    errors: tuple[int, ...] = ()
    """The statuses beyond those that every route may answer."""
    always: bool = False
    """Whether it answers also while the model is loading and while the daemon stops."""
    streamed: bool = False
    """Whether the handler reads the body itself, piece by piece, and bounds its time."""

    @property
    def name(self) -> str:
        """The path without the patterns of its variables, as documents and the log have it."""
        return re.sub(r":[^}]*", "", self.path)

    def add_to(self, router: web.UrlDispatcher) -> None:
        """Add the route to a router, and HEAD beside a GET; a stream of events has none, for it does not end."""
        router.add_route(self.method, self.path, self.handle)
        if self.method == "GET" and EVENTS not in self.media:
            router.add_route("HEAD", self.path, self.handle)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer a request."""
        answer = await self.handler(request)
        return answer if isinstance(answer, web.StreamResponse) else json_answer(answer, self.status)
