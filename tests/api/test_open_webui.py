"""Open WebUI with edged's event function: requests and feedback rows as version 0.12.4 makes them."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import httpx2
import pytest

from edged.settings.access import token_hash
from tests.api.live import LiveDaemon, running
from tests.models import save_tiny
from tests.test_daemon import tcp_port

FUNCTION = Path(__file__).parents[2] / "integrations/open-webui/edged_ratings.py"
TOKEN, EMAIL = "edged_of-open-webui", "ann@example.org"
HEADERS = {"Authorization": f"Bearer {TOKEN}", "X-OpenWebUI-User-Email": "ann%40example.org"}
TALK = [{"role": "user", "content": "Name a river"}]


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveDaemon]:
    root = tmp_path_factory.mktemp("open-webui")
    save_tiny(root / "tiny", max_position_embeddings=512)
    token = {"name": "open-webui", "sha256": token_hash(TOKEN), "roles": ["use", "train"], "users": ["*"]}
    token["identity"] = "header:X-OpenWebUI-User-Email"
    tokens = json.dumps([token])
    with running(root / "run", root / "tiny", api__listen="127.0.0.1:0", access__tokens=tokens) as live:
        yield live


@pytest.fixture
def url(live: LiveDaemon) -> str:
    return f"http://127.0.0.1:{tcp_port(live.process.pid or 0)}/v1"


class Rows:
    """Feedback rows as Open WebUI's table has them."""

    def __init__(self) -> None:
        self.rows: dict[str, Any] = {}

    async def get_feedback_by_id(self, id: str) -> Any:
        return self.rows.get(id)

    def rated(self, id: str, message: str, rating: int | None, kind: str = "created") -> dict[str, Any]:
        """A row, and the event that tells of it."""
        about = {"arena": False, "chat_id": "c", "message_id": message, "message_index": 1, "tags": []}
        data = {"rating": rating, "model_id": "tiny", "sibling_model_ids": None, "reason": "", "comment": ""}
        self.rows[id] = SimpleNamespace(id=id, user_id="u", version=0, type="rating", data=data, meta=about)
        subject = {"type": "feedback", "id": id}
        return {"event": f"feedback.{kind}", "resource": "feedback", "subject": subject, "data": {"rating": rating}}


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> Rows:
    rows = Rows()
    for name in ("open_webui", "open_webui.models", "open_webui.models.feedbacks"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["open_webui.models.feedbacks"].Feedbacks = rows  # type: ignore[attr-defined]
    return rows


@pytest.fixture
def function(url: str) -> Any:
    spec = importlib.util.spec_from_file_location("edged_ratings", FUNCTION)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function = module.Event()
    function.valves = function.Valves(url=url, token=TOKEN)
    return function


def ask(url: str, message: str, task: str = "", **fields: Any) -> str:
    """A chat as the connection sends it, whose headers stand for the message and the task."""
    headers = {**HEADERS, "X-Request-Id": message, "X-Edged-Task": task}
    body = {"stream": True, "model": "tiny", "messages": TALK, "max_tokens": 6, "ignore_eos": True, **fields}
    answer = httpx2.post(f"{url}/chat/completions", json=body, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    chunks = [json.loads(line.removeprefix("data: ")) for line in answer.text.split("\n\n")[:-2]]
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])


def pairs(live: LiveDaemon, url: str) -> list[Any]:
    lines = httpx2.get(f"{url}/feedback", params={"user": EMAIL}, headers=HEADERS).text.splitlines()
    return [row for line in lines if "label" not in (row := json.loads(line))]


def test_thumbs_on_two_answers_are_a_pair_of_the_person_who_gave_them(
    live: LiveDaemon, url: str, rows: Rows, function: Any
) -> None:
    good, bad = (ask(url, message, seed=seed) for seed, message in enumerate(("m-1", "m-2")))
    ask(url, "", "title_generation", max_tokens=8)
    asyncio.run(function.event(rows.rated("f-1", "m-1", 1)))
    asyncio.run(function.event(rows.rated("f-2", "m-2", None)))
    assert pairs(live, url) == [], "a comment without a thumb teaches nothing"
    asyncio.run(function.event(rows.rated("f-2", "m-2", -1, "updated")))
    ((pair),) = pairs(live, url)
    assert (pair["user"], pair["chosen"], pair["rejected"]) == (EMAIL, good, bad)


def test_what_is_not_edgeds_does_no_harm(url: str, rows: Rows, function: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "edged_ratings")
    asyncio.run(function.event(rows.rated("f-3", "of-another-model", 1)))
    assert 'completion \\"of-another-model\\" is not known' in caplog.text
    for event in ({"event": "chat.created"}, {"event": "feedback.created", "subject": {"id": "gone"}}):
        asyncio.run(function.event(event))
    function.valves.url = "http://127.0.0.1:9/v1"
    asyncio.run(function.event(rows.rated("f-4", "m-1", 1)))
    assert "a rating did not reach edged at http://127.0.0.1:9/v1/feedback" in caplog.text
