"""docs/api.md names every route and every field that can be sent, docs/security.md those that are open to anybody."""

from __future__ import annotations

from pathlib import Path

import pytest

from edged.api.app import make_app
from edged.api.requests import ChatRequest, CompletionRequest, PairRequest, SignalRequest
from edged.api.routes import ROUTES
from edged.api.services import Lifecycle
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


@pytest.mark.parametrize("body", [ChatRequest, CompletionRequest, SignalRequest, PairRequest])
def test_every_field_is_described(body: type[ChatRequest]) -> None:
    for field in body.model_fields:
        assert f"`{field}`" in TEXT or f'"{field}"' in TEXT, field
