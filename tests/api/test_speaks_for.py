"""Every route that takes a user refuses a caller who may not speak for it, before its handler is asked."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from edged.api.openapi import Route
from edged.api.routes import ROUTES
from edged.settings.access import token_hash
from tests.api.live import running
from tests.models import save_tiny
from tests.test_daemon import tcp_port

OWN_RULE = {"/v1/quarantine": "an admin sees all, others give ?user= of their own"}
"""Routes whose query may name a user, and whose handler knows more of it."""
BODIES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/completions": {"prompt": "a"},
    "/v1/responses": {"input": "a"},
    "/v1/feedback": {"prompt": "a", "chosen": "b", "rejected": "c"},
    "/v1/quarantine": {"action": "drop"},
}
"""The rest of each body that names a user."""
BY_PATH = [route for route in ROUTES if route.speaks_for and route.role in ("use", "train")]
BY_BODY = [route for route in ROUTES if any("user" in body.model_fields for body in route.body)]
named = {"ids": lambda route: f"{route.method} {route.path}"}


@pytest.fixture(scope="module")
def ben(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx2.Client]:
    """Someone who may use and train, and speaks for nobody else."""
    root: Path = tmp_path_factory.mktemp("speaks")
    token = {"name": "ben", "users": ["ben"], "roles": ["use", "train"], "sha256": token_hash("secret")}
    model = save_tiny(root / "tiny", max_position_embeddings=512)
    with running(root / "run", model, api__listen="127.0.0.1:0", access__tokens=json.dumps([token])) as daemon:
        url = f"http://127.0.0.1:{tcp_port(daemon.process.pid or 0)}"
        with httpx2.Client(base_url=url, headers={"Authorization": "Bearer secret"}, timeout=30.0) as client:
            yield client


def code(answer: httpx2.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


def test_every_route_that_names_a_user_says_where() -> None:
    for route in ROUTES:
        if route.path.startswith("/v1/adapters/{name}"):
            assert route.speaks_for == "name", route
        elif "user" in route.query:
            assert route.speaks_for == "user" or route.path in OWN_RULE, route


def test_there_are_routes_that_name_a_user() -> None:
    assert len([route for route in ROUTES if route.speaks_for]) > 10
    assert {route.path for route in BY_BODY} == set(BODIES)


@pytest.mark.parametrize("route", BY_PATH, **named)  # type: ignore[arg-type]
def test_a_route_is_refused_for_another_user_and_not_for_ones_own(ben: httpx2.Client, route: Route) -> None:
    def asked(user: str) -> httpx2.Response:
        return ben.request(
            route.method, route.path.format(name=user, user=user), params={"user": user} if route.query else {}
        )

    assert code(asked("ann")) == (403, "forbidden_user")
    own = asked("ben")
    assert own.status_code == 200 or code(own)[1] != "forbidden_user"


@pytest.mark.parametrize("route", BY_BODY, **named)  # type: ignore[arg-type]
def test_a_body_is_refused_for_another_user(ben: httpx2.Client, route: Route) -> None:
    assert code(ben.request(route.method, route.path, json=BODIES[route.path] | {"user": "ann"})) == (
        403,
        "forbidden_user",
    )
