"""Ended runs of applications, from which the demand of others is learned."""

from collections.abc import Iterable, Mapping
from typing import Any

from sqlite_utils import Database

from edged.store.rows import first_value, insert_row

MAX_RUNS = 300
"""Runs of a type that are kept, the latest ones."""
MAX_ROWS = 20_000
"""Runs of all types that are kept: a start reads them, and types are whatever callers name."""


def salt(db: Database) -> bytes:
    """Return this database's salt for the words of calls, of which only hashes are stored."""
    return bytes(first_value(db, "SELECT salt FROM application_salt"))


def add_run(db: Database, row: Mapping[str, Any]) -> None:
    """Add a run that has ended."""
    insert_row(db, "application_runs", row)


def latest_runs(db: Database) -> list[dict[str, Any]]:
    """Return the rows of each sharer's latest runs of each type, in the order in which they ended."""
    sharers = "PARTITION BY application, coalesce(sharer, user)"
    ranked = f"SELECT *, row_number() OVER ({sharers} ORDER BY id DESC) AS age FROM application_runs"
    return list(db.query(f"SELECT * FROM ({ranked}) WHERE age <= {MAX_RUNS} ORDER BY id"))


def forget_runs(db: Database, application: str, users: Iterable[str]) -> None:
    """Delete these users' runs of a type."""
    for user in users:
        db.execute("DELETE FROM application_runs WHERE application = ? AND user = ?", [application, user])
