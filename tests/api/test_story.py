"""`GET /v1/adapters/{name}/story`: what was learned when, what waits and why, answers side by side."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.api.live import LiveDaemon, running
from tests.api.test_feedback import ask, post
from tests.api.test_progress import teach
from tests.api.test_quarantine import SETTINGS, attack, held, until
from tests.models import save_tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny", max_position_embeddings=512)


def story(http: httpx2.Client, user: str = "ann") -> dict[str, Any]:
    answer = http.get(f"/v1/adapters/{user}/story")
    assert answer.status_code == 200, answer.text
    return answer.json()


def answered(http: httpx2.Client) -> dict[str, Any]:
    """The story, once the version that is served was tested and has answered."""

    def ready() -> dict[str, Any] | None:
        told = story(http)
        return told if [answer["answer"] is None for answer in told["answers"]] == [False, False] else None

    return until(ready)


def base_says(live: LiveDaemon, prompt: str) -> str:
    with live.openai() as client:
        return client.completions.create(model="tiny", prompt=prompt, max_tokens=48, temperature=0).choices[0].text


def test_it_tells_what_was_learned_undone_and_what_each_version_answers(tmp_path: Path, model: Path) -> None:
    with (
        running(tmp_path / "run", model, guard__held_out_share=0, store__save_every_s=0.1) as live,
        live.http() as http,
    ):
        teach(http)
        told = answered(http)
        assert [event["text"] for event in told["events"]] == ["Version 1 learned 1 pair (1 explicit pair)."]
        assert told["waits"] == []
        assert (told["prompt"], told["version"]) == ("0?", 1)
        assert [answer["version"] for answer in told["answers"]] == [0, 1]
        assert told["answers"][0]["answer"] == base_says(live, "0?")
        until(lambda: story(http)["answers"][-1]["on_disk"])
        http.post("/v1/adapters/ann/rollback", json={"version": 0}).raise_for_status()
        until(lambda: len(story(http)["events"]) == 2)
        told = story(http)
        assert told["events"][-1]["text"].startswith("Version 2 is the untrained adapter again")
        assert told["answers"][-1] == {**told["answers"][0], "version": 2, "on_disk": told["answers"][-1]["on_disk"]}
        assert http.get("/v1/adapters/bob/story").json()["error"]["code"] == "unknown_adapter"


@pytest.mark.slow
def test_a_tested_version_that_a_stop_kept_from_answering_answers_after_the_next_start(
    tmp_path: Path, model: Path
) -> None:
    folder, settings = tmp_path / "run", {"guard__held_out_share": 0, "store__save_every_s": 0.1}
    with running(folder, model, **settings) as live, live.http() as http:
        teach(http)
        said = answered(http)["answers"]
        assert live.stop() == 0
    with sqlite3.connect(live.data / "edged.db") as database:
        database.execute("UPDATE adapter_versions SET answer = NULL")
    with running(folder, model, **settings) as live, live.http() as http:
        assert answered(http)["answers"] == said


def test_what_waits_is_told_with_why_and_the_step_that_settles_it(tmp_path: Path, model: Path) -> None:
    settings = {**SETTINGS, "align__unpaired": "off"}
    with running(tmp_path / "run", model, **settings) as live, live.http() as http, live.openai() as client:
        attack(http)
        count = len(held(http))
        post(http, completion_id=ask(client, "ann", "hello").id, signal="up", user="ann")
        of_ratings, of_held = story(http)["waits"]
        assert of_held["text"].startswith(f"{count} pairs of ann are held: ")
        assert of_held["step"].startswith("edged quarantine release --user ann")
        assert of_ratings["text"] == '1 rating of ann waits: single ratings are not learned (align.unpaired = "off")'
        assert of_ratings["step"] == 'set align.unpaired = "apo", then edged reload'
        http.post("/v1/quarantine", json={"user": "ann", "action": "drop"}).raise_for_status()
        assert story(http)["waits"] == [of_ratings]
        assert f"{count} pairs, held because of " in story(http)["events"][-1]["text"]


def test_a_pair_that_waits_for_its_step_is_not_said_to_wait_as_ratings_do(tmp_path: Path, model: Path) -> None:
    settings = {**SETTINGS, "align__unpaired": "off", "align__accumulate_s": 3600}
    with running(tmp_path / "run", model, **settings) as live, live.http() as http, live.openai() as client:
        for prompt in ("one", "two"):
            post(http, completion_id=ask(client, "ann", prompt).id, signal="up", user="ann")
        teach(http)
        of_pairs, of_ratings = until(lambda: (waits := story(http)["waits"])[1:] and waits)
        assert of_pairs["text"].startswith("1 pair of ann waits: ")
        assert "align.unpaired" not in of_pairs["text"] + of_pairs["step"]
        assert of_ratings["text"].startswith("2 ratings of ann wait: single ratings are not learned")
        assert of_ratings["step"] == 'set align.unpaired = "apo", then edged reload'


def test_learning_that_is_switched_off_is_named_with_the_way_out(tmp_path: Path, model: Path) -> None:
    with running(tmp_path / "run", model, align__enabled="false") as daemon, daemon.http() as http:
        teach(http)
        (wait,) = story(http)["waits"]
        assert wait["text"] == "1 pair of ann waits: learning is switched off (align.enabled = false)"
        assert wait["step"] == "set align.enabled = true, then edged reload"


def test_the_status_is_summed_up_in_a_line_and_a_start_says_how_to_ask(tmp_path: Path, model: Path) -> None:
    with running(tmp_path / "run", model, align__enabled="false", api__listen="127.0.0.1:0") as daemon:
        status = daemon.status()
        assert status["verdict"] == "healthy, idle, 0 users, learning switched off"
        # Nothing was served: no time is 0 ms.
        assert status["latency"]["ttft_ms"] == {"p50": None, "p95": None}
        line = f'ask: edged ask --socket {daemon.socket} --user NAME "Hello"; page: http://127.0.0.1:'
        assert line in daemon.log
        assert f"; data: {daemon.data}" in daemon.log
