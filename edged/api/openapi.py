"""`GET /openapi.json`: the OpenAPI 3.1 document, made from the application's routes and the models of their bodies.

Owns how routes and models become that document. Must not know what a route does: `edged.api.routes` has the table.

`python -m edged.api.openapi` prints it; `docs/openapi.json` is a copy of that.
"""

from __future__ import annotations

import json
import re
from typing import Any

from aiohttp import web
from pydantic.json_schema import JsonSchemaMode, models_json_schema

import edged
from edged.api import responses as answers
from edged.api.errors import meaning_of
from edged.api.routes import EVENTS, JSON, OPERATIONS, Operation

_ANY_ROUTE = (400, 401, 403, 429, 500, 503)
"""What every route may answer: a wrong query, a caller that may not, too many requests, a failure, not now."""
_WITH_BODY = (413,)
_RETRY_LATER = (429, 503)
_REFERENCE = "#/components/schemas/{model}"
_Schema = dict[str, Any]
_EVENT: _Schema = {
    "type": "object",
    "description": "Each server-sent event. A completion's `data` is a chunk in OpenAI's shape, at last [DONE].",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
}


def undocumented(app: web.Application) -> list[str]:
    """Routes of the application that have no line in the table, as "METHOD /path"."""
    return [f"{method} {path}" for method, path in _routes(app) if (method, path) not in OPERATIONS]


def document(app: web.Application) -> _Schema:
    """The OpenAPI document of the application's routes."""
    documented = [route for route in _routes(app) if route in OPERATIONS]
    references, schemas = _schemas([OPERATIONS[route] for route in documented])
    paths: dict[str, _Schema] = {}
    for method, path in documented:
        paths.setdefault(path, {})[method.lower()] = _operation(method, path, OPERATIONS[method, path], references)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "edged",
            "version": edged.__version__,
            "description": "A causal LM on one edge box, aligned to each user while it serves. See docs/api.md.",
        },
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer", "description": "Over TCP."}},
        },
        "security": [{}, {"token": []}],
    }


async def get_document(request: web.Request) -> web.Response:
    """This daemon's document."""
    return web.json_response(document(request.app), dumps=_dumps)


def _routes(app: web.Application) -> list[tuple[str, str]]:
    return [
        (route.method, route.resource.canonical)
        for route in app.router.routes()
        if route.resource is not None and route.method != "HEAD"
    ]


def _schemas(operations: list[Operation]) -> tuple[dict[type, _Schema], dict[str, _Schema]]:
    """A reference to each model's schema, and the schemas by name. Bodies are what is taken, answers what is given."""
    taken = {model for operation in operations for model in operation.body}
    given = {operation.answer for operation in operations if operation.answer is not None} | {answers.Error}
    modes: list[tuple[Any, JsonSchemaMode]] = [(model, "validation") for model in taken]
    modes += [(model, "serialization") for model in given]
    modes.sort(key=lambda item: str(item[0].__name__))
    references, whole = models_json_schema(modes, ref_template=_REFERENCE)
    return {model: schema for (model, _), schema in references.items()}, whole["$defs"]


def _operation(method: str, path: str, operation: Operation, references: dict[type, _Schema]) -> _Schema:
    made: _Schema = {
        "summary": operation.summary,
        "operationId": re.sub(r"\W+", "_", f"{method.lower()}{path}").strip("_"),
        "responses": _responses(operation, references),
    }
    names = re.findall(r"{(\w+)}", path)
    parameters = [{"name": name, "in": "path", "required": True, "schema": _named(name)} for name in names]
    parameters += [{"name": name, "in": "query", "schema": schema} for name, schema in operation.query.items()]
    if parameters:
        made["parameters"] = parameters
    if operation.body:
        bodies = [references[model] for model in operation.body]
        schema = bodies[0] if len(bodies) == 1 else {"anyOf": bodies}
        made["requestBody"] = {"required": True, "content": {JSON: {"schema": schema}}}
    return made


def _named(name: str) -> _Schema:
    return {"type": "string", "minLength": 1, "description": f"The {name}; unknown ones are 404."}


def _responses(operation: Operation, references: dict[type, _Schema]) -> _Schema:
    content: _Schema = {JSON: {"schema": references[operation.answer]}} if operation.answer is not None else {}
    content |= {media: {"schema": _EVENT if media == EVENTS else {"type": "string"}} for media in operation.media}
    responses: _Schema = {"200": {"description": operation.summary, "content": content}}
    statuses = {*_ANY_ROUTE, *operation.errors, *(_WITH_BODY if operation.body else ())}
    for status in sorted(statuses):
        responses[str(status)] = {
            "description": meaning_of(status),
            "content": {JSON: {"schema": references[answers.Error]}},
        }
        if status in _RETRY_LATER:
            responses[str(status)]["headers"] = {
                "Retry-After": {"description": "Seconds to wait.", "schema": {"type": "integer"}}
            }
    return responses


def _dumps(value: Any) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False)


if __name__ == "__main__":
    from edged.api.app import make_app
    from edged.api.services import Lifecycle
    from edged.settings.load import ApiSettings

    print(_dumps(document(make_app(ApiSettings(), Lifecycle()))))
