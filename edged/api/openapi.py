"""Routes, and the OpenAPI 3.1 document that is generated from them and the models of their bodies.

`python -m edged.api.routes` prints the document; `docs/openapi.json` is a copy of it.
"""

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal

from aiohttp import web
from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema

import edged
from edged.api.responses import Error
from edged.http.errors import MEANINGS
from edged.http.json_format import json_answer
from edged.settings.access import Role
from edged.settings.load import USER_NAME

EVENTS = "text/event-stream"
_JSON = "application/json"
_ANY_ROUTE = (400, 401, 403, 429, 500, 503)
"""Error statuses of every route: a wrong query, a forbidden caller, too many requests, a failure, not now."""
_RETRY_AFTER = {"Retry-After": {"description": "Seconds to wait.", "schema": {"type": "integer"}}}
_Schema = dict[str, Any]
_EVENT: _Schema = {
    "type": "object",
    "description": "Each server-sent event. A completion's `data` is a chunk in OpenAI's shape, at last [DONE].",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
}


@dataclass(frozen=True, slots=True)
class Route:
    """One method of one path: its handler, the role that may call it, what it takes and answers.

    `handler` returns a response, or a model or JSON object that becomes one with the status `status`. The first line of
    its docstring is the summary in the OpenAPI document. Before that the caller is checked: it has the role, and may
    speak for the user whom path, query or body name.
    """

    method: Literal["GET", "POST", "PUT", "DELETE"]
    path: str
    handler: Callable[[web.Request], Awaitable[web.StreamResponse | BaseModel | dict[str, Any]]]
    _: KW_ONLY
    role: Role | Literal["anybody"] = "admin"
    speaks_for: str = ""
    """The variable of the path, or the field of the query, that names a user; a body does so in its field `user`."""
    query: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    """JSON schemas of the query's fields."""
    body: tuple[type[BaseModel], ...] = ()
    """Models of the JSON body: alternatives."""
    answer: type[BaseModel] | None = None
    """The model of a JSON answer."""
    media: tuple[str, ...] = ()
    """Further media types of a successful answer."""
    status: int = 200
    errors: tuple[int, ...] = ()
    """Error statuses beyond `_ANY_ROUTE`."""
    always: bool = False
    """Whether the route also answers while the model is loading and while the daemon stops."""
    streamed: bool = False
    """Whether the handler itself reads the body, piece by piece, and limits its time."""

    @property
    def name(self) -> str:
        """The path without the patterns of its variables, as in the document."""
        return re.sub(r":[^}]*", "", self.path)

    def user_of(self, request: web.Request) -> str | None:
        """Return the user that the path or the query names; None where there is none, or no user can be called so."""
        name = request.match_info.get(self.speaks_for) or request.query.get(self.speaks_for, "")
        return name if USER_NAME.fullmatch(name) else None

    def add_to(self, router: web.UrlDispatcher) -> None:
        """Add the route to a router, and HEAD beside a GET; not for a stream of events, which does not end."""
        router.add_route(self.method, self.path, self.handle)
        if self.method == "GET" and EVENTS not in self.media:
            router.add_route("HEAD", self.path, self.handle)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Call the handler, and make a response of its result."""
        answer = await self.handler(request)
        return answer if isinstance(answer, web.StreamResponse) else json_answer(answer, self.status)


def document(routes: Sequence[Route]) -> _Schema:
    """Build the OpenAPI document; bodies have validation schemas, answers serialization schemas."""
    models: list[tuple[Any, JsonSchemaMode]] = [
        *((model, "validation") for model in {model for route in routes for model in route.body}),
        *((model, "serialization") for model in {route.answer for route in routes if route.answer} | {Error}),
    ]
    models.sort(key=lambda item: str(item[0].__name__))
    keyed, whole = models_json_schema(models, ref_template="#/components/schemas/{model}")
    references = {model: schema for (model, _), schema in keyed.items()}
    paths: dict[str, _Schema] = {}
    for route in routes:
        paths.setdefault(route.name, {})[route.method.lower()] = _operation(route, references)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "edged",
            "version": edged.__version__,
            "description": "A causal LM on one edge box, aligned to each user while it serves. See docs/api.md.",
        },
        "paths": paths,
        "components": {
            "schemas": whole["$defs"],
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer", "description": "Over TCP."}},
        },
        "security": [{}, {"token": []}],
    }


def _operation(route: Route, references: Mapping[Any, _Schema]) -> _Schema:
    summary = (route.handler.__doc__ or "").split("\n")[0].removesuffix(".")
    content: _Schema = {_JSON: {"schema": references[route.answer]}} if route.answer is not None else {}
    content |= {media: {"schema": _EVENT if media == EVENTS else {"type": "string"}} for media in route.media}
    responses: _Schema = {str(route.status): {"description": summary, "content": content}}
    for status in sorted({*_ANY_ROUTE, *route.errors, *((413,) if route.body else ())}):
        answer = {"description": MEANINGS[status], "content": {_JSON: {"schema": references[Error]}}}
        responses[str(status)] = {**answer, **({"headers": _RETRY_AFTER} if status in (429, 503) else {})}
    made: _Schema = {
        "summary": summary,
        "operationId": re.sub(r"\W+", "_", f"{route.method.lower()}{route.name}").strip("_"),
        "responses": responses,
    }
    parameters: list[_Schema] = []
    for name in re.findall(r"{(\w+)}", route.name):
        named = {"type": "string", "minLength": 1, "description": f"The {name}; unknown ones are 404."}
        parameters.append({"name": name, "in": "path", "required": True, "schema": named})
    parameters += [{"name": name, "in": "query", "schema": schema} for name, schema in route.query.items()]
    if parameters:
        made["parameters"] = parameters
    if route.body:
        bodies = [references[model] for model in route.body]
        schema = bodies[0] if len(bodies) == 1 else {"anyOf": bodies}
        made["requestBody"] = {"required": True, "content": {_JSON: {"schema": schema}}}
    return made
