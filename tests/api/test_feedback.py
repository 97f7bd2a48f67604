"""Feedback through the socket: durable when acknowledged, learned soon after, refused with the reason."""

from __future__ import annotations

import json
import sqlite3
import time
from typing import Any

import httpx2
import openai
import pytest

from tests.api.live import LiveDaemon
from tests.models import byte_tokenizer

Chat = openai.types.chat.ChatCompletion


def ask(client: openai.OpenAI, user: str, text: str = "hello", **options: Any) -> Chat:
    messages = [{"role": "user", "content": text}]
    return client.chat.completions.create(
        model="tiny", messages=messages, user=user, max_tokens=12, **{"seed": 3, **options}
    )


def post(http: httpx2.Client, status: int = 200, **body: Any) -> dict[str, Any]:
    response = http.post("/v1/feedback", content=json.dumps(body).encode())
    assert response.status_code == status, response.text
    return response.json()


def error(http: httpx2.Client, status: int = 400, **body: Any) -> dict[str, Any]:
    return post(http, status, **body)["error"]


def rows(daemon: LiveDaemon, sql: str, *arguments: Any) -> list[tuple[Any, ...]]:
    """What another program sees in the database file."""
    with sqlite3.connect(f"file:{daemon.data / 'edged.db'}?mode=ro", uri=True) as db:
        return db.execute(sql, arguments).fetchall()


def test_an_acknowledged_signal_is_on_disk_and_names_its_pairs(
    client: openai.OpenAI, http: httpx2.Client, daemon: LiveDaemon
) -> None:
    answer = ask(client, "ann", n=3)
    result = post(http, completion_id=answer.id, signal="chosen", choice=1, user="ann")
    assert len(result["pair_ids"]) == 2
    assert result["reason"] is None
    stored = rows(daemon, "SELECT signal, choice, user FROM signals WHERE id = ?", result["id"])
    assert stored == [("chosen", 1, "ann")]
    chosen = rows(daemon, "SELECT DISTINCT chosen FROM pairs WHERE id IN (?, ?)", *result["pair_ids"])
    assert chosen == [(answer.choices[1].message.content,)]


def test_a_pair_is_trained_on_and_the_next_answer_comes_from_a_new_version(
    client: openai.OpenAI, http: httpx2.Client, daemon: LiveDaemon
) -> None:
    messages = [{"role": "user", "content": "how are you?"}]
    for i in range(6):
        post(http, user="ben", messages=messages, chosen=f"fine {i}", rejected=f"none of your business {i}")
    deadline = time.monotonic() + 30
    fingerprint = None
    while fingerprint in (None, "base") and time.monotonic() < deadline:
        fingerprint = ask(client, "ben").system_fingerprint
    assert (fingerprint or "").startswith("ben@")
    assert ask(client, "nobody").system_fingerprint == "base"
    adapter = http.get("/v1/adapters/ben").json()
    assert adapter["pairs_seen"] == 6
    assert adapter["version"] >= 1
    assert "tiny:ben" in [model.id for model in client.models.list()]


def test_an_answer_can_be_rated_as_soon_as_its_last_chunk_is_read(client: openai.OpenAI, http: httpx2.Client) -> None:
    messages = [{"role": "user", "content": "quick"}]
    for _ in range(5):
        stream = client.chat.completions.create(model="tiny", messages=messages, user="cat", max_tokens=3, stream=True)
        chunk = next(chunk for chunk in stream if chunk.choices[0].finish_reason)
        taken = post(http, completion_id=chunk.id, signal="up")
        assert not taken["duplicate"], "it is another answer than the one before"


def sides(daemon: LiveDaemon, pair_ids: list[int]) -> list[tuple[Any, ...]]:
    return [rows(daemon, "SELECT chosen, rejected FROM pairs WHERE id = ?", pair_id)[0] for pair_id in pair_ids]


def test_opposite_ratings_of_the_same_prompt_make_a_pair(
    client: openai.OpenAI, http: httpx2.Client, daemon: LiveDaemon
) -> None:
    good, bad = (ask(client, "dan", seed=seed) for seed in (1, 2))
    first = post(http, completion_id=good.id, signal="up")
    assert len(first["pair_ids"]) == 1
    assert first["reason"].startswith("learned as a single rating")
    pair_ids = post(http, completion_id=bad.id, signal="down")["pair_ids"]
    assert sides(daemon, pair_ids) == [(good.choices[0].message.content, bad.choices[0].message.content)]


