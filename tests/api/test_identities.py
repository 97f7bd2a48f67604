"""Clients that cannot say who asks: a rule or a token says where the user of a request comes from."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from edged.settings.access import token_hash
from edged.settings.load import ConfigError, load_settings
from tests.api.accounts import ANN, BOB, Answer, Client, open_folder, root_only
from tests.api.live import LiveDaemon, running
from tests.api.test_access import signals
from tests.models import save_tiny
from tests.test_daemon import tcp_port

pytestmark = root_only
EMAIL = "X-OpenWebUI-User-Email"
ULID = "01JZ8Q6Y3T0K5V9X2B7C4D1E6F"
"""What Home Assistant sends as `user`: a conversation's id."""
CHAT = "/v1/chat/completions"
TALK = [{"role": "user", "content": "Name a big city, please"}]
TOKENS = [
    {"name": "tablet", "users": ["ann"], "identity": "name:ann"},
    {"name": "webui", "users": ["ann", "bo@example.org", "kim*"], "identity": f"header:{EMAIL}"},
    {"name": "plain", "users": ["ann", "kim*"]},
]
RULES = [
    {"peers": [f"user:{ANN}"], "roles": ["use", "train"], "users": ["ann*"], "identity": f"header:{EMAIL}"},
    {"peers": [f"user:{BOB}"], "roles": ["use", "train"], "users": ["bob"], "identity": "name:bob"},
]


@pytest.fixture(scope="module")
def daemon() -> Iterator[LiveDaemon]:
    tokens = [{**token, "roles": ["use", "train"], "sha256": token_hash(str(token["name"]))} for token in TOKENS]
    settings = {"api__socket_mode": "0666", "api__listen": "127.0.0.1:0", "store__save_every_s": 0.05}
    with open_folder() as folder:
        save_tiny(folder / "tiny", max_position_embeddings=512)
        access = {"access__tokens": json.dumps(tokens), "access__rules": json.dumps(RULES)}
        with running(folder / "run", folder / "tiny", **settings, **access) as live:
            yield live


class Holder:
    """The holder of a token, over TCP."""

    def __init__(self, daemon: LiveDaemon, token: str) -> None:
        self.client, self.token = Client("root", tcp_port(daemon.process.pid or 0)), token

    def call(self, method: str, path: str, body: Any = None, **headers: str) -> Answer:
        return self.client.call(method, path, body, Authorization=f"Bearer {self.token}", **headers)

    def chat(self, headers: dict[str, str] | None = None, **fields: Any) -> Answer:
        body = {"messages": TALK, "max_tokens": 4, "ignore_eos": True, **fields}
        return self.call("POST", CHAT, body, **headers or {})


def who(daemon: LiveDaemon, answer: Answer) -> str | None:
    """The user of an answer, as the store has it; None where nothing is kept."""
    import sqlite3

    assert answer.status == 200, answer.data
    with sqlite3.connect(f"file:{daemon.data}/edged.db?mode=ro", uri=True) as db:
        row = db.execute("SELECT user FROM completions WHERE id = ?", [answer.json["id"]]).fetchone()
        return row and str(row[0])


def test_a_token_of_one_person_teaches_that_person_whatever_the_body_says(daemon: LiveDaemon) -> None:
    tablet = Holder(daemon, "tablet")
    answer = tablet.chat(user=ULID)
    assert who(daemon, answer) == "ann"
    assert answer.headers["X-Edged-Ignored"] == "user"
    assert who(daemon, tablet.chat(user="no name: of a user")) == "ann"
    for quiet in (tablet.chat(), tablet.chat(user="ann")):
        assert who(daemon, quiet) == "ann"
        assert "X-Edged-Ignored" not in quiet.headers
    assert who(daemon, tablet.call("POST", "/v1/completions", {"prompt": "a", "user": ULID, "max_tokens": 2})) == "ann"
    assert who(daemon, tablet.call("POST", "/v1/responses", {"input": "a", "user": ULID})) == "ann"
    assert tablet.chat(model="tiny:ann", user=ULID).status == 200
    assert tablet.chat(model="tiny:kim").code == "forbidden_user"
    assert Holder(daemon, "plain").chat(user=ULID).code == "forbidden_user"


def test_home_assistants_conversation_teaches_the_person_and_no_conversation(daemon: LiveDaemon) -> None:
    tablet = Holder(daemon, "tablet")
    system = {"role": "system", "content": "You are a voice assistant for a house."}
    first = tablet.chat(messages=[system, *TALK], user=ULID, max_tokens=12, seed=1, stream=False).json
    said = {"role": "assistant", "content": first["choices"][0]["message"]["content"]}
    again = [system, *TALK, said, {"role": "user", "content": "No, I meant a small city"}]
    assert tablet.chat(messages=again, user=ULID).status == 200
    assert (signals(daemon, "ann"), signals(daemon, ULID)) == (1, 0)


