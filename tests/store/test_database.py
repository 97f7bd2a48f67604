"""The store keeps what it acknowledged, in order, whatever else happens."""

from __future__ import annotations

import functools
import os
import re
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest
from sqlite_utils import Database

from edged.store import Store, StoreError, database
from edged.store.migrations import MIGRATIONS, migrate
from tests.store import schemas

ROOT = Path(__file__).parents[2]


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path / "edged.db")
    store.write(lambda db: db.execute("CREATE TABLE notes (id INTEGER PRIMARY KEY, text TEXT NOT NULL)")).result()
    yield store
    store.close()


def note(text, number=None):
    return lambda db: db.execute("INSERT INTO notes VALUES (?, ?)", [number, text]).lastrowid


def notes(db):
    return [text for (text,) in db.execute("SELECT text FROM notes ORDER BY id")]


def run_python(code, *arguments, **options):
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def test_a_write_is_on_disk_when_its_future_resolves(store):
    assert store.write(note("hello")).result() == 1
    with sqlite3.connect(f"file:{store.path}?mode=ro", uri=True) as other:
        assert other.execute("SELECT text FROM notes").fetchall() == [("hello",)]


def test_commits_reach_the_disk_in_wal_mode_with_foreign_keys(store):
    def pragmas(db):
        return [db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("journal_mode", "synchronous", "foreign_keys")]

    assert store.write(pragmas).result() == ["wal", 2, 1]


WRITER = """
import sys, threading
from pathlib import Path
from edged.store import Store
store = Store(Path(sys.argv[1]))
store.write(lambda db: db.execute("CREATE TABLE notes (id INTEGER PRIMARY KEY, text TEXT NOT NULL)")).result()
def work(name):
    for i in range(10**9):
        text = f"{name}-{i}"
        store.write(lambda db: db.execute("INSERT INTO notes VALUES (NULL, ?)", [text])).result()
        sys.stdout.write(text + "\\n")
        sys.stdout.flush()
for name in "abcd":
    threading.Thread(target=work, args=[name]).start()
"""


def test_kill_9_loses_nothing_that_was_acknowledged(tmp_path):
    process = run_python(WRITER, tmp_path / "edged.db")
    assert process.stdout is not None
    acknowledged = [process.stdout.readline().strip() for _ in range(300)]
    os.kill(process.pid, signal.SIGKILL)
    acknowledged += process.stdout.read().split()[:-1]
    process.wait()
    store = Store(tmp_path / "edged.db")
    stored = store.read(notes)
    assert len(acknowledged) > 290
    assert set(acknowledged) <= set(stored)
    assert store.read(lambda db: db.execute("PRAGMA integrity_check").fetchone()) == ("ok",)
    store.close()


