"""The database over months: what goes and what stays, and that nobody waits for it."""

from __future__ import annotations

import sqlite3
import threading
import time
from contextlib import closing
from dataclasses import asdict
from datetime import UTC, datetime, timedelta

import pytest

from edged.align.feedback.pair import VersionPublished
from edged.align.feedback.signals import Feedback, record_pair, record_signal
from edged.settings.live import Live
from edged.settings.load import Settings, StoreSettings
from edged.store import Store, database, maintenance
from edged.store.adapters import insert_version, set_version_saved
from edged.store.completions import insert_completion
from edged.store.feedback import get_pairs, pair_ids_of, set_pair_state
from edged.store.jobs.files import find_file, keep_file
from edged.store.jobs.jobs import JobRow, add_event, insert_job
from edged.store.maintenance import Maintenance
from edged.store.rows import insert_row
from edged.store.timestamps import utc_text
from tests.store.rows import completion

NOW = datetime.now(UTC)
OLD = NOW - timedelta(days=100)
SAMPLE = dict.fromkeys(
    ("prefill_tokens", "decode_tokens", "finetune_tokens", "finetune_units", "latency_ms", "predicted_ms"), 1
) | {"budget_ms": None, "free_pages": 3}


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path / "edged.db")
    yield store
    store.close()


@pytest.fixture(autouse=True)
def few_are_newest(monkeypatch):
    monkeypatch.setattr(maintenance, "NEWEST", 5)
    monkeypatch.setattr(maintenance, "PAUSE_S", 0.0)


def add(store, *names, when=OLD, text="x", **more):
    for name in names:
        row = completion(name, text, "y", created_at=utc_text(when), **more)
        store.write(lambda db, row=row: insert_completion(db, row)).result()


def ids(store, table="completions", key="id"):
    return [row[0] for row in store.read(lambda db: db.execute(f"SELECT {key} FROM {table} ORDER BY rowid").fetchall())]


def maintenance_of(store, **settings):
    return Maintenance(store, Live(Settings(store=StoreSettings(**settings))))


def sweep(store, **settings):
    return maintenance_of(store, **settings).sweep()


def numbered(count, letter="c"):
    return [f"{letter}{i}" for i in range(count)]


def test_files_expire_by_the_time_that_passes_and_not_by_a_clock_that_is_set(store, tmp_path, monkeypatch):
    ahead = 0.0
    wall = time.time
    monkeypatch.setattr(time, "time", lambda: wall() + ahead)
    upkeep, (earlier, later) = maintenance_of(store), (tmp_path / name for name in ("earlier", "later"))
    earlier.write_text("1")
    kept = keep_file(store, "ann", "a.jsonl", "fine-tune", earlier, "x", 3600)
    ahead = 365 * 86400.0
    later.write_text("2")
    after = keep_file(store, "ann", "b.jsonl", "fine-tune", later, "y", 3600)
    assert "files" not in upkeep.sweep()
    known = store.read(lambda db: {row.id: row.expires_at for row in (find_file(db, kept.id), find_file(db, after.id))})
    assert known[after.id] == after.expires_at
    assert abs(datetime.fromisoformat(known[kept.id]) - datetime.fromisoformat(after.expires_at)) < timedelta(minutes=1)
    ahead += 3601 - 599
    monkeypatch.setattr(maintenance, "CLOCK_IS_SET", timedelta(days=1))
    assert "files" not in upkeep.sweep()
    ahead += 600
    assert upkeep.sweep()["files"] == 2


def test_only_the_newest_completions_stay_and_those_that_feedback_refers_to(store):
    add(store, *numbered(200), when=NOW)
    store.write(lambda db: record_signal(db, Feedback("ada", "c3", "up", 0), NOW)).result()
    chosen = store.write(lambda db: record_signal(db, Feedback("ada", "c4", "chosen", 0), NOW)).result()
    assert chosen.pair_ids
    assert sweep(store, keep_completions=50) == {"completions": 148}
    assert ids(store) == ["c3", "c4", *numbered(200)[150:]]
    assert len(ids(store, "choices", "completion_id")) == 2 * 52
    assert sweep(store, keep_completions=50) == {}


def test_old_completions_go_but_never_the_newest_whatever_the_clock_says(store):
    add(store, *numbered(20))
    add(store, "new", when=NOW)
    assert sweep(store, keep_days=90) == {"completions": 16}
    assert ids(store) == [*numbered(20)[16:], "new"]
    add(store, "1970", when=datetime(1970, 1, 1, tzinfo=UTC))
    sweep(store, keep_days=90)
    assert ids(store)[-1] == "1970"
    assert sweep(store, keep_days=0) == {}


def test_iteration_samples_are_bounded_by_number_and_age(store, monkeypatch):
    def many(db):
        for moment, count in ((OLD, 30), (NOW, 100)):
            for _ in range(count):
                insert_row(db, "iteration_samples", {"created_at": utc_text(moment), **SAMPLE})

    store.write(many).result()
    assert sweep(store, keep_days=90) == {"iteration_samples": 30}
    monkeypatch.setattr(maintenance, "KEEP_SAMPLES", 10)
    assert sweep(store) == {"iteration_samples": 90}
    assert ids(store, "iteration_samples") == list(range(121, 131))