def test_an_edit_teaches_the_edited_text(client: openai.OpenAI, http: httpx2.Client, daemon: LiveDaemon) -> None:
    answer = ask(client, "eve")
    pair_ids = post(http, completion_id=answer.id, signal="edit", text="Good morning!")["pair_ids"]
    stored = rows(daemon, "SELECT chosen, rejected, source FROM pairs WHERE id = ?", *pair_ids)
    assert stored == [("Good morning!", answer.choices[0].message.content, "edit")]


def test_the_same_feedback_twice_changes_nothing(client: openai.OpenAI, http: httpx2.Client) -> None:
    answer = ask(client, "fay", n=2)
    first, second = (post(http, completion_id=answer.id, signal="chosen", choice=0) for _ in range(2))
    assert (first["id"], first["pair_ids"]) == (second["id"], second["pair_ids"])
    assert (first["duplicate"], second["duplicate"]) == (False, True)


def test_a_pair_that_is_reported_twice_is_learned_once(
    client: openai.OpenAI, http: httpx2.Client, daemon: LiveDaemon
) -> None:
    # Pairs of the tests before may be on their way to the engine.
    for row in http.get("/v1/adapters").json()["adapters"]:
        all_learned(http, row["adapter"])
    before = trained_by_now(daemon)
    answer = ask(client, "flo", n=9)
    results = [post(http, completion_id=answer.id, signal="chosen", choice=0) for _ in range(4)]
    assert [result["duplicate"] for result in results] == [False, True, True, True]
    time.sleep(0.5)
    learned = all_learned(http, "flo")
    trained = trained_by_now(daemon) - before
    assert trained + learned["pairs_held_out"] == learned["pairs_seen"] == 8


def trained_by_now(daemon: LiveDaemon) -> int:
    """Pairs that were trained on, once no user's pairs wait any more."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        finetune = daemon.status()["finetune"]
        if not finetune["pairs_queued"]:
            return int(finetune["pairs_trained"])
        time.sleep(0.05)
    raise AssertionError(f"pairs still wait: {finetune}")


def all_learned(http: httpx2.Client, user: str) -> dict[str, Any]:
    """The adapter, once no pair waits any more."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        body = http.get(f"/v1/adapters/{user}").json()
        if body.get("pairs_queued") == 0:
            return body
        time.sleep(0.05)
    raise AssertionError(f"pairs still wait: {body}")


def test_going_on_after_a_regenerated_answer_teaches_it(
    client: openai.OpenAI, http: httpx2.Client, daemon: LiveDaemon
) -> None:
    bad, good = (ask(client, "joe", "tell me a story", seed=seed) for seed in (1, 2))
    (rating,) = post(http, completion_id=bad.id, signal="regenerate")["pair_ids"]
    assert sides(daemon, [rating]) == [("", bad.choices[0].message.content)]
    messages = [
        {"role": "user", "content": "tell me a story"},
        {"role": "assistant", "content": good.choices[0].message.content},
        {"role": "user", "content": "and where does it take place?"},
    ]
    client.chat.completions.create(model="tiny", messages=messages, user="joe", max_tokens=2)
    all_learned(http, "joe")
    pairs = rows(daemon, "SELECT chosen, rejected FROM pairs WHERE adapter = 'joe' AND chosen <> ''")
    assert pairs == [(good.choices[0].message.content, bad.choices[0].message.content)]


def test_the_stored_tokens_are_the_generated_ones_up_to_the_stop(client: openai.OpenAI, daemon: LiveDaemon) -> None:
    options = {"temperature": 0, "extra_body": {"ignore_eos": True}}
    text = ask(client, "gil", **options).choices[0].message.content or ""
    answer = ask(client, "gil", **options, stop=text[4:6])
    ((ids, kept),) = rows(daemon, "SELECT token_ids, text FROM choices WHERE completion_id = ?", answer.id)
    assert kept == answer.choices[0].message.content == text[: text.index(text[4:6])] != ""
    assert byte_tokenizer().decode(json.loads(ids)) == kept


def test_a_half_read_stream_is_kept_so_that_it_can_be_rated(
    client: openai.OpenAI, http: httpx2.Client, daemon: LiveDaemon
) -> None:
    messages = [{"role": "user", "content": "go on"}]
    stream = client.chat.completions.create(
        model="tiny", messages=messages, user="hal", max_tokens=450, stream=True, extra_body={"ignore_eos": True}
    )
    chunk = next(chunk for chunk in stream if chunk.choices[0].delta.content)
    stream.close()
    assert daemon.idle()
    post(http, completion_id=chunk.id, signal="down")
    assert rows(daemon, "SELECT finish_reason FROM choices WHERE completion_id = ?", chunk.id) == [("cancelled",)]