def test_writes_of_many_threads_all_arrive_and_keep_each_threads_order(store):
    def work(name):
        for future in [store.write(note(f"{name} {i:03d}")) for i in range(200)]:
            future.result()

    threads = [threading.Thread(target=work, args=[name]) for name in "abcdefgh"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = store.read(notes)
    assert len(found) == 1600
    for name in "abcdefgh":
        mine = [text for text in found if text.startswith(name)]
        assert mine == sorted(mine)


def hold(store):
    """Keep the writer busy until the event is set, so that what is queued meanwhile shares one commit."""
    entered, release = threading.Event(), threading.Event()
    store.write(lambda db: (entered.set(), release.wait(10)))
    entered.wait(10)
    return release


def test_a_failing_write_undoes_itself_and_not_its_neighbours(store):
    def fails(db):
        note("half")(db)
        raise KeyError("no such thing")

    release = hold(store)
    futures = [store.write(fn) for fn in (note("before"), fails, note("duplicate", 1), note("after"))]
    release.set()
    assert futures[0].result() == 1
    with pytest.raises(KeyError, match="no such thing"):
        futures[1].result()
    with pytest.raises(StoreError, match=r"edged\.db.*UNIQUE constraint failed: notes\.id"):
        futures[2].result()
    assert futures[3].result() == 2
    assert store.read(notes) == ["before", "after"]


def test_queued_writes_share_a_commit(store):
    commits = []
    store._writer.conn.set_trace_callback(lambda sql: commits.append(sql) if sql == "COMMIT" else None)
    release = hold(store)
    futures = [store.write(note(str(i))) for i in range(100)]
    release.set()
    assert [future.result() for future in futures] == list(range(1, 101))
    assert len(commits) == 2


def test_a_cancelled_write_does_not_happen(store):
    release = hold(store)
    cancelled, kept = store.write(note("cancelled")), store.write(note("kept"))
    assert cancelled.cancel()
    release.set()
    kept.result()
    assert store.read(notes) == ["kept"]


def test_a_write_that_ends_the_transaction_fails_with_its_group_and_the_store_goes_on(store):
    release = hold(store)
    futures = [store.write(note("lost")), store.write(lambda db: db.conn.execute("ROLLBACK"))]
    release.set()
    for future in futures:
        with pytest.raises(StoreError):
            future.result()
    store.write(note("later")).result()
    assert store.read(notes) == ["later"]


def test_a_full_disk_fails_the_write_with_the_way_out_and_keeps_what_was_there(store):
    store.write(note("small")).result()
    limit = store.read(lambda db: db.execute("PRAGMA page_count").fetchone()[0]) + 2
    store.write(lambda db: db.execute(f"PRAGMA max_page_count = {limit}").fetchall()).result()
    with pytest.raises(StoreError, match="full: make room on the disk"):
        store.write(note("x" * 1_000_000)).result()
    store.write(note("fits")).result()
    assert store.read(notes) == ["small", "fits"]


def test_a_file_kept_locked_by_another_program_is_an_error_that_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(database, "BUSY_S", 0.1)
    store = Store(tmp_path / "edged.db")
    other = sqlite3.connect(store.path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreError, match="locked: another program"):
        store.write(lambda db: db.execute("CREATE TABLE t (x)")).result()
    other.execute("ROLLBACK")
    store.write(lambda db: db.execute("CREATE TABLE t (x)")).result()
    other.close()
    store.close()


def test_a_reader_sees_one_state_while_writes_go_on_and_cannot_write(store):
    store.write(note("one")).result()

    def read(db):
        before = notes(db)
        store.write(note("two")).result()
        return before, notes(db)

    assert store.read(read) == (["one"], ["one"])
    assert store.read(notes) == ["one", "two"]
    with pytest.raises(StoreError, match="readonly"):
        store.read(note("three"))


def test_readers_in_other_threads_get_their_own_connection(store):
    store.write(note("one")).result()
    seen = []
    threads = [threading.Thread(target=lambda: seen.append((store.read(notes), id(store._reader())))) for _ in range(3)]
    for thread in threads:
        thread.start()
        thread.join()
    assert [found for found, _ in seen] == [["one"]] * 3


def test_a_thread_keeps_its_connection_and_the_lock_names_its_holder_to_everybody(store):
    assert store.read(lambda db: db) is store.read(lambda db: db)
    lock = store.path.with_name("edged.lock")
    assert lock.stat().st_mode & 0o777 == 0o644
    assert lock.read_text().strip() == str(os.getpid())


def test_close_commits_what_was_queued_and_refuses_what_comes_later(tmp_path):
    store = Store(tmp_path / "edged.db")
    store.write(lambda db: db.execute("CREATE TABLE notes (id INTEGER PRIMARY KEY, text TEXT NOT NULL)"))
    futures = [store.write(note(str(i))) for i in range(2000)]
    store.close()
    store.close()
    assert [future.result(timeout=0) for future in futures] == list(range(1, 2001))
    with pytest.raises(StoreError, match="closed"):
        store.write(note("late"))
    with pytest.raises(StoreError, match="closed"):
        store.read(notes)
    again = Store(tmp_path / "edged.db")
    assert len(again.read(notes)) == 2000
    again.close()


OPENER = """
import sys
from pathlib import Path
from edged.store import Store, StoreError
try:
    Store(Path(sys.argv[1])).close()
except StoreError as error:
    sys.exit(str(error))
"""


def test_a_store_that_closes_cuts_off_reads_of_other_threads(store):
    """SQLite itself would end the process."""
    begun, ended = threading.Barrier(4), []
    endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n"

    def read():
        def count(db):
            begun.wait()
            return db.execute(endless).fetchone()

        with pytest.raises(StoreError, match="interrupted"):
            store.read(count)
        ended.append(True)

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    begun.wait()
    # Until they are within SQLite.
    time.sleep(0.2)
    store.close()
    for thread in threads:
        thread.join(10)
    assert len(ended) == 3
    with pytest.raises(StoreError, match="is closed"):
        store.read(notes)


def test_a_second_process_is_refused_by_folder_and_pid_until_the_first_is_gone(store):
    process = run_python(OPENER, store.path.parent / "other-name.db")
    _, error = process.communicate(timeout=60)
    assert process.returncode == 1
    assert f'"{store.path.parent}"' in error
    assert f"pid {os.getpid()}" in error
    store.close()
    process = run_python(OPENER, store.path)
    assert process.wait(timeout=60) == 0


def test_a_lock_file_left_by_a_dead_process_does_not_matter(tmp_path):
    (tmp_path / "edged.lock").write_text("4194304\n" + "x" * 100)
    store = Store(tmp_path / "edged.db")
    assert (tmp_path / "edged.lock").read_text() == f"{os.getpid()}\n"
    store.close()


@pytest.mark.parametrize(
    "content", [b"this is no database, but it is long enough to be looked at " * 100, b"SQLite format 3\0" * 300]
)
def test_a_file_that_is_no_database_is_refused_with_the_way_out(tmp_path, content):
    path = tmp_path / "edged.db"
    path.write_bytes(content)
    with pytest.raises(StoreError, match=r'edged\.db".*damaged.*move the file away'):
        Store(path)
    assert path.read_bytes() == content
    path.unlink()
    Store(path).close()


def test_damage_inside_the_file_is_an_error_of_the_reads_that_meet_it(tmp_path):
    path = tmp_path / "edged.db"
    store = Store(path)
    store.write(lambda db: db.execute("CREATE TABLE notes (id INTEGER PRIMARY KEY, text TEXT NOT NULL)"))
    for future in [store.write(note("x" * 500)) for _ in range(500)]:
        future.result()
    store.close()
    with path.open("r+b") as file:
        file.seek(path.stat().st_size - 40 * 4096)
        file.write(b"\xff" * 30 * 4096)
    store = Store(path)
    with pytest.raises(StoreError, match=r"malformed.*damaged"):
        store.read(notes)
    store.close()


def test_a_new_data_folder_is_closed_to_others_and_an_existing_one_is_left_as_it_is(tmp_path):
    for folder, mode in ((tmp_path / "new", 0o750), (tmp_path / "old", 0o755)):
        if mode == 0o755:
            folder.mkdir()
            folder.chmod(mode)
        Store(folder / "edged.db").close()
        assert folder.stat().st_mode & 0o777 & ~mode == 0
    assert (tmp_path / "old").stat().st_mode & 0o777 == 0o755


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=f'data folder "{tmp_path}/file/data" cannot be used: Not a directory'):
        Store(tmp_path / "file" / "data" / "edged.db")


