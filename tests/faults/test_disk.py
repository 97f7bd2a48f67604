"""Disks that are full, read-only or that lie: edged goes on without them, or stops and says why and what to do."""

from __future__ import annotations

import contextlib
import random
import shutil
import sqlite3
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from benchmarks.soak.faults import fill
from edged.cli.doctor import service
from edged.cli.doctor.finding import Examination
from edged.settings.load import Settings
from edged.store import Store, StoreError
from tests.api.live import LiveDaemon, running, started
from tests.cli.conftest import edged
from tests.models import save_tiny

PROMPT = {"prompt": "How do I cook rice?", "max_tokens": 16, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def lived(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """A folder in which a daemon has learned from sam, and stopped."""
    folder = tmp_path_factory.mktemp("lived")
    with running(folder, model, store__save_every_s=0.05, guard__held_out_share=0) as daemon, daemon.http() as http:
        assert all(teach(http, n).status_code == 200 for n in range(20))
        until(lambda: http.get("/v1/adapters/sam").json()["pairs_queued"] == 0, lambda: daemon.log)
        until(lambda: len(list(daemon.data.glob("adapters/*/sam/v*"))) >= 2, lambda: daemon.log)
        assert daemon.stop() == 0
    return folder


@pytest.fixture(scope="module")
def before_newest(tmp_path_factory: pytest.TempPathFactory, model: Path, lived: Path) -> tuple[int, str]:
    """The number of the version before sam's newest, and what it answers."""
    folder = tmp_path_factory.mktemp("before")
    shutil.copytree(lived / "data", folder / "data")
    *_, before, newest = sorted(folder.glob("data/adapters/*/sam/v*"))
    shutil.rmtree(newest)
    with running(folder, model, align__enabled="false") as daemon, daemon.http() as http:
        return int(before.name[1:]), greedy(http, "sam")


@contextmanager
def small_disk(folder: Path, *options: str) -> Iterator[Callable[..., None]]:
    """A disk of 16 MiB at `folder`; calling what it gives mounts it again with other options."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", ",".join(("size=16m", *options)), "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("nothing can be mounted here: that needs root and CAP_SYS_ADMIN")
    try:
        yield lambda *again: subprocess.run(["mount", "-o", ",".join(("remount", *again)), str(folder)], check=True)
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def greedy(http: httpx2.Client, user: str | None = None) -> str:
    response = http.post("/v1/completions", json=PROMPT | ({"user": user} if user else {}))
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["text"])


def teach(http: httpx2.Client, number: int, user: str = "sam") -> httpx2.Response:
    body = {"user": user, "prompt": f"question {number}", "chosen": f"good {number}", "rejected": f"bad {number}"}
    return http.post("/v1/feedback", json=body)


def until(condition: Callable[[], Any], context: Callable[[], object], within_s: float = 30.0) -> None:
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end, context()
        time.sleep(0.05)


def integrity(database: Path) -> str:
    with sqlite3.connect(database) as connection:
        return str(connection.execute("PRAGMA integrity_check").fetchone()[0])


def full(disk: Path) -> Path:
    """A file that takes all the room there is."""
    filler = disk / "filler"
    fill(filler)
    return filler


def test_a_full_disk_stops_no_answer_loses_no_acknowledged_feedback_and_teaches_nothing_twice(
    tmp_path: Path, model: Path
) -> None:
    settings = {
        "store__save_every_s": 0.1,
        "align__replay_share": 0,
        "align__practice": False,
        "guard__held_out_share": 0,
    }
    with small_disk(tmp_path / "data"), running(tmp_path, model, **settings) as daemon, daemon.http() as http:
        wanted = greedy(http)
        acknowledged = {n for n in range(4) if teach(http, n).status_code == 200}
        filler = full(daemon.data)
        for n in range(4, 400):
            refused = teach(http, n)
            if refused.status_code != 200:
                break
            acknowledged.add(n)
        assert refused.status_code == 503, refused.text
        error = refused.json()["error"]
        assert error["code"] == "store_failed"
        assert "make room on the disk" in error["message"]
        assert greedy(http) == wanted

        def is_told() -> bool:
            # A small write of the learning loop's may have found room meanwhile, which ends the notice.
            teach(http, 999)
            return any("make room on the disk" in line for line in daemon.status()["degraded"])

        until(is_told, daemon.status)
        filler.unlink()
        until(lambda: teach(http, 1000).status_code == 200, lambda: daemon.log)
        acknowledged.add(1000)
        until(lambda: http.get("/v1/adapters/sam").json()["pairs_queued"] == 0, lambda: daemon.log)
        assert daemon.status()["degraded"] == []
        assert greedy(http) == wanted
        assert daemon.stop() == 0
        check_trained_once(daemon.data, acknowledged)
        assert "Traceback" not in daemon.log


def check_trained_once(data: Path, acknowledged: set[int]) -> None:
    """All acknowledged pairs are there, each was trained once, and the versions have learned from no other."""
    assert integrity(data / "edged.db") == "ok"
    with sqlite3.connect(data / "edged.db") as db:
        pairs = db.execute("SELECT chosen, state, epochs_done FROM pairs").fetchall()
        (learned,) = db.execute("SELECT sum(pairs) FROM adapter_versions WHERE reason = 'trained'").fetchone()
    # What failed half-way was not acknowledged, yet may be there.
    assert {f"good {n}" for n in acknowledged} <= {chosen for chosen, _, _ in pairs}
    assert {(state, epochs) for _, state, epochs in pairs} <= {("trained", 1), ("learnt", 0)}
    assert learned == sum(epochs for _, _, epochs in pairs)
    assert not list(data.glob("**/*.draft"))


@pytest.mark.parametrize("lived_in", [False, True])
def test_a_read_only_data_folder_is_an_explained_stop(tmp_path: Path, model: Path, lived_in: bool) -> None:
    with small_disk(tmp_path / "data") as again:
        if lived_in:
            Store(tmp_path / "data" / "edged.db").close()
        again("ro")
        with started(tmp_path, model) as daemon:
            assert daemon.wait() == 1
            assert "edged: data folder" in daemon.log
            assert "Read-only file system" in daemon.log
            assert "Traceback" not in daemon.log


def wrecked(path: Path, seed: int) -> None:
    """Overwrite the beginnings of some pages behind the first."""
    chance, size = random.Random(seed), path.stat().st_size
    with path.open("r+b") as file:
        for page in chance.sample(range(1, size // 4096), min(8, size // 4096 - 1)):
            file.seek(page * 4096)
            file.write(chance.randbytes(200))


def wreck_table(database: Path, table: str) -> None:
    """Overwrite the first page of a table and those of its indices beneath a daemon that runs."""
    with contextlib.closing(sqlite3.connect(database)) as db:
        assert db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0] == 0
        roots = db.execute("SELECT rootpage FROM sqlite_master WHERE tbl_name = ? AND rootpage > 0", [table]).fetchall()
        (size,) = db.execute("PRAGMA page_size").fetchone()
        with database.open("r+b") as file:
            for (root,) in roots:
                file.seek((root - 1) * size)
                file.write(random.Random(root).randbytes(size))
        # A change: what others remember of the file is not valid any more.
        db.execute("PRAGMA user_version = 1")


@pytest.mark.parametrize("table", ["pairs", "adapter_versions", "completions", "quarantine"])
def test_a_start_that_needs_a_damaged_table_is_refused(tmp_path: Path, model: Path, lived: Path, table: str) -> None:
    shutil.copytree(lived / "data", tmp_path / "data")
    wreck_table(tmp_path / "data" / "edged.db", table)
    with started(tmp_path, model) as daemon:
        assert daemon.wait() == 1
        assert "the file is damaged; stop edged, move the file away, then restore a copy" in daemon.log
        assert "Traceback" not in daemon.log


@pytest.mark.slow
def test_damage_that_is_met_while_serving_is_told_and_answers_go_on(tmp_path: Path, model: Path, lived: Path) -> None:
    for copy in ("whole", "damaged"):
        shutil.copytree(lived / "data", tmp_path / copy / "data")
    wreck_table(tmp_path / "damaged" / "data" / "edged.db", "choices")
    with running(tmp_path / "whole", model) as daemon, daemon.http() as http:
        wanted = greedy(http, "sam")
        assert daemon.status()["degraded"] == []
    with running(tmp_path / "damaged", model) as daemon, daemon.http() as http:
        assert greedy(http, "sam") == wanted
        until(lambda: "the file is damaged" in "".join(daemon.status()["degraded"]), daemon.status)
        assert greedy(http, "sam") == wanted
        assert http.get("/v1/adapters/sam").status_code == 200
        assert daemon.stop() == 0
        assert "Traceback" not in daemon.log


def test_the_status_says_that_the_database_is_damaged(tmp_path: Path, model: Path) -> None:
    with running(tmp_path, model) as daemon, daemon.http() as http:
        with http.stream("GET", "/v1/events?events=status") as stream:
            lines = (line for line in stream.iter_lines() if line == "event: status")
            next(lines)
            wreck_table(daemon.data / "edged.db", "quarantine")
            assert next(lines) == next(lines), "the stream goes on"
        answer = http.get("/v1/status")
        assert answer.status_code == 200, answer.text
        assert answer.json()["quarantine"] == {"pairs": None}
        assert "the file is damaged" in answer.json()["degraded"][0]
        told = edged("status", EDGED_SOCKET=str(daemon.socket))
        assert told.returncode == 0, told.stderr
        assert "unknown: the database cannot be read" in told.stdout
        assert "degraded" in told.stdout
        assert "\nedged_degraded 1.0\n" in http.get("/metrics").text
        finding, *_ = service.daemon(Examination(Settings(), daemon.data, (daemon.socket,), 0, 20.0))
        assert finding.state == "warn"
        assert "the file is damaged" in finding.seen


def test_a_table_that_cannot_be_read_counts_as_degraded(tmp_path: Path, model: Path) -> None:
    with running(tmp_path, model) as daemon, daemon.http() as http:
        assert "\nedged_degraded 0.0\n" in http.get("/metrics").text
        for table in ("quarantine", "alignment_metrics"):
            with contextlib.closing(sqlite3.connect(daemon.data / "edged.db")) as db:
                db.execute(f"ALTER TABLE {table} RENAME TO elsewhere")
            assert "\nedged_degraded 1.0\n" in http.get("/metrics").text, table
            with contextlib.closing(sqlite3.connect(daemon.data / "edged.db")) as db:
                db.execute(f"ALTER TABLE elsewhere RENAME TO {table}")
        assert "\nedged_degraded 0.0\n" in http.get("/metrics").text


def ready(daemon: LiveDaemon) -> bool:
    try:
        with daemon.http() as http:
            return http.get("/readyz").status_code == 200
    except httpx2.TransportError:
        return False


def test_after_a_power_cut_the_file_is_read_before_it_is_trusted(tmp_path: Path) -> None:
    store = Store(tmp_path / "whole" / "edged.db")
    store.write(lambda db: db["notes"].insert_all([{"text": "x" * 500} for _ in range(200)])).result()
    with sqlite3.connect(store.path) as other:
        other.execute("PRAGMA wal_checkpoint(FULL)")
    store.write(lambda db: db["notes"].insert({"text": "last"})).result()
    cut = tmp_path / "cut"
    shutil.copytree(tmp_path / "whole", cut)
    store.close()
    Store(cut / "edged.db").close()
    shutil.rmtree(cut)
    cut.mkdir()
    wrecked_copy = shutil.copy(tmp_path / "whole" / "edged.db", cut / "edged.db")
    wreck_table(Path(wrecked_copy), "notes")
    (cut / "edged.db-wal").write_bytes(b"torn")
    with pytest.raises(StoreError, match=r"(?s)is damaged .*restore a copy"):
        Store(cut / "edged.db")


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def flip_a_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-5] ^= 0x40
    file.write_bytes(bytes(data))


def empty(file: Path) -> None:
    file.write_bytes(b"")


@pytest.mark.parametrize(
    ("harm", "name"),
    [(truncate, "optimizer.safetensors"), (flip_a_bit, "adapter_model.safetensors"), (empty, "edged.json")],
)
def test_the_newest_whole_version_is_served_when_a_newer_one_is_damaged(
    tmp_path: Path,
    model: Path,
    lived: Path,
    before_newest: tuple[int, str],
    harm: Callable[[Path], None],
    name: str,
) -> None:
    shutil.copytree(lived / "data", tmp_path / "data")
    newest = max(tmp_path.glob("data/adapters/*/sam/v*"))
    harm(newest / name)
    with running(tmp_path, model, align__enabled="false") as daemon, daemon.http() as http:
        assert (http.get("/v1/adapters/sam").json()["version"], greedy(http, "sam")) == before_newest
        assert f"{newest}: " in daemon.log
        assert "an older version is used" in daemon.log
