"""A backup that is made under load becomes a daemon elsewhere that goes on where this one was."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from edged.client.client import Address, Client
from edged.store.backup import write_file
from edged.store.restore import restore, verify
from tests.api.live import LiveDaemon, running
from tests.api.test_adapters import teach, until
from tests.models import save_tiny

SETTINGS = {"store__save_every_s": 0.2, "cache__memory_mb": 64}


def greedy(http: httpx2.Client, user: str) -> Any:
    body = {"prompt": "olga 1: ", "user": user, "temperature": 0, "max_tokens": 12}
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def back_up(daemon: LiveDaemon, file: Path, query: str = "") -> int:
    with Client(Address(sockets=(daemon.socket,))) as client:
        headers, chunks = client.download(f"/v1/backup{query}")
        write_file(chunks, file)
    return int(headers["X-Edged-Bytes"])


@pytest.fixture(scope="module")
def large(daemon: LiveDaemon) -> Iterator[LiveDaemon]:
    """The daemon with a database that no socket's buffer holds."""
    body = {"user": "big", "prompt": "x" * 30_000, "chosen": "y" * 30_000, "rejected": "z"}
    with daemon.http() as http:
        for i in range(60):
            assert http.post("/v1/feedback", json={**body, "chosen": f"{i} {body['chosen']}"}).status_code == 200
        yield daemon
        http.delete("/v1/adapters/big")


class Load(threading.Thread):
    """Feedback of bob and answers for ann, one after the other, until it is stopped."""

    def __init__(self, daemon: LiveDaemon) -> None:
        super().__init__()
        self._daemon, self._stopping = daemon, threading.Event()
        self.acknowledged: list[str] = []
        self.refused: list[str] = []

    def run(self) -> None:
        with self._daemon.http() as http:
            while not self._stopping.is_set():
                number = len(self.acknowledged)
                pair = {"user": "bob", "prompt": f"bob {number}: ", "chosen": f"yes {number}", "rejected": "no"}
                for path, body in (("/v1/feedback", pair), ("/v1/completions", {"prompt": "x", "max_tokens": 4})):
                    answer = http.post(path, json=body)
                    if answer.status_code != 200:
                        self.refused.append(answer.text)
                    elif path == "/v1/feedback":
                        self.acknowledged.append(answer.json()["id"])

    def stop(self) -> None:
        self._stopping.set()
        self.join()


@pytest.mark.slow
def test_a_backup_under_load_restores_to_a_daemon_that_has_everything(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "tiny")
    with running(tmp_path / "first", model, **SETTINGS) as daemon, daemon.http() as http:
        version = teach(http, "olga")["version"]
        said = greedy(http, "olga")
        load = Load(daemon)
        load.start()
        while len(load.acknowledged) < 20:
            time.sleep(0.01)
        before = list(load.acknowledged)
        assert back_up(daemon, tmp_path / "all.tar.gz") > 0
        load.stop()
        assert load.refused == []
        assert list(daemon.data.glob(".scratch-*")) == []
    contents = verify(tmp_path / "all.tar.gz")
    assert {"adapter": "olga", "version": version} in [
        {key: item[key] for key in ("adapter", "version")} for item in contents.manifest["adapters"]
    ]
    restore(tmp_path / "all.tar.gz", tmp_path / "second" / "data", force=False)
    with running(tmp_path / "second", model, **SETTINGS) as daemon, daemon.http() as http:
        assert http.get("/v1/adapters/olga").json()["version"] == version
        assert greedy(http, "olga") == said
        newest = http.get("/v1/adapters/olga").json()["versions"][0]
        assert Path(newest["path"]).is_relative_to(tmp_path / "second")
        signals = daemon_rows(daemon, "SELECT id FROM signals")
        assert set(before) <= set(signals)
        bob = until(http, "/v1/adapters/bob", lambda body: body["pairs_queued"] == 0)
        assert bob["pairs_trained"] + bob["pairs_held_out"] == bob["pairs_seen"] >= len(before)
        assert "api.token" not in (daemon.data / "config.toml").read_text()


def daemon_rows(daemon: LiveDaemon, sql: str) -> list[str]:
    with sqlite3.connect(f"file:{daemon.data / 'edged.db'}?mode=ro", uri=True) as connection:
        return [row[0] for row in connection.execute(sql)]


def test_a_client_that_leaves_in_the_middle_leaves_nothing_behind(large: LiveDaemon) -> None:
    large.send(b"GET /v1/backup HTTP/1.1\r\nHost: edged\r\n\r\n", wait_for=b"edged.db")
    deadline = time.monotonic() + 10
    while list(large.data.glob(".scratch-*")):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_one_backup_at_a_time(large: LiveDaemon, http: httpx2.Client) -> None:
    with http.stream("GET", "/v1/backup") as first:
        assert int(first.headers["X-Edged-Bytes"]) > 2 << 20, first.headers
        chunks = first.iter_raw(1024)
        next(chunks)
        with large.http() as other:
            refused = other.get("/v1/backup")
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "backup_busy")
        for _ in chunks:
            pass
    assert http.get("/v1/backup").status_code == 200


def test_the_token_is_not_in_a_backup(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "tiny")
    with running(tmp_path / "run", model, api__token="very-secret", **SETTINGS) as daemon:
        back_up(daemon, tmp_path / "x.tar")
    assert b"very-secret" not in (tmp_path / "x.tar").read_bytes()


def test_the_store_is_reported_pruned_and_rewritten_while_it_serves(daemon: LiveDaemon, http: httpx2.Client) -> None:
    assert http.post("/v1/completions", json={"user": "ada", "prompt": "x", "max_tokens": 2}).status_code == 200
    report = http.get("/v1/store").json()
    assert report["rows"]["completions"] >= 1
    assert report["used_bytes"] > 0
    assert report["oldest_completion"] is not None
    assert report["gives_pages_back"] is True
    pruned = http.post("/v1/store/prune").json()
    assert pruned["deleted"] == {}
    assert pruned["store"]["rows"]["completions"] == report["rows"]["completions"]
    rewritten = http.post("/v1/store/vacuum").json()
    assert rewritten["bytes_after"] > 0
    assert http.get("/v1/status").json()["store"]["database_bytes"] == rewritten["bytes_after"]
