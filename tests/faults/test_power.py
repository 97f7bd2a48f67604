"""The power fails: what was acknowledged is on the disk, whatever the disk had not been told to keep.

One daemon's life is written down call by call. Every moment of it can then be the last: the folder is made as a disk
may have it that forgets what was not synced (`tests/faults/power/disk.py`), and is looked at, or served again.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import httpx2
import pytest

from tests.api.live import running
from tests.faults.power.disk import Call, Disk, Record, build_library, paths_of, read_log
from tests.faults.test_disk import check_trained_once, greedy, integrity, teach, until
from tests.faults.test_killed import SETTINGS, newest_whole
from tests.models import save_tiny

pytestmark = pytest.mark.skipif(not shutil.which("gcc"), reason="the log of system calls is written in C")


@dataclass
class Life:
    """A daemon's life: its system calls, and when it acknowledged what (monotonic clock)."""

    root_node: int
    model: Path
    records: list[Record] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    taught: dict[int, float] = field(default_factory=dict)
    rolled_back: dict[int, float] = field(default_factory=dict)
    """By the number of the version that took another's place."""
    forgotten_s: float = 0.0

    @property
    def first_ack(self) -> int:
        """The record before which nothing was acknowledged."""
        begun = min(self.taught.values())
        return next(index for index, record in enumerate(self.records) if record.at_s >= begun)


@contextlib.contextmanager
def logged_daemon(
    folder: Path, model: Path, **environment: str
) -> Iterator[tuple[httpx2.Client, subprocess.Popen[bytes]]]:
    """`edged serve` under the log, on `folder / "data"`."""
    data, log, socket = folder / "data", folder / "log", folder / "edged.sock"
    data.mkdir(exist_ok=True)
    places = {"MODEL__PATH": model, "API__SOCKET": socket, "STORE__DATA_DIR": data}
    settings = {**places, **{name.upper(): value for name, value in SETTINGS.items()}}
    environ = {name: value for name, value in os.environ.items() if not name.startswith("EDGED_")}
    environ |= {f"EDGED_{name}": str(value) for name, value in settings.items()}
    environ |= {"LD_PRELOAD": str(build_library(folder)), "DISKLOG_FILE": str(folder / "calls")}
    environ |= {"DISKLOG_ROOT": str(data), "GLIBC_TUNABLES": "glibc.malloc.hugetlb=0", **environment}
    with log.open("wb") as output:
        command = [sys.executable, "-m", "edged.cli", "serve"]
        process = subprocess.Popen(command, env=environ, stdout=output, stderr=subprocess.STDOUT)
    try:
        with httpx2.Client(
            transport=httpx2.HTTPTransport(uds=str(socket)), base_url="http://edged", timeout=30.0
        ) as http:
            until(lambda: process.poll() is not None or is_ready(http), log.read_text, within_s=60)
            yield http, process
    finally:
        process.kill()
        process.wait()


def is_ready(http: httpx2.Client) -> bool:
    try:
        return http.get("/readyz").status_code == 200
    except httpx2.TransportError:
        return False