def teach(store, count, when=OLD, state="trained"):
    """Pairs of ada, each about an answer of edged's own, in that state."""
    found = []
    for i in range(count):
        name = f"{state}-{i}"
        add(store, name, when=when, asked=f"{name}?")
        told = store.write(lambda db, n=name: record_signal(db, Feedback("ada", n, "chosen", 0), when)).result()
        found += told.pair_ids
        store.write(lambda db, told=told: set_pair_state(db, told.pair_ids[0], state, 1, 1, "")).result()
    return found


def test_feedback_stays_for_good_unless_an_age_is_set(store):
    pairs = teach(store, 3, state="skipped")
    assert sweep(store, keep_days=1, keep_completions=1) == {}
    assert store.read(pair_ids_of) == pairs


def test_feedback_that_is_done_with_goes_at_its_age_with_its_completions_and_what_learning_needs_stays(
    store, monkeypatch
):
    monkeypatch.setattr(maintenance, "REPLAY_PAIRS", 2)
    trained = teach(store, 4)
    waiting = teach(store, 2, state="queued") + teach(store, 1, state="held_out")
    recent = teach(store, 1, when=NOW, state="skipped")
    recent += store.write(lambda db: record_pair(db, "ada", "x", "y", OLD, prompt="q")).result().pair_ids
    store.write(lambda db: record_signal(db, Feedback("ada", "trained-3", "up", 1), OLD)).result()
    score(store, trained)
    deleted = sweep(store, keep_feedback_days=50)
    assert deleted == {"alignment_metrics": 2, "pairs": 2, "signals": 2}
    assert store.read(pair_ids_of) == trained[2:] + waiting + recent
    sweep(store, keep_feedback_days=50, keep_days=50)
    left = ids(store)
    assert "trained-0" not in left
    assert {"trained-2", "trained-3", "queued-0", "held_out-0", "skipped-0"} <= set(left)
    assert store.read(lambda db: db.execute("PRAGMA foreign_key_check").fetchall()) == []
    assert all(pair.state == "trained" for pair in store.read(lambda db: get_pairs(db, trained)))


def score(store, pairs, split="prequential", version=1, when=OLD):
    def write(db):
        for pair in pairs:
            db.execute(
                """INSERT INTO alignment_metrics VALUES
                       (NULL, ?, 'ada', ?, ?, ?, -1, -2, -1, -2, 1, 1, 0, 0, 0.7, NULL, 5, 5)""",
                [utc_text(when), version, pair, split],
            )

    store.write(write).result()


def test_held_out_scores_and_versions_of_the_past_go_and_the_latest_stay(store):
    pairs = teach(store, 1, state="held_out")
    for version in (1, 2, 3):
        score(store, pairs, "held_out", version)
        made = asdict(VersionPublished("ada", version, version - 1, "trained"))
        store.write(lambda db, made=made: insert_version(db, utc_text(OLD), made)).result()
    score(store, pairs, "prequential", 1)
    store.write(lambda db: set_version_saved(db, "ada", 2, "/x", [])).result()
    assert sweep(store, keep_days=90) == {"alignment_metrics": 2, "adapter_versions": 1}
    assert ids(store, "adapter_versions", "version") == [2, 3]
    assert ids(store, "alignment_metrics", "split || version") == ["held_out3", "prequential1"]


def test_a_file_over_its_size_loses_its_oldest_completions_and_gives_the_pages_back(store, monkeypatch):
    monkeypatch.setattr(maintenance, "SLICE_ROWS", 4)
    add(store, *numbered(60), when=NOW, text="x" * 20_000)
    store.write(lambda db: record_signal(db, Feedback("ada", "c0", "up", 0), NOW)).result()
    maintenance_of(store).empty_log()
    before = store.path.stat().st_size
    keeper = maintenance_of(store, max_database_mb=2)
    assert 35 <= keeper.sweep()["completions"] < 50
    assert ids(store)[0] == "c0"
    assert ids(store)[-1] == "c59"
    keeper.empty_log()
    report = keeper.report()
    assert report["used_bytes"] <= 2 << 20
    assert store.path.stat().st_size < 0.7 * before
    assert report["rows"]["completions"] == len(ids(store))


def test_reports_of_ended_jobs_go_before_completions_where_the_file_is_too_large(store):
    add(store, *numbered(20), when=NOW, text="x" * 2_000)
    for name, status in (("done", "succeeded"), ("open", "running")):
        row = JobRow(name, utc_text(NOW), "ada", "base", "demo", "", name, "dpo", {}, 1, "file", {}, status)
        store.write(lambda db, row=row: insert_job(db, row)).result()
        for number in range(10):
            report = (utc_text(NOW), name, "x" * 100_000, "info", number)
            store.write(lambda db, report=report: add_event(db, *report)).result()
    assert maintenance_of(store, max_database_mb=2).sweep() == {"job_events": 10}
    assert set(ids(store, "job_events", "job_id")) == {"open"}


