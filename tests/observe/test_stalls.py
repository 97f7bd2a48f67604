"""A stall of the event loop or of the database's writer is counted, and the log says what ran meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sqlite3
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from edged.observe.stalls import StallMonitor
from edged.store import Store
from tests.api.live import LiveDaemon, running
from tests.api.test_metrics import scrape, teach
from tests.models import save_tiny

LONG_S = 1.5


def hold_up(_: Any = None) -> None:
    time.sleep(LONG_S)


def longer(buckets: tuple[list[tuple[str, float]], float], bound: str) -> float:
    """How many values of a histogram were above a bound."""
    counts = dict(buckets[0])
    return counts["+Inf"] - counts[bound]


def test_where_the_event_loop_stands_still_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    monitor = StallMonitor()

    def stalls() -> float:
        return longer(monitor.readings()["edged_event_loop_stall_seconds"][()], "1.0")

    async def watched() -> None:
        watch = asyncio.create_task(monitor.watch())
        for _ in range(2):
            await asyncio.sleep(0.1)
            hold_up()
            await asyncio.sleep(0.1)
        watch.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watch

    asyncio.run(watched())
    assert stalls() == 2
    (record,) = caplog.records
    assert "the event loop stood still for" in record.getMessage()
    assert "in hold_up (test_stalls.py:" in record.getMessage()
    assert vars(record)["event"] == "event_loop_stalled"
    assert vars(record)["fields"]["seconds"] >= 1.0


def test_every_write_is_counted_by_what_it_waited_for_and_what_it_took(tmp_path: Path) -> None:
    monitor, store = StallMonitor(), Store(tmp_path / "edged.db")
    store.on_writes = monitor.wrote
    for _ in range(3):
        store.write(lambda db: None).result()
    with pytest.raises(ZeroDivisionError):
        store.write(lambda db: 1 / 0).result()
    store.close()
    found = monitor.readings()["edged_writer_stall_seconds"]
    assert {part: dict(buckets)["+Inf"] for part, (buckets, _) in found.items()} == {"waited": 4, "ran": 4, "commit": 4}


@pytest.mark.parametrize("alone", [False, True])
def test_the_write_that_holds_up_others_is_named(alone: bool, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    monitor, store = StallMonitor(), Store(tmp_path / "edged.db")
    store.on_writes = monitor.wrote
    store.write(partial(hold_up), alone)
    store.write(lambda db: None).result()
    store.close()
    found = monitor.readings()["edged_writer_stall_seconds"]
    assert {part: longer(buckets, "1.0") for part, buckets in found.items()} == {"waited": 1, "ran": 1, "commit": 0}
    (record,) = caplog.records
    assert "of which tests.observe.test_stalls.hold_up 1." in record.getMessage()
    assert vars(record)["fields"]["job"] == "tests.observe.test_stalls.hold_up"


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveDaemon]:
    root = tmp_path_factory.mktemp("stalls")
    with running(root / "run", save_tiny(root / "tiny")) as live:
        yield live


def stalled(daemon: LiveDaemon, name: str, **labels: str) -> bool:
    """Whether a stall of more than half a second is in `/metrics`."""
    with daemon.http() as http:
        found = scrape(http)
    at_most, all_of_them = (found[f"{name}_bucket", frozenset({**labels, "le": le}.items())] for le in ("0.5", "+Inf"))
    return at_most < all_of_them


@pytest.mark.slow
def test_a_daemon_that_was_stopped_for_a_second_says_so(daemon: LiveDaemon) -> None:
    daemon.signal(signal.SIGSTOP)
    time.sleep(1.0)
    daemon.signal(signal.SIGCONT)
    deadline = time.monotonic() + 30.0
    while not stalled(daemon, "edged_event_loop_stall_seconds"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert "the event loop stood still for" in daemon.log


def test_a_database_that_another_program_locks_is_told(daemon: LiveDaemon) -> None:
    deadline = time.monotonic() + 30.0
    with daemon.http() as http:
        while not stalled(daemon, "edged_writer_stall_seconds", part="commit"):
            assert time.monotonic() < deadline
            with contextlib.closing(sqlite3.connect(daemon.data / "edged.db", isolation_level=None)) as other:
                other.execute("BEGIN IMMEDIATE")
                told = threading.Thread(target=teach, args=(http, "ann"))
                told.start()
                time.sleep(1.0)
            told.join()
    assert "the database's writer stood still" in daemon.log


@pytest.mark.slow
def test_an_account_that_teaches_much_has_two_writes_with_the_writer_at_once(tmp_path: Path) -> None:
    """Others' writes wait behind those that are queued; many that share a commit were queued together."""
    with running(tmp_path / "run", save_tiny(tmp_path / "tiny"), align__enabled="false") as live, live.http() as http:

        def teach_pair(number: int) -> int:
            pair = {"user": "ann", "prompt": f"question {number}", "chosen": "good", "rejected": "bad"}
            return http.post("/v1/feedback", json=pair).status_code

        commits = ("edged_writer_stall_seconds_count", frozenset({("part", "commit")}))
        before = scrape(http)[commits]
        with contextlib.closing(sqlite3.connect(live.data / "edged.db", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            with ThreadPoolExecutor(12) as threads:
                answers = [threads.submit(teach_pair, number) for number in range(12)]
                time.sleep(1.0)
                other.rollback()
                assert [answer.result() for answer in answers] == [200] * 12
        assert scrape(http)[commits] - before >= 6
