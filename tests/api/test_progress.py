"""`GET /v1/feedback/{id}`: what became of a feedback's pairs, or what they wait for."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.api.accounts import ANN, BOB, Client, open_folder, root_only
from tests.api.live import running
from tests.api.test_quarantine import until
from tests.models import save_tiny


@pytest.fixture(scope="module")
def model() -> Iterator[Path]:
    with open_folder() as folder:
        yield save_tiny(folder / "tiny", max_position_embeddings=512)


def teach(http: httpx2.Client, user: str = "ann", number: int = 0) -> str:
    """Report a pair; returns the feedback's id."""
    pair = {"user": user, "prompt": f"{number}?", "chosen": f"Yes, {number}.", "rejected": f"No {number}!"}
    answer = http.post("/v1/feedback", json=pair)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


def progress(http: httpx2.Client, feedback_id: str) -> dict[str, Any]:
    return http.get(f"/v1/feedback/{feedback_id}").json()


def settled(http: httpx2.Client, feedback_id: str) -> dict[str, Any]:
    """The feedback when all its pairs have an outcome: the only one."""
    (pair,) = until(lambda: (found := progress(http, feedback_id))["settled"] and found)["pairs"]
    return pair


def test_a_pair_is_learned_by_a_version_after_a_while(tmp_path: Path, model: Path) -> None:
    with running(tmp_path / "run", model, guard__held_out_share=0) as daemon, daemon.http() as http:
        pair = settled(http, teach(http))
        assert (pair["state"], pair["version"], pair["waits_for"]) == ("trained", 1, None)
        assert 0 < pair["seconds"] < 60
        assert re.fullmatch(r"learned as ann@1 after [\d.]+ s", pair["text"])


def test_a_pair_that_is_kept_as_a_test_says_so(tmp_path: Path, model: Path) -> None:
    with running(tmp_path / "run", model, guard__held_out_share=1) as daemon, daemon.http() as http:
        pair = settled(http, teach(http))
        assert (pair["state"], pair["version"], pair["seconds"]) == ("held_out", None, None)
        assert pair["text"].startswith("kept as a test")


def test_a_pair_that_is_too_long_is_told_and_why(tmp_path: Path, model: Path) -> None:
    with running(tmp_path / "run", model, cache__memory_mb=1) as daemon, daemon.http() as http:
        pair = {"user": "ann", "prompt": "?", "chosen": "yes " * 99, "rejected": "no " * 99}
        found = settled(http, http.post("/v1/feedback", json=pair).json()["id"])
        assert found["text"].startswith("not learned: ")


def test_pairs_that_wait_say_for_what(tmp_path: Path, model: Path) -> None:
    settings = {"guard__held_out_share": 0, "feedback__pairs_per_hour": 1}
    with running(tmp_path / "run", model, **settings) as daemon, daemon.http() as http:
        first, *others = [teach(http, number=number) for number in range(3)]
        settled(http, first)

        def of_the_hour() -> list[dict[str, Any]] | None:
            found = [progress(http, each) for each in others]
            named = ["feedback.pairs_per_hour = 1" in (each["pairs"][0]["waits_for"] or "") for each in found]
            return found if all(named) else None

        # Until the engine has counted them, they wait for their adapter's next step.
        waiting = until(of_the_hour)
        assert [(found["settled"], found["blocked"]) for found in waiting] == [(False, False)] * 2
        one, other = (found["pairs"][0]["waits_for"] for found in waiting)
        assert one.startswith("its hour: ")
        assert other.startswith("1 pair before it; its hour: ")


def test_learning_that_is_switched_off_is_named(tmp_path: Path, model: Path) -> None:
    with running(tmp_path / "run", model, align__enabled="false") as daemon, daemon.http() as http:
        found = progress(http, teach(http))
        assert (found["settled"], found["blocked"]) == (False, True)
        assert found["pairs"][0]["text"] == "waits: learning is switched off (align.enabled = false)"


def test_a_feedback_without_a_pair_says_why_and_an_unknown_one_is_not_found(tmp_path: Path, model: Path) -> None:
    with running(tmp_path / "run", model, feedback__weights__pair=0) as daemon, daemon.http() as http:
        found = progress(http, teach(http))
        assert (found["pairs"], found["settled"], found["user"]) == ([], True, "ann")
        assert "feedback.weights.pair" in found["reason"]
        for name in ("fb-0", "%ED%A0%80", "x" * 200):
            answer = http.get(f"/v1/feedback/{name}")
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_feedback")


@root_only
def test_anothers_feedback_is_not_there(model: Path) -> None:
    rules = [{"peers": [f"user:{ANN}"], "roles": ["use"]}, {"peers": [f"user:{BOB}"], "roles": ["use"]}]
    settings = {"api__socket_mode": "0666", "access__rules": json.dumps(rules)}
    with open_folder() as folder, running(folder / "run", model, **settings) as daemon, daemon.http() as http:
        path = f"/v1/feedback/{teach(http, ANN)}"
        answers = [Client(name, daemon.socket).get(path) for name in (ANN, BOB, "root")]
        assert [answer.status for answer in answers] == [200, 404, 200]
        assert answers[1].code == "unknown_feedback"
