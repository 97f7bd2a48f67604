"""The table `files`, and the folder with the content of the files that it names."""

import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from pathlib import Path

from sqlite_utils import Database

from edged.runtime.durable import sync
from edged.store.data_dir import FILES_FOLDER, path_in
from edged.store.database import FOLDER_MODE, Store
from edged.store.jobs.jobs import IS_OPEN
from edged.store.rows import first_column, first_value, insert_row
from edged.store.timestamps import utc_now, utc_text


@dataclass(frozen=True, slots=True)
class FileRow:
    """A file that `owner` uploaded, or that a job of the owner's made; its content is `files/ID` in the data folder.

    It is deleted after `expires_at`, once no open job needs it.
    """

    id: str
    created_at: str
    owner: str
    filename: str
    purpose: str
    bytes: int
    sha256: str
    expires_at: str | None = None


def content_of(store: Store, file_id: str) -> Path:
    """Return the path of a file's content. Raises FileNotFoundError for an id that might lead out of the folder."""
    return path_in(store.path.parent / FILES_FOLDER, file_id)


def remove_content(store: Store, file_id: str) -> None:
    """Delete a file's content, if it is there. Raises OSError."""
    content_of(store, file_id).unlink(missing_ok=True)


def place_file(
    store: Store, owner: str, filename: str, purpose: str, draft: Path, sha256: str, expires_s: int = 0
) -> FileRow:
    """Make a draft in the data folder a file's content, which is on disk then; 0: it does not expire. Raises OSError.

    Its row is to be inserted: `sweep_files` removes content without one.
    """
    folder = store.path.parent / FILES_FOLDER
    if not folder.is_dir():
        folder.mkdir(mode=FOLDER_MODE, exist_ok=True)
        sync(folder.parent)
    size = draft.stat().st_size
    now = utc_now()
    expires_at = utc_text(now + timedelta(seconds=expires_s)) if expires_s else None
    row = FileRow(f"file-{secrets.token_hex(12)}", utc_text(now), owner, filename, purpose, size, sha256, expires_at)
    sync(draft)
    os.rename(draft, folder / row.id)
    sync(folder)
    return row


def insert_file(store: Store, row: FileRow, write: Callable[[Database], bool] = lambda _: True) -> bool:
    """Insert the row of a file whose content is placed, where `write` says so, in whose transaction it is.

    Else the content is removed. Returns whether it was inserted. Raises StoreError.
    """

    def insert(db: Database) -> bool:
        wanted = write(db)
        if wanted:
            insert_row(db, "files", asdict(row))
        return wanted

    wanted = False
    try:
        wanted = store.write(insert).result()
    finally:
        if not wanted:
            remove_content(store, row.id)
    return wanted


def keep_file(
    store: Store, owner: str, filename: str, purpose: str, draft: Path, sha256: str, expires_s: int = 0
) -> FileRow:
    """Make a file of a draft in the data folder: both are on disk then. Raises StoreError, and OSError."""
    row = place_file(store, owner, filename, purpose, draft, sha256, expires_s)
    insert_file(store, row)
    return row


def find_file(db: Database, file_id: str) -> FileRow | None:
    """Return a file by its id; None where there is none."""
    row = next(db.query("SELECT * FROM files WHERE id = ?", [file_id]), None)
    return FileRow(**row) if row else None


def list_files(
    db: Database, owner: str | None, after: str = "", most: int = -1, purpose: str | None = None, oldest: bool = False
) -> list[FileRow]:
    """Return up to `most` files (-1: all; of one owner, or purpose), newest or `oldest` first, beyond that `after`."""
    later, order = (">", "ASC") if oldest else ("<", "DESC")
    sql = f"""SELECT * FROM files WHERE (:owner IS NULL OR owner = :owner) AND (:purpose IS NULL OR purpose = :purpose)
              AND (:after = '' OR rowid {later} (SELECT rowid FROM files WHERE id = :after))
              ORDER BY rowid {order} LIMIT :most"""
    values = {"owner": owner, "purpose": purpose, "after": after, "most": most}
    return [FileRow(**row) for row in db.query(sql, values)]


def file_ids_of_user(db: Database, name: str) -> list[str]:
    """Return the ids of a user's files, and of those that jobs made of the user's adapter."""
    made = "SELECT result_file FROM jobs WHERE adapter = :name"
    return first_column(db, f"SELECT id FROM files WHERE owner = :name OR id IN ({made})", {"name": name})


def stored_files_of(db: Database, owner: str) -> tuple[int, int]:
    """Return (how many files an owner has uploaded, bytes of all the owner's files)."""
    sql = "SELECT count(*) FILTER (WHERE purpose = 'fine-tune'), coalesce(sum(bytes), 0) FROM files WHERE owner = ?"
    count, size = db.execute(sql, [owner]).fetchone()
    return count, size


def delete_file(store: Store, file_id: str) -> str:
    """Delete a file; returns the id of an open job that needs it, "" where it is deleted. Raises StoreError.

    Content that could not be deleted is left to `sweep_files`.
    """

    def delete(db: Database) -> str:
        sql = f"SELECT id FROM jobs WHERE ? IN (training_file, validation_file) AND {IS_OPEN}"
        needed = first_value(db, sql, [file_id])
        if not needed:
            db.execute("DELETE FROM files WHERE id = ?", [file_id])
            db.execute("UPDATE jobs SET result_file = NULL WHERE result_file = ?", [file_id])
        return needed or ""

    needed = store.write(delete).result()
    if not needed:
        with suppress(OSError):
            remove_content(store, file_id)
    return needed


def delete_expired_files(store: Store) -> int:
    """Delete the files that have expired and that no open job needs; returns how many. Raises StoreError."""
    expired = "SELECT id FROM files WHERE expires_at <= ?"
    file_ids = store.read(lambda db: first_column(db, expired, [utc_text(utc_now())]))
    return sum(not delete_file(store, file_id) for file_id in file_ids)


def move_expiry(store: Store, begun: datetime, ended: datetime, by: timedelta) -> None:
    """Move the expiry of files that were made from `begun` to `ended`, by a clock that was set then.

    Raises StoreError.
    """

    def move(db: Database) -> None:
        sql = "SELECT id, expires_at FROM files WHERE expires_at IS NOT NULL AND created_at BETWEEN ? AND ?"
        for file_id, expires_at in db.execute(sql, [utc_text(begun), utc_text(ended)]).fetchall():
            moved = utc_text(datetime.fromisoformat(expires_at) + by)
            db.execute("UPDATE files SET expires_at = ? WHERE id = ?", [moved, file_id])

    store.write(move).result()


def sweep_files(store: Store) -> None:
    """Remove what no row of `files` names from their folder; nobody is uploading. Raises OSError."""
    known = set(store.read(lambda db: first_column(db, "SELECT id FROM files")))
    for path in (store.path.parent / FILES_FOLDER).glob("*"):
        if path.name not in known and not path.is_dir():
            path.unlink()
