"""Single ratings over the socket: one thumb teaches, a pair with its answer takes its place, and all of it is told."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.api.live import LiveDaemon, running
from tests.api.test_feedback import ask, error, post, rows
from tests.faults.test_disk import until
from tests.models import save_tiny

SETTINGS = {"store__save_every_s": 0.1, "align__replay_share": 0, "guard__held_out_share": 0, "align__unpaired": "apo"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny", max_position_embeddings=512)


@pytest.fixture
def live(tmp_path: Path, model: Path) -> Iterator[LiveDaemon]:
    with running(tmp_path / "run", model, **SETTINGS) as daemon:
        yield daemon


def rate(daemon: LiveDaemon, http: httpx2.Client, kind: str, text: str = "hello", **options: Any) -> dict[str, Any]:
    """A fresh answer to `text` with this rating."""
    with daemon.openai() as client:
        answer = ask(client, "ann", text, **options)
    return post(http, completion_id=answer.id, signal=kind, user="ann")


def progress(http: httpx2.Client, feedback_id: str) -> dict[str, Any]:
    found: dict[str, Any] = http.get(f"/v1/feedback/{feedback_id}").json()
    return found


def settled(daemon: LiveDaemon, http: httpx2.Client, feedback_id: str) -> list[dict[str, Any]]:
    until(lambda: progress(http, feedback_id)["settled"], lambda: daemon.log)
    pairs: list[dict[str, Any]] = progress(http, feedback_id)["pairs"]
    return pairs


@pytest.mark.parametrize("kind", ["up", "down"])
def test_one_thumb_makes_a_version_that_answers_otherwise(live: LiveDaemon, kind: str) -> None:
    with live.http() as http, live.openai() as client:
        body = {"model": "tiny", "prompt": "hello", "user": "ann", "max_tokens": 1, "logprobs": 5, "temperature": 0}
        before = client.completions.create(**body).choices[0].logprobs
        taken = rate(live, http, kind)
        assert len(taken["pair_ids"]) == 1
        assert taken["reason"].startswith("learned as a single rating; waits for an answer to the same prompt")
        (pair,) = settled(live, http, taken["id"])
        assert (pair["state"], pair["version"]) == ("trained", 1)
        assert pair["text"].startswith("learned as ann@1")
        assert http.get("/v1/adapters/ann").json()["version"] == 1
        assert client.completions.create(**body).choices[0].logprobs != before
    ((chosen, rejected, source),) = rows(live, "SELECT chosen, rejected, source FROM pairs")
    assert (bool(chosen), bool(rejected), source) == (kind == "up", kind == "down", "thumbs")


def test_the_opposite_rating_makes_a_pair_that_takes_the_ratings_place(live: LiveDaemon) -> None:
    with live.http() as http:
        first = rate(live, http, "up", seed=1)
        settled(live, http, first["id"])
        second = rate(live, http, "down", seed=2)
        assert second["reason"] is None
        (pair,) = settled(live, http, second["id"])
        assert (pair["state"], pair["version"]) == ("trained", 2)
        replaced, same = progress(http, first["id"])["pairs"]
        assert replaced["text"] == "not learned: a pair with this answer has its place"
        assert same["pair_id"] == pair["pair_id"]


def test_an_export_has_ratings_as_trl_has_them(live: LiveDaemon) -> None:
    with live.http() as http:
        rate(live, http, "up", "one")
        rate(live, http, "down", "two")
        lines = [json.loads(line) for line in http.get("/v1/feedback").text.splitlines()]
        assert [line["label"] for line in lines] == [True, False]
        assert all(line["completion"] and line["messages"] and "chosen" not in line for line in lines)


def test_a_rating_that_brings_its_prompt_is_learned_once_and_by_who_teaches(live: LiveDaemon) -> None:
    rating = {"user": "ann", "messages": [{"role": "user", "content": "hello"}], "completion": "Hi!", "label": True}
    with live.http() as http:
        taken = post(http, **rating, weight=0.5)
        (pair,) = settled(live, http, taken["id"])
        assert (pair["state"], pair["version"], taken["reason"]) == ("trained", 1, None)
        post(http, **{**rating, "messages": None, "prompt_ids": [70, 71], "label": False})
        for wrong, field in (
            ({"label": 1}, "label"),
            ({"label": None}, "label"),
            ({"completion": ""}, None),
            ({"prompt": "hello"}, None),
            ({"imported": True}, "imported"),
        ):
            assert error(http, 400, **{**rating, **wrong})["param"] == field
    found = rows(live, "SELECT chosen, rejected, source, weight FROM pairs")
    assert found == [("Hi!", "", "thumbs", 0.5), ("", "Hi!", "thumbs", 1.0)]


def test_forgetting_a_user_leaves_no_rating(live: LiveDaemon) -> None:
    with live.http() as http:
        settled(live, http, rate(live, http, "up", "a text of some length")["id"])
        erased = http.delete("/v1/adapters/ann").json()
        assert erased["verified"], erased
        assert erased["rows_deleted"]["pairs"] == 1
        assert http.get("/v1/feedback").text == ""


@pytest.mark.slow
def test_ratings_wait_while_they_are_switched_off_and_are_learned_once_they_are_on(tmp_path: Path, model: Path) -> None:
    folder = tmp_path / "run"
    with running(folder, model, **SETTINGS, align__enabled="false") as daemon, daemon.http() as http:
        taken = rate(daemon, http, "up")
        daemon.stop()
    with running(folder, model, **{**SETTINGS, "align__unpaired": "off"}) as daemon, daemon.http() as http:
        (pair,) = progress(http, taken["id"])["pairs"]
        assert 'align.unpaired = "off"' in pair["waits_for"]
        assert http.get("/v1/adapters/ann").json()["version"] == 0
        daemon.stop()
    with running(folder, model, **SETTINGS) as daemon, daemon.http() as http:
        assert settled(daemon, http, taken["id"])[0]["state"] == "trained"


@pytest.mark.parametrize("restarted", [False, True])
def test_what_was_rated_while_ratings_were_off_is_learned_once_they_are_on(
    tmp_path: Path, model: Path, restarted: bool
) -> None:
    folder, config = tmp_path / "run", tmp_path / "edged.toml"
    settings = {name: value for name, value in SETTINGS.items() if name != "align__unpaired"}
    config.write_text('[align]\nunpaired = "off"\n')
    with running(folder, model, config=config, **settings) as daemon, daemon.http() as http:
        taken = rate(daemon, http, "up")
        assert taken["reason"].startswith("kept as a single rating; waits for an answer to the same prompt")
        assert progress(http, taken["id"])["blocked"], "nobody need wait for it"
        config.write_text('[align]\nunpaired = "apo"\n')
        if restarted:
            daemon.stop()
        else:
            http.post("/v1/reload").raise_for_status()
            assert settled(daemon, http, taken["id"])[0]["state"] == "trained"
    if restarted:
        with running(folder, model, config=config, **settings) as daemon, daemon.http() as http:
            assert settled(daemon, http, taken["id"])[0]["state"] == "trained"


@pytest.mark.slow
def test_kills_lose_no_rating_and_teach_none_twice(tmp_path: Path, model: Path) -> None:
    folder, acknowledged = tmp_path / "run", set[int]()
    for moment in (1, 4, 7):
        with running(folder, model, **SETTINGS) as daemon, daemon.http() as http:
            for number in range(moment):
                taken = rate(daemon, http, "up" if number % 2 else "down", f"question {moment} {number}")
                acknowledged |= set(taken["pair_ids"])
            assert daemon.stop(signal.SIGKILL) == -signal.SIGKILL
    with running(folder, model, **SETTINGS) as daemon, daemon.http() as http:
        until(lambda: http.get("/v1/adapters/ann").json()["pairs_queued"] == 0, lambda: daemon.log)
        daemon.stop()
        found = rows(daemon, "SELECT id, state, epochs_done FROM pairs ORDER BY id")
        ((learned,),) = rows(daemon, "SELECT sum(pairs) FROM adapter_versions WHERE reason = 'trained'")
    assert found == [(number, "trained", 1) for number in sorted(acknowledged)]
    assert learned == len(found)
