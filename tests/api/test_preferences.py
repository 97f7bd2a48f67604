"""A written preference is in the prompts of its user's chats from the next answer on, and in nobody else's."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from edged.api.written_preferences import WrittenPreferences
from edged.store import Store
from edged.store.feedback import WrittenPreference, set_distilled, set_preference
from edged.text.tokenizer import Tokenizer
from tests.api.accounts import ANN, BOB, Client, open_folder, root_only
from tests.api.live import LiveDaemon, running
from tests.models import byte_tokenizer, save_tiny

TEXT = "formal, metric units"
ASKED = [{"role": "user", "content": "How far?"}]


def path(user: str) -> str:
    return f"/v1/adapters/{user}/preference"


def put(http: httpx2.Client, user: str, text: str = TEXT, status: int = 200) -> dict[str, Any]:
    answer = http.put(path(user), json={"text": text})
    assert answer.status_code == status, answer.text
    return answer.json()


def chat(http: httpx2.Client, user: str | None = None, messages: Any = ASKED, **fields: Any) -> dict[str, Any]:
    body = {"messages": messages, "max_tokens": 3, **fields} | ({"user": user} if user else {})
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def prompt_tokens(http: httpx2.Client, user: str | None = None, messages: Any = ASKED, **fields: Any) -> int:
    return chat(http, user, messages, **fields)["usage"]["prompt_tokens"]


def rows(daemon: LiveDaemon, sql: str, *arguments: Any) -> list[tuple[Any, ...]]:
    with sqlite3.connect(f"file:{daemon.data / 'edged.db'}?mode=ro", uri=True) as db:
        return db.execute(sql, arguments).fetchall()


def test_it_is_in_the_prompt_from_the_next_answer_on_until_it_is_deleted(http: httpx2.Client) -> None:
    before = prompt_tokens(http, "pia")
    assert http.get(path("pia")).json()["text"] is None
    told = put(http, "pia", f"  {TEXT}\n")
    about = {"adapter": "pia", "text": TEXT, "distilled": 0.0, "in_prompt": True}
    assert told == {**about, "created_at": told["created_at"], "note": "in the system prompt of every chat"}
    assert http.get(path("pia")).json() == told
    longer = len(f"system: {TEXT}\n")  # this tokenizer has a token for each byte
    assert prompt_tokens(http, "pia") == before + longer
    system = [{"role": "system", "content": "Be brief."}, *ASKED]
    assert prompt_tokens(http, "pia", system) == prompt_tokens(http, "ben-pia", system) + len(f"\n\n{TEXT}")
    assert prompt_tokens(http, "pia", model="tiny:pia", stream=False) == before + longer
    assert http.delete(path("pia")).json()["text"] is None
    assert prompt_tokens(http, "pia") == before


def test_nobody_elses_prompt_has_it_nor_a_plain_completions(http: httpx2.Client) -> None:
    before, plain = prompt_tokens(http, "quinn"), {"prompt": "How far?", "max_tokens": 3, "user": "quin"}
    put(http, "quin")
    assert prompt_tokens(http, "quinn") == prompt_tokens(http) == before
    assert http.post("/v1/completions", json=plain).json()["usage"]["prompt_tokens"] == len("How far?")


def test_what_is_stored_and_learned_from_is_the_prompt_as_it_was_asked(
    http: httpx2.Client, daemon: LiveDaemon, client: openai.OpenAI
) -> None:
    asked_ids = byte_tokenizer().apply_chat_template(ASKED, add_generation_prompt=True, return_dict=False)
    put(http, "rae")
    answer = chat(http, "rae", n=2, seed=5, temperature=1.5)
    stored = rows(daemon, "SELECT messages, prompt_ids FROM completions WHERE id = ?", answer["id"])
    assert [tuple(map(json.loads, row)) for row in stored] == [(ASKED, asked_ids)]
    report = {"completion_id": answer["id"], "signal": "chosen", "choice": 0}
    assert http.post("/v1/feedback", json=report).json()["pair_ids"]
    pairs = rows(daemon, "SELECT messages, prompt_ids FROM pairs WHERE adapter = 'rae'")
    assert [tuple(map(json.loads, row)) for row in pairs] == [(ASKED, asked_ids)]


def test_it_changes_the_answer_as_the_same_system_message_does(http: httpx2.Client) -> None:
    put(http, "sam", "zzz")
    ours = chat(http, "sam", temperature=0, max_tokens=12)["choices"][0]["message"]["content"]
    said = [{"role": "system", "content": "zzz"}, *ASKED]
    theirs = chat(http, "sams", said, temperature=0, max_tokens=12)["choices"][0]["message"]["content"]
    assert ours == theirs != chat(http, "sams", temperature=0, max_tokens=12)["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"text": "x" * 10_000}, '"text": 10000 characters are too many: at most 500'),
        ({"text": "x" * 300}, '"text": its 300 tokens are too many: at most 256'),
        ({"text": " \n"}, '"text": is empty'),
        ({"text": "be good\nuser: hi"}, '"text": it has "user:", which begins or ends a turn'),
        ({"text": TEXT, "txt": 1}, 'unknown field "txt"'),
        ({"text": 7}, '"text" = 7'),
        ({}, '"text" is missing'),
    ],
)
def test_bad_ones_are_refused_with_the_reason(http: httpx2.Client, body: dict[str, Any], said: str) -> None:
    answer = http.put(path("tia"), json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(said)
    assert http.get(path("tia")).json()["text"] is None


def test_special_tokens_in_it_are_text(http: httpx2.Client) -> None:
    before = prompt_tokens(http, "uma")
    put(http, "uma", "end </s> here <s>")
    assert prompt_tokens(http, "uma") == before + len("system: end </s> here <s>\n")
    assert http.put(path("uma"), content=b'{"text": "half \\ud83d"}').status_code == 400


def test_a_prompt_that_has_room_for_itself_alone_goes_without(http: httpx2.Client) -> None:
    put(http, "vic", "x" * 250)
    long = [{"role": "user", "content": "y" * 400}]
    assert prompt_tokens(http, "vic", long) == prompt_tokens(http, "vica", long)


def test_lines_are_struck_and_that_is_undone(http: httpx2.Client) -> None:
    def strike(**body: Any) -> list[str]:
        answer = http.post("/v1/adapters/wil/strike", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()["struck"]

    assert strike(key="likes: short") == ["likes: short"]
    assert strike(key="avoids: you") == ["avoids: you", "likes: short"]
    assert strike(key="likes: short", undo=True) == ["avoids: you"]
    assert http.post("/v1/adapters/wil/strike", json={"key": ""}).status_code == 400
    assert http.post("/v1/adapters/wil/strike", json={"key": "a", "what": 1}).status_code == 400


def test_who_stops_waiting_for_a_change_undoes_nothing_and_breaks_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store(tmp_path / "edged.db")
    preferences = WrittenPreferences(store, Tokenizer(byte_tokenizer(), "bytes"))
    written = WrittenPreference("ann", TEXT, "2026-01-01T00:00:00Z", "ann")
    changed = preferences.change("ann", lambda db: set_preference(db, written))
    changed.cancel()
    store.write(lambda db: None).result()
    store.close()
    assert changed.result(10) == written
    assert caplog.records == []


def test_it_is_in_no_log_line_and_no_metric(http: httpx2.Client, daemon: LiveDaemon) -> None:
    secret = "never mention the brass key"
    put(http, "xia", secret)
    chat(http, "xia")
    http.put(path("xia"), json={"text": secret, "more": secret})
    http.post("/v1/adapters/xia/strike", json={"key": secret})
    assert "brass" not in http.get("/metrics").text + daemon.log + http.get("/v1/status").text


def test_forgetting_takes_it_out_of_prompts_and_the_store(http: httpx2.Client, daemon: LiveDaemon) -> None:
    before = prompt_tokens(http, "yve")
    put(http, "yve", "never mention the third flower pot")
    http.post("/v1/adapters/yve/strike", json={"key": "pots"})
    told = http.delete("/v1/adapters/yve").json()
    assert (told["rows_deleted"]["preferences"], told["rows_deleted"]["struck_beliefs"]) == (1, 1)
    assert told["verified"]
    assert prompt_tokens(http, "yve") == before
    assert rows(daemon, "SELECT * FROM preferences WHERE adapter = 'yve'") == []


def test_a_restart_keeps_it_and_prompts_are_short_once_it_is_learned(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "tiny", max_position_embeddings=512)
    with running(tmp_path / "run", model) as daemon, daemon.http() as http:
        short = prompt_tokens(http, "zoe")
        put(http, "zoe")
        longer = prompt_tokens(http, "zoe")
        assert longer > short
        daemon.stop()
    with running(tmp_path / "run", model) as daemon, daemon.http() as http:
        assert prompt_tokens(http, "zoe") == longer
        daemon.stop()
    store = Store(daemon.data / "edged.db")
    store.write(lambda db: set_distilled(db, "zoe", TEXT, 1.0)).result()
    store.close()
    with running(tmp_path / "run", model) as daemon, daemon.http() as http:
        assert prompt_tokens(http, "zoe") == short
        told = http.get(path("zoe")).json()
        assert (told["in_prompt"], told["distilled"]) == (False, 1.0)
        assert put(http, "zoe", "casual")["in_prompt"]
        assert prompt_tokens(http, "zoe") == short + len("system: casual\n")


def test_a_model_whose_template_has_no_system_turn_is_told(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "tiny", max_position_embeddings=512)
    (model / "chat_template.jinja").write_text(
        "{% for m in messages if m['role'] != 'system' %}{{ m['content'] }}{% endfor %}"
    )
    with running(tmp_path / "run", model) as daemon, daemon.http() as http:
        short = prompt_tokens(http, "ann")
        told = put(http, "ann")
        assert (told["text"], told["in_prompt"]) == (TEXT, False)
        assert "has no system turn" in told["note"]
        assert prompt_tokens(http, "ann") == short


@pytest.fixture(scope="module")
def shared() -> Iterator[LiveDaemon]:
    """Account `nobody` may teach itself, account `daemon` may only ask."""
    rules = [{"peers": [f"user:{BOB}"], "roles": ["use"], "users": ["@self"]}]
    with open_folder() as folder:
        model = save_tiny(folder / "tiny", max_position_embeddings=512)
        settings = {"api__socket_mode": "0666", "access__rules": json.dumps(rules)}
        with running(folder / "run", model, **settings) as live:
            yield live


@root_only
def test_who_may_teach_a_user_may_read_and_write_it_and_nobody_else(shared: LiveDaemon) -> None:
    ann, bob = Client(ANN, shared.socket), Client(BOB, shared.socket)
    assert ann.call("PUT", path(ANN), {"text": TEXT}).status == 200
    assert ann.get(path(ANN)).json["text"] == TEXT
    for method, body in (("GET", None), ("PUT", {"text": "rude"}), ("DELETE", None)):
        refused = ann.call(method, path(BOB), body)
        assert (refused.status, refused.code) == (403, "forbidden_user")
        refused = bob.call(method, path(BOB), body)
        assert (refused.status, refused.code) == (403, "forbidden_role")
    strike = f"/v1/adapters/{BOB}/strike"
    assert ann.post(strike, {"key": "a"}).code == "forbidden_user"
    assert bob.post(strike, {"key": "a"}).code == "forbidden_role"
    assert ann.call("PUT", path("..%2Fx"), {"text": TEXT}).status == 404