def test_a_correction_in_the_next_turn_marks_the_answer_before(client: openai.OpenAI, daemon: LiveDaemon) -> None:
    first = ask(client, "ivy", "tell me about the weather in Oslo")
    messages = [
        {"role": "user", "content": "tell me about the weather in Oslo"},
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "No, I meant Bergen"},
    ]
    client.chat.completions.create(model="tiny", messages=messages, user="ivy", max_tokens=4)
    assert rows(daemon, "SELECT signal FROM signals WHERE completion_id = ?", first.id) == [("rephrase",)]


def test_exported_pairs_can_be_imported(http: httpx2.Client) -> None:
    post(http, user="jan", prompt="2+2=", chosen="4", rejected="5")
    lines = [json.loads(line) for line in http.get("/v1/feedback", params={"user": "jan"}).text.splitlines()]
    assert [(line["prompt"], line["chosen"], line["rejected"]) for line in lines] == [("2+2=", "4", "5")]
    body = {key: lines[0][key] for key in ("prompt", "chosen", "rejected")}
    assert post(http, user="jim", **body)["pair_ids"]
    assert len(http.get("/v1/feedback").text.splitlines()) > 1


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"chosen": "no"}, "equal_sides"),
        ({"chosen": " "}, "empty_side"),
        ({"rejected": ""}, "empty_side"),
        ({"user": "a/b"}, None),
        ({"user": None}, None),
        ({"messages": []}, None),
        ({"messages": None}, None),
        ({"prompt": "also"}, None),
        ({"chosen": 5}, None),
        ({"chosen": "\ud83d"}, "malformed_json"),
        ({"chosn": "typo"}, None),
    ],
)
def test_a_pair_that_teaches_nothing_is_refused(http: httpx2.Client, change: dict[str, Any], code: str | None) -> None:
    pair = {"user": "kim", "messages": [{"role": "user", "content": "?"}], "chosen": "yes", "rejected": "no"}
    assert error(http, **{**pair, **change})["code"] == code


def test_feedback_on_what_is_not_there_is_refused(client: openai.OpenAI, http: httpx2.Client) -> None:
    answer = ask(client, "lea")
    assert error(http, 404, completion_id="chatcmpl-0", signal="up")["code"] == "unknown_completion"
    assert error(http, completion_id=answer.id, signal="up", choice=4)["code"] == "bad_choice"
    assert error(http, completion_id=answer.id, signal="sideways")["code"] == "bad_signal"
    assert error(http, completion_id=answer.id, signal="edit")["code"] == "bad_signal"
    assert error(http, completion_id=answer.id, signal="up", user="max")["code"] == "wrong_user"
    assert error(http, completion_id=answer.id, signal="dwell", seconds=-1)["code"] == "bad_signal"
    assert "completion_id" in error(http, nothing=1)["message"]


def test_an_answer_of_the_base_model_teaches_nobody_and_is_not_kept(
    client: openai.OpenAI, http: httpx2.Client, daemon: LiveDaemon
) -> None:
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 8}
    answer = client.chat.completions.create(**asked)
    refused = error(http, 404, completion_id=answer.id, signal="up")
    assert refused["code"] == "unknown_completion"
    assert "send `user`" in refused["message"]
    with client.chat.completions.create(**{**asked, "max_tokens": 400}, stream=True) as stream:
        next(chunk for chunk in stream if chunk.choices[0].delta.content)
    assert daemon.idle()
    ask(client, "mia")
    assert rows(daemon, "SELECT count(*) FROM completions WHERE user = 'mia'") == [(1,)]
    assert rows(daemon, "SELECT id FROM completions WHERE user IS NULL AND adapter IS NULL") == []


def test_a_choice_of_another_prompt_is_named_by_its_index(http: httpx2.Client, daemon: LiveDaemon) -> None:
    body = {"prompt": ["one", "two", "three"], "n": 2, "seed": 5, "user": "mul", "max_tokens": 8, "ignore_eos": True}
    answer = http.post("/v1/completions", json=body, headers={"X-Request-Id": "of-several"}).json()
    texts = [choice["text"] for choice in answer["choices"]]
    about = {"completion_id": answer["id"], "signal": "chosen"}
    post(http, **about, choice=3)
    post(http, request_id="of-several", signal="chosen", choice=4)
    found = rows(daemon, "SELECT prompt, chosen, rejected FROM pairs WHERE adapter = 'mul' ORDER BY id")
    assert found == [("two", texts[3], texts[2]), ("three", texts[4], texts[5])]
    for wrong in ({}, {"choice": 6}, {"choice": -1}):
        told = error(http, **about, **wrong)
        assert (told["code"], "give `choice` as its" in told["message"]) == ("bad_choice", True)
