"""A burst of contradictory pairs is held, shown, decided about, and never learned from meanwhile."""

from __future__ import annotations

import socket
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.api.live import LiveDaemon, running
from tests.models import save_tiny

SETTINGS = {"guard__held_out_share": 0.0, "align__loss_threshold": 0.0, "store__save_every_s": 0.1}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model") / "tiny", max_position_embeddings=512)


@pytest.fixture
def daemon(tmp_path: Path, model: Path) -> Iterator[LiveDaemon]:
    with running(tmp_path / "run", model, **SETTINGS) as live:
        yield live


def tell(http: httpx2.Client, numbers: range, user: str = "ann", swapped: bool = False) -> list[int]:
    """Pairs of a user, one after the other; returns their ids."""
    found: list[int] = []
    for i in numbers:
        one, other = f"I will gladly help you, {i}.", f"No. I have no time for {i} now."
        chosen, rejected = (other, one) if swapped else (one, other)
        body = {"user": user, "prompt": f"Question {i}?", "chosen": chosen, "rejected": rejected, "imported": True}
        answer = http.post("/v1/feedback", json=body)
        assert answer.status_code == 200, answer.text
        found += answer.json()["pair_ids"]
    return found


def until(condition: Callable[[], Any], seconds: float = 60.0) -> Any:
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end
        time.sleep(0.02)
    return value


def adapter(http: httpx2.Client, user: str = "ann") -> dict[str, Any]:
    return http.get(f"/v1/adapters/{user}").json()


def held(http: httpx2.Client, user: str = "ann") -> list[dict[str, Any]]:
    return http.get("/v1/quarantine", params={"user": user}).json()["pairs"]


def progress(http: httpx2.Client, pair_id: int, daemon: LiveDaemon) -> dict[str, Any]:
    """What `GET /v1/feedback/{id}` says of a pair."""
    with sqlite3.connect(f"file:{daemon.data / 'edged.db'}?mode=ro", uri=True) as db:
        (feedback_id,) = db.execute("SELECT signal_id FROM pairs WHERE id = ?", [pair_id]).fetchone()
    (pair,) = http.get(f"/v1/feedback/{feedback_id}").json()["pairs"]
    return pair


def attack(http: httpx2.Client, user: str = "ann") -> tuple[list[int], list[int]]:
    """Ids of 8 good pairs, which are learned, and of the same 8 swapped, of which none that is held is."""
    good = tell(http, range(8), user)
    until(lambda: adapter(http, user)["pairs_trained"] == 8)
    bad = tell(http, range(8), user, swapped=True)
    until(lambda: (seen := adapter(http, user))["pairs_queued"] == 0 and seen["pairs_quarantined"] > 0)
    return good, bad


def test_a_burst_is_held_shown_and_decided_about(daemon: LiveDaemon) -> None:
    with daemon.http() as http:
        _, bad = attack(http)
        pairs = held(http)
        assert {pair["pair_id"] for pair in pairs} <= set(bad)
        assert len(pairs) >= 4
        assert any(pair["reason"].startswith("burst: ") for pair in pairs)
        assert pairs[0]["chosen"].startswith("No. I have no time")
        fate = progress(http, pairs[0]["pair_id"], daemon)
        assert (fate["state"], fate["waits_for"]) == ("quarantined", None)
        assert fate["text"] == f"held: {pairs[0]['reason']}; if this was you: edged quarantine release --user ann"
        status = daemon.status()
        assert status["quarantine"] == {"pairs": len(pairs)}
        assert f"{len(pairs)} pairs held" in status["verdict"]
        assert status["finetune"]["alarms"] == ["ann"]
        metrics = http.get("/metrics").text
        assert f"\nedged_quarantined_pairs {len(pairs)}.0\n" in metrics
        assert "\nedged_quarantine_alarms 1.0\n" in metrics
        # Another user is not concerned; who is, has the next ones held unseen.
        tell(http, range(20, 22), "bob")
        tell(http, range(20, 22))
        until(lambda: adapter(http, "bob")["pairs_trained"] == 2)
        until(lambda: len(held(http)) == len(pairs) + 2)
        trained = adapter(http)["pairs_trained"]
        first, *others = [pair["pair_id"] for pair in held(http)]
        answer = http.post(f"/v1/quarantine/{first}", json={"action": "release"}).json()
        assert answer == {"pair_id": first, "adapter": "ann", "decision": "released", "left": len(others)}
        until(lambda: adapter(http)["pairs_trained"] == trained + 1)
        for pair in others:
            assert http.post(f"/v1/quarantine/{pair}", json={"action": "drop"}).status_code == 200
        assert adapter(http)["pairs_quarantined"] == 0
        assert adapter(http)["pairs_skipped"] == len(others)
        # All is decided: what comes now is learned again.
        tell(http, range(30, 32))
        until(lambda: adapter(http)["pairs_trained"] == trained + 3)
        assert daemon.status()["finetune"]["alarms"] == []


