"""JSON as answers and server-sent events carry it."""

import json
from collections.abc import Mapping
from typing import Any

from aiohttp import web
from pydantic import BaseModel
from pydantic_core import to_jsonable_python

Json = dict[str, Any]
_LONG_LIST = 256
"""Entries; the elements of a longer list (of tokens) are encoded in one call each."""


def dumps(value: Any) -> str:
    """Encode as compact JSON; numbers that JSON lacks (infinities, NaN) become null."""
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False)
    except ValueError:
        return json.dumps(to_jsonable_python(value, inf_nan_mode="null"), separators=(",", ":"))


def dumps_piecewise(value: Any) -> str:
    """Encode as `dumps` does, in many short calls: in a thread it does not block the event loop."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{dumps(key)}:{dumps_piecewise(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        dump = dumps if len(value) > _LONG_LIST else dumps_piecewise
        return "[" + ",".join(map(dump, value)) + "]"
    return dumps(value)


def json_answer(value: BaseModel | Json, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    """Make a response of a model or a JSON object."""
    body = value.model_dump() if isinstance(value, BaseModel) else value
    return web.json_response(body, status=status, headers=headers, dumps=dumps)


def server_event(value: Json) -> bytes:
    """Encode one server-sent event."""
    return f"data: {dumps(value)}\n\n".encode()
