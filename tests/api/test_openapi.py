"""The OpenAPI document names every route, is committed as it is served, and holds whatever is sent."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest
import schemathesis
from aiohttp import web
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from edged.api.app import make_app
from edged.api.openapi import document
from edged.api.routes import ROUTES
from edged.api.services import Lifecycle
from edged.settings.load import Settings
from tests.api.live import running
from tests.models import save_tiny

COPY = Path(__file__).parents[2] / "docs" / "openapi.json"
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
SETTINGS = {"api__listen": "127.0.0.1:0", "store__save_every_s": 0.1, "serving__default_max_tokens": 8}
DOCUMENT = document(ROUTES)
api = schemathesis.openapi.from_dict(DOCUMENT)
api.config.phases.coverage.enabled = False


def undocumented(app: web.Application) -> list[str]:
    """Routes of an application that the document lacks, as "METHOD /path"."""
    served = [(r.method, r.resource.canonical) for r in app.router.routes() if r.resource and r.method != "HEAD"]
    return [f"{method} {path}" for method, path in served if method.lower() not in DOCUMENT["paths"].get(path, {})]


def test_every_route_of_the_application_is_in_the_document() -> None:
    app = make_app(Settings(), Lifecycle())
    missing = undocumented(app)
    assert not missing, f"give these routes their line in edged/api/routes.py: {', '.join(missing)}"
    routes = {(r.method, r.resource.canonical) for r in app.router.routes() if r.resource is not None}
    assert {(method.upper(), path) for path, methods in DOCUMENT["paths"].items() for method in methods} <= routes


def test_the_committed_copy_is_what_the_code_says() -> None:
    said = json.loads(COPY.read_text())
    assert said == DOCUMENT, "write it anew: python -m tests.tree.documents"


def test_a_route_without_a_line_is_named() -> None:
    app = make_app(Settings(), Lifecycle())

    async def nothing(request: Any) -> Any:
        raise AssertionError

    app.router.add_get("/v1/new/{thing}", nothing)
    assert undocumented(app) == ["GET /v1/new/{thing}"]


def test_the_document_is_served(http: httpx2.Client) -> None:
    assert http.get("/openapi.json").json() == DOCUMENT


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A daemon on TCP that has learned something, so that adapters are there to ask for."""
    root = tmp_path_factory.mktemp("fuzzed")
    save_tiny(root / "tiny", max_position_embeddings=256)
    with running(root / "run", root / "tiny", **SETTINGS) as daemon:
        connections = psutil.Process(daemon.process.pid).net_connections("tcp")
        port = next(c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN)
        yield f"http://127.0.0.1:{port}"
        assert "Traceback" not in daemon.log


# Schemathesis' own parametrization leaves the operations out of the tests' names.
found: Any = api.get_all_operations()
of_each_operation = pytest.mark.parametrize("operation", [each.ok() for each in found], ids=lambda each: each.label)


def check(operation: Any, url: str, sending: settings) -> None:
    """Send what the document allows and what it does not, and hold every answer against the document."""
    # A stream of events does not end: schemathesis reads so many seconds of it.
    max_s = 1.0 if operation.label == "GET /v1/events" else 60.0

    @sending
    @given(case=st.one_of([operation.as_strategy(generation_mode=mode) for mode in GenerationMode]))
    def send(case: schemathesis.Case) -> None:
        body: dict[str, Any] = case.body if isinstance(case.body, dict) else {}
        if isinstance(body.get("n"), int):
            body["n"] = min(body["n"], 4)
        case.call_and_validate(base_url=url, checks=CHECKS, timeout=max_s)

    send()


@of_each_operation
def test_answers_are_as_the_document_says(operation: Any, url: str) -> None:
    check(
        operation,
        url,
        settings(max_examples=8, deadline=None, derandomize=True, database=None, phases=[Phase.generate]),
    )


@pytest.mark.slow
@of_each_operation
def test_answers_are_as_the_document_says_for_long(operation: Any, url: str) -> None:
    phases = [Phase.generate, Phase.shrink]
    check(operation, url, settings(max_examples=300, deadline=None, database=None, phases=phases))