def test_migrations_run_once_in_order_and_are_recorded(tmp_path):
    db = Database(tmp_path / "x.db")

    def m_first(db):
        db.execute("CREATE TABLE first (x)")

    def m_second(db):
        db.execute("ALTER TABLE first ADD COLUMN y")

    assert migrate(db, (m_first,)) == ["m_first"]
    assert migrate(db, (m_first, m_second)) == ["m_second"]
    assert migrate(db, (m_first, m_second)) == []
    assert [name for (name,) in db.execute("SELECT name FROM migrations ORDER BY rowid")] == ["m_first", "m_second"]


def test_a_failing_migration_leaves_nothing_behind(tmp_path):
    db = Database(tmp_path / "x.db")

    def m_bad(db):
        db.execute("CREATE TABLE half (x)")
        raise sqlite3.OperationalError("disk I/O error")

    with pytest.raises(sqlite3.OperationalError):
        migrate(db, (m_bad,))
    assert db.table_names() == ["migrations"]


def test_a_file_of_a_newer_edged_is_refused(tmp_path):
    store = Store(tmp_path / "edged.db")
    store.write(lambda db: db.execute("INSERT INTO migrations VALUES ('m999_future', 'then')")).result()
    store.close()
    with pytest.raises(StoreError, match=r"edged\.db.*written by a newer edged \(migration m999_future\)"):
        Store(tmp_path / "edged.db")


