"""The OpenAPI 3.1 document, made from the table of routes and the models of their bodies.

`python -m edged.api.openapi` prints it; `docs/openapi.json` is a copy of that.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from pydantic.json_schema import JsonSchemaMode, models_json_schema

import edged
from edged.api.errors import meaning_of
from edged.api.responses import Error
from edged.api.route import EVENTS, Route

_JSON = "application/json"
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


def document(routes: Sequence[Route]) -> _Schema:
    """The OpenAPI document of the application's routes."""
    references, schemas = _schemas(routes)
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
            "schemas": schemas,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer", "description": "Over TCP."}},
        },
        "security": [{}, {"token": []}],
    }


def _schemas(routes: Sequence[Route]) -> tuple[dict[type, _Schema], dict[str, _Schema]]:
    """A reference to each model's schema, and the schemas by name. Bodies are what is taken, answers what is given."""
    taken = {model for route in routes for model in route.body}
    given = {route.answer for route in routes if route.answer is not None} | {Error}
    modes: list[tuple[Any, JsonSchemaMode]] = [(model, "validation") for model in taken]
    modes += [(model, "serialization") for model in given]
    modes.sort(key=lambda item: str(item[0].__name__))
    references, whole = models_json_schema(modes, ref_template=_REFERENCE)
    return {model: schema for (model, _), schema in references.items()}, whole["$defs"]


def _operation(route: Route, references: dict[type, _Schema]) -> _Schema:
    made: _Schema = {
        "summary": route.summary,
        "operationId": re.sub(r"\W+", "_", f"{route.method.lower()}{route.name}").strip("_"),
        "responses": _responses(route, references),
    }
    names = re.findall(r"{(\w+)}", route.name)
    parameters = [{"name": name, "in": "path", "required": True, "schema": _named(name)} for name in names]
    parameters += [{"name": name, "in": "query", "schema": schema} for name, schema in route.query.items()]
    if parameters:
        made["parameters"] = parameters
    if route.body:
        bodies = [references[model] for model in route.body]
        schema = bodies[0] if len(bodies) == 1 else {"anyOf": bodies}
        made["requestBody"] = {"required": True, "content": {_JSON: {"schema": schema}}}
    return made


def _named(name: str) -> _Schema:
    return {"type": "string", "minLength": 1, "description": f"The {name}; unknown ones are 404."}


def _responses(route: Route, references: dict[type, _Schema]) -> _Schema:
    content: _Schema = {_JSON: {"schema": references[route.answer]}} if route.answer is not None else {}
    content |= {media: {"schema": _EVENT if media == EVENTS else {"type": "string"}} for media in route.media}
    responses: _Schema = {str(route.status): {"description": route.summary, "content": content}}
    statuses = {*_ANY_ROUTE, *route.errors, *(_WITH_BODY if route.body else ())}
    for status in sorted(statuses):
        responses[str(status)] = {
            "description": meaning_of(status),
            "content": {_JSON: {"schema": references[Error]}},
        }
        if status in _RETRY_LATER:
            responses[str(status)]["headers"] = {
                "Retry-After": {"description": "Seconds to wait.", "schema": {"type": "integer"}}
            }
    return responses


if __name__ == "__main__":
    from edged.api.routes import ROUTES

    print(json.dumps(document(ROUTES), indent=1, ensure_ascii=False))