@pytest.fixture(scope="module")
def life(tmp_path_factory: pytest.TempPathFactory) -> Life:
    """Teaching, a rollback, more teaching, the end of one user; then SIGTERM, so that no call is cut off."""
    folder = tmp_path_factory.mktemp("power")
    model = save_tiny(folder / "tiny")
    (folder / "data").mkdir()
    made = Life((folder / "data").stat().st_ino, model)
    with logged_daemon(folder, model) as (http, process):

        def learn(numbers: range, user: str = "sam") -> None:
            for number in numbers:
                assert teach(http, number, user).status_code == 200
                if user == "sam":
                    made.taught[number] = time.monotonic()
            until(lambda: not http.get(f"/v1/adapters/{user}").json()["pairs_queued"], lambda: "", within_s=60)

        learn(range(12))
        learn(range(900, 904), "bob")
        adapter = http.get("/v1/adapters/sam").json()
        saved = [each["version"] for each in adapter["versions"] if each["on_disk"]]
        answer = http.post("/v1/adapters/sam/rollback", json={"version": min({*saved, 0} - {adapter["version"]})})
        assert answer.status_code == 200, answer.text
        made.rolled_back[answer.json()["version"]] = time.monotonic()
        learn(range(12, 20))
        assert http.delete("/v1/adapters/bob").status_code == 200
        made.forgotten_s = time.monotonic()
        learn(range(20, 24))
        process.terminate()
        assert process.wait(60) == 0, (folder / "log").read_text()
    made.records = read_log(folder / "calls")
    made.paths = list(paths_of(made.records, made.root_node))
    disk = Disk(made.root_node)
    for record in made.records:
        disk.play(record)
    disk.write_now(folder / "now")
    different = subprocess.run(["diff", "-r", "-x", "*-shm", folder / "data", folder / "now"], capture_output=True)
    assert not different.stdout, "the log does not tell all that the daemon did"
    return made


def cuts(
    life: Life, folder: Path, times: int, seed: int, forgets: Callable[[str], bool] = lambda _path: False
) -> Iterator[float]:
    """Have the power fail `times` times, each time with the folder as the disk may have it; yields the moments.

    Syncs of paths that the disk `forgets` do nothing.
    """
    chance = random.Random(seed)
    moments = set(chance.sample(range(life.first_ack, len(life.records)), times))
    disk = Disk(life.root_node)
    for index, (record, path) in enumerate(zip(life.records, life.paths, strict=True)):
        if record.call is not Call.FSYNC or not forgets(path):
            disk.play(record)
        if index in moments:
            disk.write_kept(folder, chance)
            yield record.at_s


def problem(life: Life, data: Path, now_s: float) -> str:
    """The first promise that the folder breaks, of those made before `now_s`; "" where it keeps all."""
    if not (data / "edged.db").exists():
        return "there is no database"
    try:
        if integrity(data / "edged.db") != "ok":
            return "the database is damaged"
        with contextlib.closing(sqlite3.connect(data / "edged.db")) as db:
            pairs = {(adapter, chosen) for adapter, chosen in db.execute("SELECT adapter, chosen FROM pairs")}
            told = {
                version
                for (version,) in db.execute("SELECT version FROM adapter_versions WHERE adapter = 'sam' AND on_disk")
            }
    except sqlite3.DatabaseError as error:
        return f"the database is of no use: {error}"
    if lost := [n for n, at_s in life.taught.items() if at_s <= now_s and ("sam", f"good {n}") not in pairs]:
        return f"acknowledged feedback is lost: {lost}"
    whole = newest_whole(data)
    if told and whole < max(told):
        return f"version {max(told)} was recorded as saved, and the newest whole one is {whole}"
    if behind := [version for version, at_s in life.rolled_back.items() if at_s <= now_s and whole < version]:
        return f"a rollback that was acknowledged, version {behind[0]}, is not there: the newest whole one is {whole}"
    if life.forgotten_s <= now_s and (any(adapter == "bob" for adapter, _ in pairs) or [*data.glob("adapters/*/bob")]):
        return "a forgotten user is there again"
    return ""


def check_cuts(life: Life, folder: Path, times: int, seed: int) -> None:
    for now_s in cuts(life, folder, times, seed):
        assert not problem(life, folder, now_s), f"after {now_s - life.records[0].at_s:.3f} s"


def all_taken(data: Path) -> bool:
    """Whether no user's pair in the database is still to be learned."""
    with contextlib.closing(sqlite3.connect(data / "edged.db")) as db:
        (count,) = db.execute("SELECT count(*) FROM pairs WHERE state = 'queued'").fetchone()
    return not count