def test_the_file_opens_in_sqlite_utils_while_the_daemon_runs(store):
    command = [Path(sys.executable).with_name("sqlite-utils"), "tables", str(store.path), "--counts", "--csv"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    counts = dict(line.split(",") for line in result.stdout.split())
    assert counts["migrations"] == str(len(MIGRATIONS))
    assert {"completions", "choices", "signals", "pairs", "adapter_versions", "alignment_metrics"} <= set(counts)


def test_a_file_from_before_the_first_release_keeps_its_pairs_and_what_refers_to_them(tmp_path):
    path = tmp_path / "edged.db"
    schemas.load(9, path)
    with closing(sqlite3.connect(path)) as db:
        indexes = {name for (name,) in db.execute("SELECT name FROM sqlite_schema WHERE tbl_name = 'pairs'")}
    store = Store(path)
    try:
        assert store.read(lambda db: db.execute("SELECT id, chosen FROM pairs").fetchall()) == [(1, "chosen")]
        assert store.read(lambda db: db.execute("SELECT pair_id FROM shelved_progress").fetchall()) == [(1,)]
        assert store.read(lambda db: db.execute("PRAGMA foreign_key_check").fetchall()) == []
        after = store.read(lambda db: db.execute("SELECT name FROM sqlite_schema WHERE tbl_name = 'pairs'").fetchall())
        assert {name for (name,) in after} >= indexes
        store.write(lambda db: db.execute("UPDATE pairs SET state = 'quarantined'")).result()
        store.write(lambda db: db.execute("DELETE FROM alignment_metrics")).result()
        store.write(lambda db: db.execute("DELETE FROM pairs")).result()
        assert store.read(lambda db: db.execute("SELECT count(*) FROM shelved_progress").fetchone()) == (0,)
    finally:
        store.close()


def test_a_lock_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "edged.lock").symlink_to(victim)
    with pytest.raises(StoreError, match="is a symbolic link"):
        Store(tmp_path / "data" / "edged.db")
    assert victim.read_text() == "precious"


@pytest.mark.parametrize("error", [ValueError("odd"), SystemExit("ended")])
def test_a_callback_that_raises_does_not_end_the_writer_silently(store, error):
    def fails(_):
        raise error

    release = hold(store)
    first, second = store.write(note("first")), store.write(note("beside it"))
    first.add_done_callback(fails)
    release.set()
    if isinstance(error, Exception):
        second.result(20)
        store.write(note("later")).result(20)
        assert not store.failed
        return
    with pytest.raises(StoreError, match=r"its writer failed \(SystemExit\('ended'\)\); edged ends"):
        second.result(20)
    with pytest.raises(StoreError, match="its writer failed"):
        store.write(note("later")).result(20)
    assert "its writer failed" in store.failed, "the daemon looks at this, and ends"
    assert "first" in store.read(notes)


