"""The tables `files`, `jobs` and `job_events`: uploaded files, fine-tuning jobs and what they report."""

import json
import os
import secrets
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sqlite_utils import Database

from edged.store.data_dir import FILES_FOLDER, sync
from edged.store.database import FOLDER_MODE, Store
from edged.store.rows import first_column, first_value, insert_row, update_rows
from edged.store.timestamps import utc_now, utc_text

OPEN = ("validating_files", "queued", "running")
"""Statuses of jobs that have not ended."""
_OPEN = f"status IN {OPEN}"


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


@dataclass(frozen=True, slots=True)
class JobRow:
    """A fine-tuning job of `owner` that makes `adapter`, beginning with the weights of `parent` ("": from nothing)."""

    id: str
    created_at: str
    owner: str
    base: str
    """The base model's fingerprint: a job waits while another base is served."""
    model: str
    """The model as the job named it."""
    parent: str
    adapter: str
    method: str
    hyperparameters: dict[str, Any]
    seed: int
    training_file: str
    metadata: dict[str, str]
    status: str = "validating_files"
    examples: int = 0
    """Number of examples; 0 before they are checked."""
    finished_at: str | None = None
    error_code: str | None = None
    error: str | None = None
    error_param: str | None = None
    result_file: str | None = None


@dataclass(frozen=True, slots=True)
class JobEvent:
    """A line of a job's report: a message, or the metrics of a step in `data`."""

    id: int
    created_at: str
    level: str
    message: str
    type: str
    data: dict[str, Any]


# -- files -------------------------------------------------------------------------------------------------------------


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
    needed = first_value(db, f"SELECT id FROM jobs WHERE training_file = ? AND {_OPEN}", [file_id])
    if not needed:
        db.execute("DELETE FROM files WHERE id = ?", [file_id])
    return needed or ""


def sweep_files(db: Database, folder: Path) -> None:
    """Remove what no row of `files` names from their folder; nobody is uploading."""
    known = set(first_column(db, "SELECT id FROM files"))
    for path in folder.glob("*"):
        if path.name not in known:
            path.unlink()


# -- jobs --------------------------------------------------------------------------------------------------------------


def insert_job(db: Database, job: JobRow) -> None:
    """Add a job."""
    row = asdict(job) | {name: json.dumps(getattr(job, name)) for name in ("hyperparameters", "metadata")}
    insert_row(db, "jobs", row)


def find_job(db: Database, job_id: str) -> JobRow | None:
    """Return a job by its id; None where there is none."""
    row = next(db.query("SELECT * FROM jobs WHERE id = ?", [job_id]), None)
    return _job(row) if row else None


def list_jobs(db: Database, owner: str | None = None) -> list[JobRow]:
    """Return the jobs (of one owner), newest first."""
    sql = "SELECT * FROM jobs WHERE :owner IS NULL OR owner = :owner ORDER BY rowid DESC"
    return [_job(row) for row in db.query(sql, {"owner": owner})]


def next_job(db: Database, base: str, but: Collection[str] = ()) -> JobRow | None:
    """Return the oldest open job of a base, `but` these; None where there is none."""
    sql = f"""SELECT * FROM jobs WHERE {_OPEN} AND base = ? AND id NOT IN (SELECT value FROM json_each(?))
              ORDER BY rowid LIMIT 1"""
    row = next(db.query(sql, [base, json.dumps(list(but))]), None)
    return _job(row) if row else None


def open_job_of(db: Database, adapter: str) -> str:
    """Return the id of the open job that makes an adapter; "" where there is none."""
    return first_value(db, f"SELECT id FROM jobs WHERE adapter = ? AND {_OPEN}", [adapter]) or ""


def count_open(db: Database) -> int:
    """Return the number of open jobs."""
    return int(first_value(db, f"SELECT count(*) FROM jobs WHERE {_OPEN}"))


def update_job(db: Database, job_id: str, **columns: Any) -> bool:
    """Set columns of an open job; returns whether it is open."""
    is_open = first_value(db, f"SELECT 1 FROM jobs WHERE id = ? AND {_OPEN}", [job_id]) is not None
    if is_open:
        stored = {name: json.dumps(value) if isinstance(value, dict) else value for name, value in columns.items()}
        update_rows(db, "jobs", stored, id=job_id)
    return is_open


def jobs_about(db: Database, name: str) -> list[JobRow]:
    """Return the open jobs of a user, or that make the user's adapter."""
    sql = f"SELECT * FROM jobs WHERE (owner = :name OR adapter = :name) AND {_OPEN}"
    return [_job(row) for row in db.query(sql, {"name": name})]


def _job(row: dict[str, Any]) -> JobRow:
    return JobRow(**row | {name: json.loads(row[name]) for name in ("hyperparameters", "metadata")})


# -- events ------------------------------------------------------------------------------------------------------------


def add_event(
    db: Database, created_at: str, job_id: str, message: str, level: str = "info", data: Mapping[str, Any] | None = None
) -> None:
    """Add an event of a job, unless the job was forgotten; one with `data` has a step's metrics."""
    row = {"created_at": created_at, "job_id": job_id, "level": level, "message": message}
    row |= {"type": "metrics" if data else "message", "data": json.dumps(dict(data or {}))}
    insert_row(db, "job_events", row, condition="EXISTS (SELECT 1 FROM jobs WHERE id = :job_id)")


def record_step(db: Database, created_at: str, step: Mapping[str, Any]) -> None:
    """Add the event of a job's step (keys: the fields of its record)."""
    if step["error"]:
        return
    figures = {"step": step["step"], "train_loss": step["loss"], "tokens": step["tokens"]}
    figures |= {"tokens_per_s": step["tokens"] / max(step["seconds"], 1e-9), "learning_rate": step["learning_rate"]}
    message = f"step {step['step']}: training loss {step['loss']:.4f}"
    add_event(db, created_at, step["job_id"], message, data=figures)


def list_events(db: Database, job_id: str) -> list[JobEvent]:
    """Return a job's events, newest first."""
    sql = "SELECT id, created_at, level, message, type, data FROM job_events WHERE job_id = ? ORDER BY id DESC"
    return [JobEvent(**row | {"data": json.loads(row["data"])}) for row in db.query(sql, [job_id])]


def drop_later_metrics(db: Database, job_id: str, step: int) -> None:
    """Delete the metrics of steps after `step`, which were lost and are taken again."""
    later = "job_id = ? AND type = 'metrics' AND json_extract(data, '$.step') > ?"
    db.execute(f"DELETE FROM job_events WHERE {later}", [job_id, step])


def trained_tokens(db: Database, job_id: str) -> int:
    """Return the number of tokens that a job's steps have trained on."""
    total = "SELECT coalesce(sum(json_extract(data, '$.tokens')), 0) FROM job_events WHERE job_id = ?"
    return int(first_value(db, total, [job_id]))
