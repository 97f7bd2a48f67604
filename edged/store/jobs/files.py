"""The table `files`, and the folder with the content of the files that it names."""

import os
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path

from sqlite_utils import Database

from edged.store.data_dir import FILES_FOLDER, sync
from edged.store.database import FOLDER_MODE, Store
from edged.store.jobs.jobs import IS_OPEN
from edged.store.rows import first_column, first_value, insert_row
from edged.store.timestamps import utc_now, utc_text


@dataclass(frozen=True, slots=True)
class FileRow:
    """A file that `owner` uploaded, or that a job of the owner's made; its content is `files/ID` in the data folder."""

    id: str
    created_at: str
    owner: str
    filename: str
    purpose: str
    bytes: int
    sha256: str


def keep_file(store: Store, owner: str, filename: str, purpose: str, draft: Path, sha256: str) -> FileRow:
    """Make a file of a draft in the data folder: both are on disk then. Raises StoreError, and OSError."""
    folder = store.path.parent / FILES_FOLDER
    if not folder.is_dir():
        folder.mkdir(mode=FOLDER_MODE)
        sync(folder.parent)
    size = draft.stat().st_size
    row = FileRow(f"file-{secrets.token_hex(12)}", utc_text(utc_now()), owner, filename, purpose, size, sha256)
    sync(draft)
    os.rename(draft, folder / row.id)
    sync(folder)
    try:
        store.write(lambda db: insert_row(db, "files", asdict(row))).result()
    except BaseException:
        (folder / row.id).unlink()
        raise
    return row


def find_file(db: Database, file_id: str) -> FileRow | None:
    """Return a file by its id; None where there is none."""
    row = next(db.query("SELECT * FROM files WHERE id = ?", [file_id]), None)
    return FileRow(**row) if row else None


def list_files(db: Database, owner: str | None = None) -> list[FileRow]:
    """Return the files (of one owner), newest first."""
    sql = "SELECT * FROM files WHERE :owner IS NULL OR owner = :owner ORDER BY rowid DESC"
    return [FileRow(**row) for row in db.query(sql, {"owner": owner})]


def file_bytes_of(db: Database, owner: str) -> int:
    """Return the bytes of an owner's files."""
    return int(first_value(db, "SELECT coalesce(sum(bytes), 0) FROM files WHERE owner = ?", [owner]))


def delete_file(db: Database, file_id: str) -> str:
    """Delete a file's row; returns the id of an open job that needs it, "" where it is deleted."""
    needed = first_value(db, f"SELECT id FROM jobs WHERE training_file = ? AND {IS_OPEN}", [file_id])
    if not needed:
        db.execute("DELETE FROM files WHERE id = ?", [file_id])
    return needed or ""


def sweep_files(db: Database, folder: Path) -> None:
    """Remove what no row of `files` names from their folder; nobody is uploading."""
    known = set(first_column(db, "SELECT id FROM files"))
    for path in folder.glob("*"):
        if path.name not in known:
            path.unlink()
