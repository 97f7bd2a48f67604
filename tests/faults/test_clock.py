"""The wall clock jumps: order follows ids and version numbers, waiting follows the clock that does not jump."""

from __future__ import annotations

import shutil
import time
from datetime import timedelta
from pathlib import Path

import pytest

from edged.align.feedback.pair import PairRetired
from edged.align.feedback.signals import record_pair
from edged.align.journal import write_record
from edged.align.metrics import series, summary, versions
from edged.store import Store, utc_now
from edged.store.feedback import get_pairs, open_pairs
from tests.align.learning import published, scored
from tests.faults.power.disk import build_library
from tests.faults.test_disk import check_trained_once, greedy, teach, until
from tests.faults.test_power import logged_daemon
from tests.models import save_tiny

YEAR_S = 365 * 86400


def test_pairs_versions_and_series_keep_their_order(tmp_path: Path) -> None:
    store, now = Store(tmp_path / "edged.db"), utc_now()
    for number in range(1, 6):
        moment = now - timedelta(hours=number)

        def record(db, number=number, moment=moment) -> int:
            (pair_id,) = record_pair(
                db, "sam", f"good {number}", f"bad {number}", moment, prompt=f"question {number}"
            ).pair_ids
            write_record(db, scored(pair_id, version=number - 1, adapter="sam"), "base", moment)
            write_record(db, published(number, "sam"), "base", moment)
            if number < 3:
                write_record(db, PairRetired(pair_id, "sam", "trained", number, 1, ""), "base", moment)
            return pair_id

        store.write(record).result()
    assert [row.chosen.text for row in store.read(lambda db: get_pairs(db, list(open_pairs(db))))] == [
        f"good {number}" for number in range(1, 6)
    ]
    found = store.read(lambda db: summary(db, "sam"))
    assert found is not None
    assert found["version"] == 5
    assert [row["version"] for row in store.read(lambda db: versions(db, "sam"))] == [5, 4, 3, 2, 1]
    assert [row["version"] for row in store.read(lambda db: series(db, "sam", 10))] == [0, 1, 2, 3, 4]
    store.close()


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("gcc"), reason="the clock that jumps is written in C")
@pytest.mark.parametrize(
    "jumps",
    [pytest.param((-2 * YEAR_S, YEAR_S), id="back"), pytest.param((2 * YEAR_S, 0), id="forth", marks=pytest.mark.slow)],
)
def test_a_daemon_whose_clock_jumps_goes_on_answering_learning_and_counting(
    tmp_path: Path, jumps: tuple[int, int]
) -> None:
    """As on a box whose battery of the clock is empty, when the network brings the time."""
    offset = tmp_path / "offset"
    clock = {"LD_PRELOAD": str(build_library(tmp_path, "clock")), "CLOCK_OFFSET": str(offset)}
    offset.write_text("0")
    with logged_daemon(tmp_path, save_tiny(tmp_path / "tiny"), **clock) as (http, process):

        def learn(first: int) -> None:
            for number in range(first, first + 4):
                assert teach(http, number).status_code == 200
            until(lambda: not http.get("/v1/adapters/sam").json()["pairs_queued"], lambda: "", within_s=60)

        wanted = greedy(http)
        learn(0)
        for place, jump in enumerate(jumps, start=1):
            offset.write_text(str(jump))
            answer = http.post("/v1/completions", json={"prompt": "when?", "max_tokens": 2, "user": "sam"}).json()
            assert abs(answer["created"] - time.time() - jump) < 60, "the clock did not jump"
            learn(4 * place)
            assert greedy(http) == wanted
        rows = http.get("/v1/adapters/sam").json()["versions"]
        assert [row["version"] for row in rows] == sorted((row["version"] for row in rows), reverse=True)
        status = http.get("/v1/status").json()
        assert status["degraded"] == []
        assert 0 <= status["uptime_s"] < 600
        process.terminate()
        assert process.wait(60) == 0, (tmp_path / "log").read_text()
    check_trained_once(tmp_path / "data", set(range(12)))
    assert "Traceback" not in (tmp_path / "log").read_text()