def test_what_is_left_over_the_size_is_feedback_and_is_told_once(store, caplog):
    for i in range(100):
        store.write(lambda db, i=i: record_pair(db, "ada", "x" * 30_000, f"y{i}", NOW, prompt="q")).result()
    keeper = maintenance_of(store, max_database_mb=1)
    assert keeper.sweep() == keeper.sweep() == {}
    assert caplog.text.count("store.keep_feedback_days") == 1
    assert len(store.read(pair_ids_of)) == 100


def test_a_sweep_deletes_a_few_rows_a_write_and_others_writes_come_in_between(store):
    add(store, *numbered(300), when=NOW)
    sizes, order = [], []
    delete = maintenance.delete

    def watched(db, **arguments):
        order.append("slice")
        sizes.append(delete(db, **arguments))
        store.write(lambda db: order.append("write"))
        return sizes[-1]

    maintenance.delete = watched
    try:
        sweep(store, keep_completions=10)
    finally:
        maintenance.delete = delete
    assert sum(sizes) == 290
    assert max(sizes) <= maintenance.SLICE_ROWS
    assert order[:4] == ["slice", "write", "slice", "write"]


def test_a_reader_keeps_its_state_while_a_sweep_goes_on(store):
    add(store, *numbered(300), when=NOW)

    def read(db):
        count = "SELECT count(*) FROM completions"
        before = db.execute(count).fetchone()
        thread = threading.Thread(target=sweep, args=[store], kwargs={"keep_completions": 10})
        thread.start()
        thread.join()
        return before, db.execute(count).fetchone()

    assert store.read(read) == ((300,), (300,))
    assert len(ids(store)) == 10


def test_the_log_is_emptied_although_somebody_always_reads(store):
    """Two readers take turns so that one is always reading; SQLite's own checkpoints never get the log to its start."""
    stop, turn = threading.Event(), [threading.Event(), threading.Event()]
    turn[0].set()

    def read(me):
        while not stop.is_set():
            store.read(lambda db: reading(db, me))

    def reading(db, me):
        db.execute("SELECT count(*) FROM completions").fetchone()
        turn[1 - me].set()
        turn[me].wait(0.05)
        turn[me].clear()

    threads = [threading.Thread(target=read, args=[me]) for me in (0, 1)]
    for thread in threads:
        thread.start()
    keeper, sizes = maintenance_of(store), []
    for i in range(5):
        for part in range(10):
            add(store, f"r{i}-{part}", text="x" * 20_000)
        assert keeper.empty_log()
        sizes.append(keeper.report()["log_bytes"])
    stop.set()
    for thread in threads:
        thread.join()
    assert sizes == [0] * 5


def test_a_reader_who_stays_makes_the_log_wait_and_not_the_writes(store, monkeypatch):
    monkeypatch.setattr(maintenance, "LOG_WAIT_MS", 20)
    add(store, "a")

    def read(db):
        db.execute("SELECT count(*) FROM completions").fetchone()
        add(store, "b")
        emptied = maintenance_of(store).empty_log()
        add(store, "c")
        return emptied

    assert store.read(read) is False
    assert ids(store) == ["a", "b", "c"]
    assert maintenance_of(store).empty_log()


def test_a_file_that_cannot_give_pages_back_is_rewritten_at_a_start_when_it_is_small_else_when_told(
    tmp_path, monkeypatch
):
    def made_earlier(name):
        path = tmp_path / name / "edged.db"
        path.parent.mkdir()
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.execute("CREATE TABLE notes (text)")
        return Store(path)

    small = made_earlier("small")
    assert maintenance_of(small).report()["gives_pages_back"]
    small.close()
    monkeypatch.setattr(database, "REWRITE_BYTES", 100)
    large = made_earlier("large")
    keeper = maintenance_of(large)
    assert not keeper.report()["gives_pages_back"]
    assert keeper.vacuum()[1] > 0
    assert keeper.report()["gives_pages_back"]
    large.close()


def test_a_start_does_not_wait_until_all_rows_are_counted(store):
    add(store, *numbered(3))
    keeper = maintenance_of(store)
    early = keeper.report()
    assert set(early["rows"].values()) == {None}
    assert early["used_bytes"] > 0
    assert early["oldest_completion"] == utc_text(OLD)
    keeper.start()
    deadline = time.monotonic() + 30
    while keeper.report()["rows"]["completions"] is None and time.monotonic() < deadline:
        time.sleep(0.01)
    keeper.stop()
    assert keeper.report()["rows"]["completions"] == 3


def test_the_thread_sweeps_and_stops(store, monkeypatch):
    for name in ("CHECK_LOG_EVERY_S", "FIRST_SWEEP_S"):
        monkeypatch.setattr(maintenance, name, 0.01)
    add(store, *numbered(20), when=NOW)
    keeper = maintenance_of(store, keep_completions=7)
    keeper.start()
    while len(ids(store)) > 7:
        time.sleep(0.01)
    keeper.stop()
    keeper.stop()
    assert ids(store) == numbered(20)[13:]
