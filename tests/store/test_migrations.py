"""A database of any released schema becomes one of the present schema, whole, whatever happens meanwhile."""

from __future__ import annotations

import os
import re
import signal
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from sqlite_utils import Database

from edged.store import Store, StoreError
from edged.store.migrations import FOLDED, MIGRATIONS, check_known, migrate
from tests.store import schemas
from tests.store.schemas import VERSIONS

FROM_BEFORE = (9, 10)
"""Schemas from before the first release."""


def schema(path: Path) -> list[tuple[str, ...]]:
    """Tables and indexes as SQLite was told to make them, but for spaces and quotes."""
    with closing(sqlite3.connect(path)) as connection:
        rows = connection.execute("SELECT type, name, tbl_name, coalesce(sql, '') FROM sqlite_schema ORDER BY 1, 2")
        return [(*names, re.sub(r"[\s\"]+", "", sql)) for *names, sql in rows]


def contents(path: Path) -> dict[str, list[dict]]:
    with closing(sqlite3.connect(path)) as connection:
        db = Database(connection, execute_plugins=False)
        return {table.name: list(table.rows) for table in db.tables if table.name != "migrations"}


def applied(path: Path) -> list[str]:
    """The names of its migrations, in their order."""
    with closing(sqlite3.connect(path)) as connection:
        return [name for (name,) in connection.execute("SELECT name FROM migrations ORDER BY name")]


def check(path: Path, version: int | None, tmp_path: Path) -> None:
    """It opens, its schema is a fresh one's, and every row of the dump is there, if it came from one."""
    dumped, fresh = tmp_path / "dumped.db", tmp_path / "fresh" / "edged.db"
    dumped.unlink(missing_ok=True)
    if version is not None:
        schemas.load(version, dumped)
    Store(path).close()
    Store(fresh).close()
    assert schema(path) == schema(fresh)
    assert applied(path) == applied(fresh) == [migration.__name__ for migration in MIGRATIONS]
    found = contents(path)
    for table, rows in contents(dumped).items():
        kept = [{key: row[key] for key in rows[0]} for row in found[table]]
        assert kept == rows
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert connection.execute("PRAGMA foreign_key_check").fetchall() == []


@pytest.mark.parametrize("version", VERSIONS)
def test_every_released_schema_has_its_dump_with_a_row_in_every_table(version, tmp_path):
    assert schemas.file_of(version).exists(), "run: python -m tests.store.schemas"
    schemas.load(version, tmp_path / "edged.db")
    assert all(contents(tmp_path / "edged.db").values())


@pytest.mark.parametrize("version", VERSIONS)
def test_a_database_of_an_earlier_schema_is_brought_up_to_date_with_all_its_rows(version, tmp_path):
    path = tmp_path / "old" / "edged.db"
    path.parent.mkdir()
    schemas.load(version, path)
    check(path, version, tmp_path)


@pytest.mark.parametrize("version", VERSIONS)
def test_backups_and_rebuilds_take_a_database_of_an_earlier_schema_as_it_is(version, tmp_path):
    schemas.load(version, tmp_path / "edged.db")
    before = applied(tmp_path / "edged.db")
    with closing(sqlite3.connect(tmp_path / "edged.db")) as connection:
        check_known(Database(connection, execute_plugins=False))
    assert applied(tmp_path / "edged.db") == before


def test_queued_pairs_of_checkpoints_are_not_learned_any_more(tmp_path):
    path = tmp_path / "edged.db"
    schemas.load(16, path)
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("UPDATE pairs SET state = 'queued'")
        db.execute("UPDATE job_checkpoints SET adapter = (SELECT adapter FROM pairs)")
    Store(path).close()
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("SELECT state FROM pairs").fetchall() == [("skipped",)]


def test_a_job_that_was_paused_before_knows_at_which_step(tmp_path):
    path = tmp_path / "edged.db"
    schemas.load(17, path)
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        job = db.execute("SELECT id FROM jobs").fetchone()[0]
        db.execute("UPDATE jobs SET paused = (id = ?), status = 'running', finished_at = NULL", [job])
        for step in (6, 7):
            values = (900 + step, "2026-01-01T00:00:00.000000+00:00", job, "info", "", step, '{"train_loss": 0.5}')
            db.execute("INSERT INTO job_events VALUES (?, ?, ?, ?, ?, ?, ?)", values)
    Store(path).close()
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("SELECT paused_at, other_steps FROM jobs WHERE id = ?", [job]).fetchone() == (7, 0)


@pytest.mark.parametrize("version", FROM_BEFORE)
def test_a_database_from_before_the_first_release_keeps_its_time_of_migration(version, tmp_path):
    path = tmp_path / "edged.db"
    schemas.load(version, path)

    def times():
        with closing(sqlite3.connect(path)) as connection:
            return dict(connection.execute("SELECT name, applied_at FROM migrations").fetchall())

    before = times()
    assert before.keys() >= FOLDED
    Store(path).close()
    after = times()
    assert after["m009_schema"] == before["m009_forgetting"]
    assert after["m010_language"] == before.get("m010_language", after["m010_language"])


@pytest.mark.parametrize("missing", sorted(FOLDED))
def test_a_database_from_the_middle_of_development_is_refused_and_left_as_it_is(missing, tmp_path):
    path = tmp_path / "edged.db"
    schemas.load(9, path)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("DELETE FROM migrations WHERE name = ?", [missing])
    before, names = contents(path), applied(path)
    told = r"edged\.db.*from before the first release \(8 of its 9 migrations\): no later one can use it; move it away"
    with pytest.raises(StoreError, match=told):
        Store(path)
    assert (contents(path), applied(path)) == (before, names)


BETWEEN = [pytest.param(version, marks=pytest.mark.slow) for version in VERSIONS[1:-1]]
"""Their migrations are the last ones of the oldest version's."""


@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("version", [None, VERSIONS[0], *BETWEEN, *VERSIONS[-1:]])
def test_a_power_cut_at_any_moment_of_a_migration_loses_nothing(version, step, tmp_path):
    """A child process migrates and is killed at its n-th statement, for each `step`-th n there is; None: a new file."""
    cuts = 0
    while True:
        path = tmp_path / f"cut-{cuts}" / "edged.db"
        path.parent.mkdir()
        if version is not None:
            schemas.load(version, path)
        if migrate_and_die(path, statements=cuts + 1) == 0:
            break
        cuts += step
        check(path, version, tmp_path)
    missing = len(MIGRATIONS) if version is None else len(MIGRATIONS) - 1 - VERSIONS.index(version)
    assert cuts > 3 * (missing + (version in FROM_BEFORE))


def migrate_and_die(path: Path, statements: int) -> int:
    """The child's exit status, 0 when it had no more statements than that."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    left = statements

    def count(_: str) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    connection = sqlite3.connect(path)
    connection.set_trace_callback(count)
    migrate(Database(connection, execute_plugins=False))
    connection.close()
    os._exit(0)


def test_a_database_of_a_newer_edged_is_refused_and_left_as_it_is(tmp_path):
    path = tmp_path / "edged.db"
    schemas.load(VERSIONS[-1], path)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("INSERT INTO migrations VALUES ('m999_future', 'then')")
    before = contents(path)
    with pytest.raises(StoreError, match=r"edged\.db.*newer edged \(migration m999_future\): install that version"):
        Store(path)
    assert contents(path) == before