def check_restarts(life: Life, folder: Path, times: int, seed: int) -> None:
    """What learns again after a cut has learned every pair once in the end."""
    for number, now_s in enumerate(cuts(life, folder / "kept", times, seed)):
        again = folder / str(number)
        shutil.copytree(folder / "kept", again / "data")
        whole = newest_whole(again / "data")
        with running(again, life.model, **SETTINGS) as daemon, daemon.http() as http:
            assert http.get("/v1/adapters/sam").json()["version"] >= whole
            until(partial(all_taken, again / "data"), lambda: daemon.log, within_s=60)
            assert daemon.stop() == 0
        check_trained_once(again / "data", {n for n, at_s in life.taught.items() if at_s <= now_s})


def test_whenever_the_power_fails_what_was_acknowledged_is_on_the_disk(life: Life, tmp_path: Path) -> None:
    check_cuts(life, tmp_path / "kept", 60, seed=1)


def test_after_the_power_failed_every_pair_is_learned_once(life: Life, tmp_path: Path) -> None:
    check_restarts(life, tmp_path, 2, seed=2)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_five_hundred_cuts_and_twenty_restarts(life: Life, tmp_path: Path) -> None:
    check_cuts(life, tmp_path / "kept", 500, seed=3)
    check_restarts(life, tmp_path, 20, seed=4)


SYNCED = {
    "the database's log": lambda path: path == "/edged.db-wal",
    "the data folder": lambda path: path == "",
    "the folder of bases": lambda path: path == "/adapters",
    "the folder of adapters": lambda path: path.count("/") == 2 and path.startswith("/adapters/"),
    "an adapter's folder": lambda path: path.endswith("/sam"),
    "a draft": lambda path: path.endswith(".draft"),
    "the weights": lambda path: path.endswith("adapter_model.safetensors"),
    "the optimizer": lambda path: path.endswith("optimizer.safetensors"),
    "what peft reads": lambda path: path.endswith("adapter_config.json"),
    "the manifest": lambda path: path.endswith("edged.json"),
}
"""Whatever is synced so that a promise holds."""


@pytest.mark.parametrize("what", SYNCED)
def test_without_one_of_the_syncs_a_promise_is_broken(life: Life, tmp_path: Path, what: str) -> None:
    assert any(map(SYNCED[what], life.paths)), "nothing of the kind is synced"
    moments = cuts(life, tmp_path / "kept", 400, 5, SYNCED[what])
    assert any(problem(life, tmp_path / "kept", now_s) for now_s in moments)


@pytest.mark.slow
def test_a_disk_that_does_not_sync_ends_the_daemon_and_takes_no_feedback_until_somebody_looked(tmp_path: Path) -> None:
    model, taken = save_tiny(tmp_path / "tiny"), set[int]()
    with logged_daemon(tmp_path, model, DISKLOG_FAIL="fsync:30:5:.db-wal") as (http, process):
        with contextlib.suppress(httpx2.TransportError):
            for number in range(200):
                answer = teach(http, number)
                if answer.status_code != 200:
                    break
                taken.add(number)
            assert answer.status_code == 503
            # Whoever wrote what could not be synced heard of that; those who came after, of the mark.
            assert answer.json()["error"]["code"] in ("store_failed", "store_suspect")
        assert process.wait(30) == 1
    log, mark = (tmp_path / "log").read_text(), tmp_path / "data" / "edged.db.suspect"
    assert "the disk did not keep what was written (disk I/O error)" in log
    assert f'takes no feedback when it is started again, until "{mark}" is removed' in log
    assert "Traceback" not in log
    with running(tmp_path, model, **SETTINGS) as daemon, daemon.http() as http:
        assert greedy(http)
        refused = teach(http, 500)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "store_suspect")
        assert any(str(mark) in problem for problem in daemon.status()["degraded"])
        mark.unlink()
        assert teach(http, 501).status_code == 200
        until(lambda: not http.get("/v1/adapters/sam").json()["pairs_queued"], lambda: daemon.log, within_s=60)
        assert daemon.stop() == 0
    check_trained_once(tmp_path / "data", taken | {501})