@pytest.mark.slow
def test_what_is_held_and_the_alarm_survive_a_restart(tmp_path: Path, model: Path) -> None:
    with running(tmp_path / "run", model, **SETTINGS) as daemon, daemon.http() as http:
        attack(http)
        before = {pair["pair_id"] for pair in held(http)}
        trained = adapter(http)["pairs_trained"]
        daemon.process.kill()
        daemon.process.join()
    with running(tmp_path / "run", model, **SETTINGS) as daemon, daemon.http() as http:
        # Pairs whose version was not on disk yet come again, and meet the alarm.
        again = {pair["pair_id"] for pair in held(http)}
        assert again >= before
        tell(http, range(40, 41))
        until(lambda: {pair["pair_id"] for pair in held(http)} > again)
        assert adapter(http)["pairs_trained"] <= trained


def test_a_decision_that_cannot_be_taken_says_why(daemon: LiveDaemon) -> None:
    with daemon.http() as http:
        for pair, body, status, words in (
            ("12", {"action": "drop"}, 404, "pair 12 is not in quarantine"),
            ("twelve", {"action": "drop"}, 404, '"twelve" is not the number of a pair'),
            ("12", {"action": "eat"}, 400, "action"),
        ):
            answer = http.post(f"/v1/quarantine/{pair}", json=body)
            assert (answer.status_code, words in answer.json()["error"]["message"]) == (status, True), answer.text
        attack(http)
        pair = held(http)[0]["pair_id"]
        http.post(f"/v1/quarantine/{pair}", json={"action": "drop"})
        again = http.post(f"/v1/quarantine/{pair}", json={"action": "release"})
        assert again.status_code == 409
        assert "was dropped already" in again.json()["error"]["message"]
        assert http.get("/v1/quarantine?user=../x").status_code == 400


def test_pairs_beyond_an_hours_worth_are_kept_and_wait(tmp_path: Path, model: Path) -> None:
    with running(tmp_path / "run", model, feedback__pairs_per_hour=3, **SETTINGS) as daemon, daemon.http() as http:
        tell(http, range(5))
        until(lambda: adapter(http)["pairs_trained"] == 3)
        assert adapter(http)["pairs_queued"] == 2
        assert daemon.status()["finetune"]["pairs_waiting"] == 2


def test_a_release_is_learned_from_though_the_client_leaves_before_the_answer(daemon: LiveDaemon) -> None:
    with daemon.http() as http:
        attack(http)
        waiting = [pair["pair_id"] for pair in held(http)]
        trained = adapter(http)["pairs_trained"]
        body = b'{"action": "release"}'
        head = f"POST /v1/quarantine/{waiting[0]} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        with sqlite3.connect(daemon.data / "edged.db", isolation_level=None) as db:
            # The daemon's writer waits for this lock, and the client for the writer.
            db.execute("BEGIN IMMEDIATE")
            with socket.socket(socket.AF_UNIX) as raw:
                raw.connect(str(daemon.socket))
                raw.sendall(head + body)
                time.sleep(2.0)
            until(lambda: daemon.status()["open_requests"] == 0)
            time.sleep(0.3)
            db.execute("COMMIT")
        until(lambda: len(held(http)) < len(waiting))
        until(lambda: adapter(http)["pairs_trained"] > trained, 20.0)