def test_a_header_says_who_asks_and_must_be_among_the_grants_users(daemon: LiveDaemon) -> None:
    webui = Holder(daemon, "webui")
    for value, user in (("ann", "ann"), ("bo%40example.org", "bo@example.org"), ("kim.7", "kim.7")):
        answer = webui.chat({EMAIL: value}, user="somebody-else")
        assert (who(daemon, answer), answer.headers["X-Edged-Ignored"]) == (user, "user")
    assert who(daemon, webui.chat(user="ann")) is None, "without the header nobody asks"
    assert who(daemon, webui.chat({EMAIL: ""})) is None
    refused = webui.chat({EMAIL: "eve"})
    assert (refused.status, refused.code) == (403, "forbidden_user")
    for value in ("ann+home@example.org", "ann%2Bhome", "a/b"):
        wrong = webui.chat({EMAIL: value})
        assert (wrong.status, wrong.code, wrong.json["error"]["param"]) == (400, "bad_user", EMAIL)
        assert EMAIL in wrong.json["error"]["message"]
    twice = webui.chat({EMAIL: "ann", EMAIL.lower(): "kim"})
    assert (twice.status, "2 times" in twice.json["error"]["message"]) == (400, True)


@pytest.mark.parametrize(
    ("account", "headers", "user", "code"),
    [
        (ANN, {EMAIL: "ann.smith"}, "ann.smith", None),
        (ANN, {EMAIL: "bob"}, None, "forbidden_user"),
        (ANN, {}, None, None),
        (BOB, {}, "bob", None),
        (BOB, {EMAIL: "ann"}, "bob", None),
    ],
)
def test_peers_of_the_socket_are_identified_alike(
    daemon: LiveDaemon, account: str, headers: dict[str, str], user: str | None, code: str | None
) -> None:
    answer = Client(account, daemon.socket).call(
        "POST", CHAT, {"messages": TALK, "max_tokens": 2, "user": ULID}, **headers
    )
    assert answer.code == code
    if code is None:
        assert who(daemon, answer) == user


def test_models_of_users_that_are_granted_by_name_are_there_before_they_learn(daemon: LiveDaemon) -> None:
    def listed(holder: Holder) -> list[str]:
        return [item["id"] for item in holder.call("GET", "/v1/models").json["data"]]

    assert listed(Holder(daemon, "tablet")) == ["tiny", "tiny:ann"]
    assert listed(Holder(daemon, "webui")) == ["tiny", "tiny:ann", "tiny:bo@example.org"]
    webui = Holder(daemon, "webui")
    assert webui.call("GET", "/v1/models/tiny:bo@example.org").json["adapter"] == "bo@example.org"
    assert webui.call("GET", "/v1/models/tiny:kim.9").status == 404, "a pattern names nobody"
    assert webui.call("GET", "/v1/models/tiny:eve").code == "forbidden_user"


def test_background_tasks_are_served_and_never_kept_nor_learned_from(daemon: LiveDaemon) -> None:
    tablet = Holder(daemon, "tablet")
    before = signals(daemon, "ann")
    for stream in (False, True):
        asked = tablet.chat({"X-Edged-Task": "title_generation"}, stream=stream, max_tokens=3)
        assert asked.status == 200
        text = asked.data.decode()
        name = json.loads(text.removeprefix("data: ").split("\n\n")[0])["id"]
        told = tablet.call("POST", "/v1/feedback", {"completion_id": name, "signal": "up"})
        assert told.code == "unknown_completion"
    assert json.loads(tablet.chat({"X-Edged-Task": "tags"}).data)["service_tier"] == "flex"
    first = tablet.chat(max_tokens=12, seed=3).json["choices"][0]["message"]["content"]
    again = [*TALK, {"role": "assistant", "content": first}, {"role": "user", "content": "No, I meant a small city"}]
    assert tablet.chat({"X-Edged-Task": "follow_up_generation"}, messages=again).status == 200
    assert signals(daemon, "ann") == before
    usual = tablet.chat({"X-Edged-Task": ""})
    assert (usual.json["service_tier"], who(daemon, usual)) == ("default", "ann")


@pytest.mark.parametrize(
    ("identity", "sentence"),
    [
        ("email", '"email" is no identity: write "field"'),
        ("header:a b", '"header:a b" is no identity'),
        ("name:eve", 'the identity "name:eve" is of none of its users'),
    ],
)
def test_an_identity_that_cannot_be_is_named(identity: str, sentence: str) -> None:
    token = {"name": "t", "sha256": "0" * 64, "roles": ["use"], "users": ["ann", "kim*"]}
    with pytest.raises(ConfigError, match=sentence):
        load_settings(environ={}, overrides={"access.tokens": [{**token, "identity": identity}]})
    for fine in ("name:ann", "name:kim.2", "header:X-User", "field"):
        load_settings(environ={}, overrides={"access.tokens": [{**token, "identity": fine}]})