@pytest.mark.parametrize(
    ("text", "way_out"),
    [
        ("file is not a database", ": the file is damaged; stop edged, move the file away, then restore a copy"),
        ("database disk image is malformed", ": the file is damaged; stop edged, move the file away"),
        ("database is locked", ": another program kept it locked for 30 s; close that program"),
        ("database or disk is full", ": make room on the disk"),
        ("unable to open database file", ": check that this user may write to the file and its folder"),
        ("attempt to write a readonly database", ": check that this user may write to the file and its folder"),
        ("no such table: nothing", ""),
    ],
)
def test_an_error_of_the_database_is_counted_and_names_the_file_and_the_way_out(store, caplog, text, way_out):
    def fails(db):
        raise sqlite3.OperationalError(text)

    for count in (1, 2):
        with pytest.raises(StoreError) as told:
            store.read(fails)
        assert str(told.value).startswith(f'database "{store.path}": {text}{way_out}')
        assert bool(way_out) or str(told.value).endswith(text)
        assert store.errors == count
    damaged = "malformed" in text
    assert (store.problem == str(told.value)) == damaged
    assert [record.message for record in caplog.records] == ([str(told.value)] if damaged else []), "it is logged once"
    with pytest.raises(StoreError, match=text):
        store.write(fails, alone=True).result()
    with pytest.raises(KeyError):
        store.write(lambda db: {}["what a function raises itself is not the database's"]).result()
    assert (store.errors, store.failed, store.suspect) == (3, "", "")


@pytest.mark.parametrize("code", [sqlite3.SQLITE_IOERR_FSYNC, sqlite3.SQLITE_IOERR_DIR_FSYNC])
@pytest.mark.parametrize("alone", [False, True])
def test_after_a_failed_sync_nothing_is_written_and_the_mark_outlives_the_store(store, code, alone):
    def fails(db):
        error = sqlite3.OperationalError("disk I/O error")
        error.sqlite_errorcode = code
        raise error

    store.write(note("before")).result()
    mark = store.path.with_name("edged.db.suspect")
    with pytest.raises(StoreError, match="disk I/O error"):
        store.write(fails, alone=alone).result()
    assert store.failed == (
        f'database "{store.path}": the disk did not keep what was written (disk I/O error); edged ends, and takes no '
        f'feedback when it is started again, until "{mark}" is removed: see dmesg for what the disk has'
    )
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ disk I/O error\n", mark.read_text())
    for later in (False, True):
        with pytest.raises(StoreError) as refused:
            store.write(note("after"), alone=later).result()
        assert str(refused.value) == store.failed
    assert store.read(notes) == ["before"]
    store.close()
    again = Store(store.path)
    assert (again.failed, again.read(notes)) == ("", ["before"])
    assert again.suspect == (
        f'the disk failed under the database (see "{mark}"): no feedback is taken until somebody has looked at it '
        f"(dmesg, edged doctor; edged restore takes a backup), and has removed that file"
    )
    mark.unlink()
    assert again.suspect == ""
    again.close()


def test_a_problem_is_over_with_the_next_commit_but_damage_is_not(store, caplog):
    def fills(db):
        db.execute("ROLLBACK")
        raise sqlite3.OperationalError("database or disk is full")

    for _ in range(2):
        with pytest.raises(StoreError, match="make room"):
            store.write(fills).result()
    assert store.problem == f'database "{store.path}": database or disk is full: make room on the disk'
    store.write(note("again")).result()
    assert store.problem == ""
    assert [record.message for record in caplog.records] == [
        f'database "{store.path}": database or disk is full: make room on the disk',
        f"database {store.path} can be written again",
    ]

    def damaged(db):
        raise sqlite3.DatabaseError("database disk image is malformed")

    with pytest.raises(StoreError, match="damaged"):
        store.read(damaged)
    store.write(note("more")).result()
    assert "malformed" in store.problem


def test_writes_are_timed_and_told_by_the_name_of_their_function(store):
    told = []
    store.on_writes = lambda times, commit_s: told.append((times, commit_s))

    def waits(db, seconds):
        time.sleep(seconds)

    store.write(functools.partial(functools.partial(waits, seconds=0.05))).result()
    store.write(waits_alone := functools.partial(waits, seconds=0.05), alone=True).result()
    store.write(lambda db: None).result()
    (together, commit_s), (alone, beside_s), *_ = told
    assert waits_alone.func is waits
    for (times,) in (together, alone):
        assert times.job == f"{__name__}.{waits.__qualname__}"
        assert 0 <= times.waited_s < 30
        assert 0.05 <= times.ran_s < 30
    assert 0 <= commit_s < 30
    assert 0 <= beside_s < 30
