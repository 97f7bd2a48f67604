"""What was forgotten is nowhere any more: not in a row, not in a file, not in a byte of the database."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import httpx2
import pytest
from sqlite_utils import Database

from edged.align.feedback.pair import PairScored, StepSkipped, VersionPublished
from edged.align.feedback.signals import record_pair
from edged.store import Store, utc_now, utc_text
from edged.store.adapters import insert_metric, insert_version
from edged.store.erasure import begin_forgetting, search, search_files
from edged.store.forgetting import finish_forgetting
from edged.store.quarantine import insert_quarantined
from edged.store.rows import insert_row
from tests.api.live import LiveDaemon, running
from tests.api.test_quarantine import adapter, until
from tests.models import save_tiny

MARKER = "the brass key lies under the third flower pot"


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveDaemon]:
    root = tmp_path_factory.mktemp("erasing")
    model = save_tiny(root / "tiny", max_position_embeddings=512)
    with running(root / "run", model, store__save_every_s=0.1, guard__held_out_share=0.5) as live:
        yield live


def bytes_of_the_database(data: Path) -> bytes:
    return b"".join(path.read_bytes() for path in data.glob("edged.db*"))


def learn(http: httpx2.Client, user: str) -> None:
    """Completions, a choice, an edit and pairs, all with the marker; and a version on disk."""
    messages = [{"role": "user", "content": f"Remember: {MARKER}."}]
    body = {"messages": messages, "user": user, "n": 2, "max_tokens": 8, "ignore_eos": True}
    answer = http.post("/v1/chat/completions", json=body).json()
    report = {"completion_id": answer["id"], "choice": 0, "signal": "edit", "text": f"Yes, {MARKER}!"}
    assert http.post("/v1/feedback", json=report).status_code == 200
    for i in range(4):
        pair = {"user": user, "prompt": f"Where? {i}", "chosen": f"{i}: {MARKER}", "rejected": f"I forgot {i}"}
        assert http.post("/v1/feedback", json=pair).status_code == 200
    until(lambda: adapter(http, user)["pairs_queued"] == 0)
    until(lambda: http.get(f"/v1/adapters/{user}/export").status_code == 200)


def test_nothing_is_left_of_a_user_not_even_bytes(daemon: LiveDaemon) -> None:
    with daemon.http() as http:
        learn(http, "ann")
        assert MARKER.encode() in bytes_of_the_database(daemon.data)
        done = http.delete("/v1/adapters/ann").json()
        assert done["verified"] is True
        assert done["vacuumed"] is True
        assert done["searched"]["found"] == done["searched"]["files"] == []
        assert done["searched"]["columns"] > 40
        assert done["searched"]["texts"] >= 4
        assert MARKER.encode() not in bytes_of_the_database(daemon.data)
        assert b"ann" not in b"".join(str(path).encode() for path in (daemon.data / "adapters").rglob("*"))
        assert http.get("/v1/adapters/ann").status_code == 404
        assert daemon.status()["forgetting"] == {}


def test_a_user_of_the_base_model_alone_is_forgotten_too(daemon: LiveDaemon) -> None:
    with daemon.http() as http:
        body = {"prompt": f"Once upon a time {MARKER}", "max_tokens": 4, "user": "cyd"}
        assert http.post("/v1/completions", json=body).status_code == 200
        done = http.delete("/v1/adapters/cyd").json()
        assert done["verified"] is True
        assert done["rows_deleted"]["completions"] == 1
        assert MARKER.encode() not in bytes_of_the_database(daemon.data)


def test_others_who_said_the_same_keep_it_and_are_told(daemon: LiveDaemon) -> None:
    with daemon.http() as http:
        for user in ("dan", "eve"):
            http.post("/v1/completions", json={"prompt": f"It rains: {MARKER}", "max_tokens": 4, "user": user})
        done = http.delete("/v1/adapters/dan").json()
        assert done["verified"] is True
        assert done["searched"]["said_by_others"] >= 1
        assert http.delete("/v1/adapters/eve").json()["searched"]["said_by_others"] == 0


def test_the_search_finds_what_a_deletion_left(tmp_path: Path) -> None:
    store = Store(tmp_path / "edged.db")
    pair = ("ann", f"good: {MARKER}", "bad", utc_now())
    store.write(lambda db: record_pair(db, *pair, prompt="Well?")).result()
    now = utc_text(utc_now())
    erased = store.write(lambda db: begin_forgetting(db, "ann", now)).result()
    assert any(MARKER in text for text in erased.texts)
    assert store.read(lambda db: search(db, ["ann"], erased.texts, now))["found"] == []
    reason = f"a note on: good: {MARKER}"
    row = ["2020", "ann", 1, "[]", reason]
    store.write(lambda db: db.execute("INSERT INTO skipped_steps VALUES (NULL, ?, ?, ?, ?, ?)", row)).result()
    found = store.read(lambda db: search(db, ["ann"], erased.texts, now))["found"]
    assert {(item["table"], item["column"], item["what"]) for item in found} == {
        ("skipped_steps", "adapter", "name"),
        ("skipped_steps", "reason", "text"),
    }
    store.close()


def test_what_the_user_left_anew_meanwhile_is_no_leftover(tmp_path: Path) -> None:
    store, since = Store(tmp_path / "edged.db"), utc_text(utc_now())
    erased = store.write(lambda db: begin_forgetting(db, "ann", since)).result()

    def anew(db: Database) -> None:
        report = record_pair(db, "ann", "a new answer", "another", utc_now(), prompt="Well?")
        now, pair_id = utc_text(utc_now()), report.pair_ids[0]
        insert_quarantined(db, pair_id, now, "ann", "outlying")
        insert_version(db, now, asdict(VersionPublished("ann", 1, 0, "trained")))
        skipped = StepSkipped("ann", 1, (pair_id,), "its loss is not finite")
        insert_row(db, "skipped_steps", {"created_at": now, **asdict(skipped)})
        score = PairScored(pair_id, "ann", 1, "prequential", -1.0, -2.0, -1.0, -2.0, 0.0, 0.7)
        insert_metric(db, now, asdict(score))

    store.write(anew).result()
    report = store.read(lambda db: search(db, ["ann"], erased.texts, since))
    assert report["found"] == []
    assert report["new_rows"] >= 5
    store.close()


def test_a_crash_in_the_middle_is_finished_by_the_next_start_and_searched_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "edged")
    store = Store(tmp_path / "edged.db")
    for user in ("ann", "bob"):
        (tmp_path / "adapters" / "base" / user / "v000001").mkdir(parents=True)
        pair = (user, f"{user}: {MARKER}", "bad", utc_now())
        store.write(lambda db, pair=pair: record_pair(db, *pair, prompt="Well?")).result()
    store.write(lambda db: begin_forgetting(db, "ann", utc_text(utc_now()))).result()
    store.close()  # and nothing of what follows the deletion was done

    store = Store(tmp_path / "edged.db")
    assert finish_forgetting(store, tmp_path / "adapters") == []
    assert [path.name for path in (tmp_path / "adapters" / "base").iterdir()] == ["bob"]
    assert "forgetting ann: a search of" in caplog.messages[-1]
    assert caplog.messages[-1].endswith("found nothing")
    before = len(caplog.messages)
    assert finish_forgetting(store, tmp_path / "adapters") == []
    assert len(caplog.messages) == before
    store.close()
    assert f"ann: {MARKER}".encode() not in bytes_of_the_database(tmp_path)
    assert f"bob: {MARKER}".encode() in bytes_of_the_database(tmp_path)


def test_what_a_resumed_search_finds_is_an_error_of_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = Store(tmp_path / "edged.db")
    store.write(lambda db: begin_forgetting(db, "ann", utc_text(utc_now()))).result()
    # As no release has left it: a row that names ann, from before.
    row = ["2020", "bob", 1, "[]", "learned of /ann/"]
    store.write(lambda db: db.execute("INSERT INTO skipped_steps VALUES (NULL, ?, ?, ?, ?, ?)", row)).result()
    finish_forgetting(store, tmp_path / "adapters")
    assert [line.levelname for line in caplog.records if "the search found" in line.message] == ["ERROR"]
    assert "skipped_steps" in caplog.text
    store.close()


def test_a_file_that_cannot_be_read_is_in_the_way_of_no_search(tmp_path: Path) -> None:
    for user, text in (("ann", '{"adapter": "ann"}'), ("bob", "{}")):
        (tmp_path / "base" / user).mkdir(parents=True)
        (tmp_path / "base" / user / "edged.json").write_text(text)
    # Whoever reads it gets an I/O error.
    (tmp_path / "base" / "bob" / "broken.json").symlink_to("/proc/self/mem")
    found = {str(Path(path).relative_to(tmp_path)) for path in search_files(tmp_path, ["ann"])}
    assert found == {"base/ann", "base/ann/edged.json"}


@contextmanager
def kept_by_the_disk(folder: Path) -> Iterator[None]:
    """Its files can be read, and not be deleted."""
    if subprocess.run(["mount", "--bind", str(folder), str(folder)], capture_output=True).returncode:
        pytest.skip("nothing can be mounted here: that needs root and CAP_SYS_ADMIN")
    try:
        # Busy while a version is being written.
        until(lambda: not subprocess.run(["mount", "-o", "remount,bind,ro", str(folder)]).returncode)
        yield
    finally:
        until(lambda: not subprocess.run(["umount", str(folder)]).returncode)


def answer_of(http: httpx2.Client, user: str) -> str:
    body = {"prompt": "Where is it?", "max_tokens": 16, "temperature": 0, "ignore_eos": True, "user": user}
    response = http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["text"])


@pytest.mark.slow
def test_files_that_cannot_be_deleted_answer_nobody_and_are_tried_again_until_they_go(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "tiny", max_position_embeddings=512)
    settings = {"store__save_every_s": 0.1, "guard__held_out_share": 0.0, "align__learning_rate": 0.05}
    settings |= {"guard__max_kl_nats": 1e9, "guard__max_nll_change": 1e9, "align__beta": 0.1, "align__sft_weight": 0.0}
    with running(tmp_path / "run", model, **settings) as daemon, daemon.http() as http:
        base = answer_of(http, "nobody")
        for user in ("ann", "bob"):
            learn(http, user)
        assert answer_of(http, "ann") != base
        (files,) = (daemon.data / "adapters").glob("*/ann")
        with kept_by_the_disk(files):
            done = http.delete("/v1/adapters/ann").json()
            assert (done["verified"], done["searched"]["found"]) == (False, [])
            assert answer_of(http, "ann") == base
            # The next try would delete it with the rest.
            adapter = http.get("/v1/adapters/bob/export").content
            refused = http.post("/v1/adapters/ann/import", content=adapter)
            assert (refused.status_code, refused.json()["error"]["code"]) == (409, "not_forgotten_yet")
        assert daemon.stop() == 0
        assert "Traceback" not in daemon.log
    with kept_by_the_disk(files), running(tmp_path / "run", model, **settings) as daemon, daemon.http() as http:
        assert "forgetting ann: its files cannot be deleted ([Errno 30] Read-only file system" in daemon.log
        assert list(files.glob("v*/adapter_model.safetensors"))
        assert answer_of(http, "ann") == base
        assert http.get("/v1/adapters/ann").status_code == 404
        assert http.get("/v1/adapters/bob").json()["version"] > 0
        assert http.delete("/v1/adapters/ann").json()["verified"] is False
        assert daemon.stop() == 0
        assert "Traceback" not in daemon.log
    with running(tmp_path / "run", model, **settings) as daemon, daemon.http() as http:
        assert "found nothing" in daemon.log
        assert not files.exists()
        assert http.get("/v1/adapters/bob").status_code == 200
        assert http.post("/v1/adapters/ann/import", content=adapter).status_code == 200


def test_files_that_can_be_deleted_after_all_go_at_the_next_request(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "tiny", max_position_embeddings=512)
    settings = {"store__save_every_s": 0.1, "guard__held_out_share": 0.0}
    with running(tmp_path / "run", model, **settings) as daemon, daemon.http() as http:
        learn(http, "ann")
        (files,) = (daemon.data / "adapters").glob("*/ann")
        with kept_by_the_disk(files):
            assert http.delete("/v1/adapters/ann").json()["verified"] is False
        assert http.delete("/v1/adapters/ann").json()["verified"] is True
        assert not files.exists()
        assert http.delete("/v1/adapters/ann").status_code == 404


def test_a_killed_daemon_forgets_to_the_end_when_it_starts(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "tiny", max_position_embeddings=512)
    with running(tmp_path / "run", model, store__save_every_s=0.1, guard__held_out_share=0.0) as daemon:
        with daemon.http() as http:
            learn(http, "ann")
        assert daemon.process.pid is not None
        os.kill(daemon.process.pid, signal.SIGKILL)
        daemon.process.join()
    store = Store(tmp_path / "run" / "data" / "edged.db")
    store.write(lambda db: begin_forgetting(db, "ann", utc_text(utc_now()))).result()
    store.close()
    with running(tmp_path / "run", model) as daemon, daemon.http() as http:
        assert "forgetting ann was interrupted" in daemon.log
        assert http.get("/v1/adapters/ann").status_code == 404
        assert not list((daemon.data / "adapters").glob("*/ann"))
        assert MARKER.encode() not in bytes_of_the_database(daemon.data)
