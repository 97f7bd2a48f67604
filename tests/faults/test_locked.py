"""Another program holds the database's lock: answers are served, and what cannot be stored in time is refused."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import httpx2
import pytest

from tests.api.live import LiveDaemon, running
from tests.faults.test_disk import until
from tests.models import save_tiny


def stored(live: LiveDaemon, table: str) -> set[str]:
    with closing(sqlite3.connect(live.data / "edged.db")) as db:
        return {row_id for (row_id,) in db.execute(f"SELECT id FROM {table}")}


@pytest.mark.slow
def test_an_answer_does_not_wait_for_another_programs_lock_and_its_record_is_written_later(tmp_path: Path) -> None:
    with running(tmp_path / "run", save_tiny(tmp_path / "tiny")) as live, live.http() as http:
        http.timeout = httpx2.Timeout(20.0)
        body = {"messages": [{"role": "user", "content": "hello"}], "user": "ann", "max_tokens": 4}
        with closing(sqlite3.connect(live.data / "edged.db", isolation_level=None)) as other:
            other.execute("BEGIN EXCLUSIVE")
            answer = http.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200, "within the client's time, which is shorter than the lock's"
            streamed = http.post("/v1/chat/completions", json={**body, "stream": True})
            assert streamed.text.endswith("data: [DONE]\n\n")
            pair = {"user": "ann", "prompt": "q", "chosen": "a", "rejected": "b"}
            refused = http.post("/v1/feedback", json=pair)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "store_busy")
            assert int(refused.headers["Retry-After"]) > 0
            other.execute("ROLLBACK")
        until(lambda: answer.json()["id"] in stored(live, "completions"), lambda: live.log)
        rated = http.post("/v1/feedback", json={"completion_id": answer.json()["id"], "signal": "up"})
        assert rated.status_code == 200
        assert stored(live, "signals") == {rated.json()["id"]}, "what was refused is not stored"
        assert f"completion {answer.json()['id']} is answered before it is stored" in live.log
