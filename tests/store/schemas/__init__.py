"""Small databases as earlier versions of edged left them: `vN.sql` has the migrations up to N and a row in every table.

A schema that was released does not change, and neither does its file: `python -m tests.store.schemas` writes those that
are missing, after a migration was added. Versions 9 and 10 are from before the first release: they name nine migrations
that `m009_schema` stands for since.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

from sqlite_utils import Database

from edged.store.migrations import MIGRATIONS, migrate

FOLDER = Path(__file__).parent
VERSIONS = tuple(int(migration.__name__[1:4]) for migration in MIGRATIONS)
_VALUES: dict[str, Any] = {
    "created_at": "2025-01-31T12:00:00.000000+00:00",
    "object": "chat.completion",
    "user": "ada",
    "adapter": "ada",
    "base": "base-a",
    "fingerprint": "base-b",
    "messages": '[{"role":"user","content":"Grüße 🙂"}]',
    "completion_id": "completions-1",
    "chosen_completion_id": "completions-1",
    "rejected_completion_id": "completions-1",
    "signal_id": "signals-1",
    "state": "trained",
    "split": "held_out",
    "source": "pair",
    "decision": "released",
    "ref_model": "base-b",
    "path": "/var/lib/edged/adapters/base-b/ada/v000001",
}
"""Of columns whose value must be of some kind; others have one by their type."""


def file_of(version: int) -> Path:
    """The dump of the schema that has the migrations up to this one."""
    return FOLDER / f"v{version}.sql"


def load(version: int, path: Path) -> None:
    """Make the database that was dumped, as a daemon of that time left it."""
    with sqlite3.connect(path) as connection:
        connection.executescript(file_of(version).read_text())
        connection.execute("PRAGMA journal_mode = WAL").fetchall()
    connection.close()


def dump(version: int) -> str:
    """A new database of that schema, with a row in every table."""
    db = Database(memory=True)
    migrate(db, MIGRATIONS[: VERSIONS.index(version) + 1])
    for table in db.tables:
        if table.name != "migrations" and not table.count:
            values = [_value(table.name, column.name, column.type) for column in table.columns]
            db.execute(f"INSERT INTO {table.name} VALUES ({', '.join('?' * len(values))})", values)
    db.conn.commit()
    return "\n".join(db.conn.iterdump()) + "\n"


def _value(table: str, name: str, type: str) -> Any:
    if name in _VALUES:
        return _VALUES[name]
    if name == "id" and type == "TEXT":
        return f"{table}-1"
    if name.endswith("_ids"):
        return "[1,2]"
    return {"TEXT": name, "REAL": 1.5}.get(type, 1)
