"""Feedback names a completion by the id that the client gave its request, such as a chat application's message."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest

from tests.api.accounts import ANN, BOB, Client, root_only
from tests.api.live import LiveDaemon
from tests.api.test_access import daemon as shared  # noqa: F401
from tests.api.test_tools import exported

CHAT = "/v1/chat/completions"
TALK = [{"role": "user", "content": "Name a tree"}]


def ask(http: httpx2.Client, request_id: str, **fields: Any) -> httpx2.Response:
    body = {"messages": TALK, "max_tokens": 5, "ignore_eos": True, **fields}
    answer = http.post(CHAT, json=body, headers={"X-Request-Id": request_id})
    assert answer.status_code == 200, answer.text
    assert answer.headers["X-Request-Id"] == request_id
    return answer


def teach(http: httpx2.Client, request_id: str, signal: str, **more: Any) -> httpx2.Response:
    return http.post("/v1/feedback", json={"request_id": request_id, "signal": signal, **more})


def test_ratings_name_the_messages_that_a_client_knows(http: httpx2.Client) -> None:
    good = ask(http, "message-1", user="tess", seed=1).json()["choices"][0]["message"]["content"]
    ask(http, "message-2", user="tess", seed=2, stream=True)
    assert teach(http, "message-1", "up").status_code == 200
    taken = teach(http, "message-2", "down").json()
    assert len(taken["pair_ids"]) == 1
    assert [pair["chosen"] for pair in exported(http, "tess") if "label" not in pair] == [good]


def test_of_several_requests_with_one_id_the_newest_is_meant(http: httpx2.Client) -> None:
    first, second = (
        ask(http, "with-tools", user="theo", seed=seed).json()["choices"][0]["message"]["content"] for seed in (1, 2)
    )
    assert first != second
    assert teach(http, "with-tools", "edit", text="An oak").status_code == 200
    (pair,) = exported(http, "theo")
    assert (pair["chosen"], pair["rejected"]) == ("An oak", second)


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"request_id": "never-was", "signal": "up"}, 404, None),
        ({"request_id": "a", "completion_id": "b", "signal": "up"}, 400, "completion_id"),
        ({"signal": "up"}, 400, "completion_id"),
        ({"request_id": "", "signal": "up"}, 400, "request_id"),
        ({"request_id": "a"}, 400, "signal"),
    ],
)
def test_what_names_no_answer_is_refused(
    http: httpx2.Client, body: dict[str, str], status: int, param: str | None
) -> None:
    refused = http.post("/v1/feedback", json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (status, param)


@root_only
def test_another_accounts_request_of_the_same_id_is_never_meant(shared: LiveDaemon) -> None:  # noqa: F811
    ann, bob = Client(ANN, shared.socket), Client(BOB, shared.socket)

    def asked(client: Client, name: str) -> None:
        body = {"messages": TALK, "max_tokens": 4, "user": name}
        assert client.call("POST", CHAT, body, **{"X-Request-Id": "same"}).status == 200

    asked(ann, ANN)
    asked(bob, BOB)
    taken = ann.post("/v1/feedback", {"request_id": "same", "signal": "edit", "text": "An elm"})
    assert taken.status == 200
    assert [line["chosen"] for line in ann.get("/v1/feedback").lines if line["source"] == "edit"] == ["An elm"]
    asked(bob, BOB)
    only = Client(BOB, shared.socket).call("POST", CHAT, {"messages": TALK, "user": BOB}, **{"X-Request-Id": "bobs"})
    assert only.status == 200
    refused = ann.post("/v1/feedback", {"request_id": "bobs", "signal": "up"})
    assert (refused.status, refused.code) == (404, "unknown_completion")
