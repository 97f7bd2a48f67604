"""docs/api.md names every route and every field that can be sent, docs/security.md those that are open to anybody."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai.types.chat.completion_create_params as chat_params
import openai.types.completion_create_params as params
import pytest

from edged.api.app import make_app
from edged.api.requests import ChatRequest, CompletionRequest, PairRequest, RatingRequest, SignalRequest
from edged.api.routes import ROUTES
from edged.api.services import Lifecycle
from edged.http.errors import ApiError
from edged.settings.load import Settings

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "api.md").read_text()


def test_every_route_is_described() -> None:
    routes = [route for route in make_app(Settings(), Lifecycle()).router.routes() if route.method != "HEAD"]
    headings = [line for line in TEXT.splitlines() if line.startswith("### ")]
    for route in routes:
        assert route.resource is not None
        path = route.resource.canonical
        assert any(f"`{route.method} {path}`" in heading for heading in headings), f"{route.method} {path}"


def test_every_route_that_is_open_to_anybody_is_told() -> None:
    (told,) = (text for text in (DOCS / "security.md").read_text().split("\n\n") if "For anybody" in text)
    for route in (route for route in ROUTES if route.role == "anybody"):
        assert f"`{route.name.replace('{name}', '*')}`" in told, route


@pytest.mark.parametrize("body", [ChatRequest, CompletionRequest, SignalRequest, PairRequest, RatingRequest])
def test_every_field_is_described(body: type[ChatRequest]) -> None:
    for field in body.model_fields:
        assert f"`{field}`" in TEXT or f'"{field}"' in TEXT, field


@pytest.mark.parametrize(
    ("body", "schema", "column"),
    [
        (ChatRequest, chat_params.CompletionCreateParamsBase, 1),
        (CompletionRequest, params.CompletionCreateParamsBase, 2),
    ],
)
def test_what_becomes_of_every_field_of_openais_schema_is_told_and_true(
    body: type[ChatRequest], schema: type, column: int
) -> None:
    rows = [line.split("|")[1:-1] for line in TEXT.partition("### Every field")[2].partition("###")[0].splitlines()]
    told = {field.strip(" `"): row[column].strip() for row in rows if len(row) > column for field in row[0].split(",")}
    needed: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "prompt": "a"}
    for field in schema.__annotations__:
        if told[field] == "honoured":
            assert field in body.model_fields, field
            continue
        sent = {name: value for name, value in needed.items() if name in body.model_fields} | {field: {"a": "b"}}
        if told[field] == "refused":
            with pytest.raises(ApiError, match=f'"{field}" is not supported'):
                body.checked(sent)
        else:
            assert (told[field], body.checked(sent).ignored) == ("ignored", field)
