"""The tables `jobs` and `job_events`: fine-tuning jobs and what they report."""

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from sqlite_utils import Database

from edged.store.rows import first_value, insert_row, update_rows

OPEN = ("validating_files", "queued", "running")
"""Statuses of jobs that have not ended."""
IS_OPEN = f"status IN {OPEN}"


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
    sql = f"""SELECT * FROM jobs WHERE {IS_OPEN} AND base = ? AND id NOT IN (SELECT value FROM json_each(?))
              ORDER BY rowid LIMIT 1"""
    row = next(db.query(sql, [base, json.dumps(list(but))]), None)
    return _job(row) if row else None


def open_job_of(db: Database, adapter: str) -> str:
    """Return the id of the open job that makes an adapter; "" where there is none."""
    return first_value(db, f"SELECT id FROM jobs WHERE adapter = ? AND {IS_OPEN}", [adapter]) or ""


def count_open(db: Database) -> int:
    """Return the number of open jobs."""
    return int(first_value(db, f"SELECT count(*) FROM jobs WHERE {IS_OPEN}"))


def update_job(db: Database, job_id: str, **columns: Any) -> bool:
    """Set columns of an open job; returns whether it is open."""
    is_open = first_value(db, f"SELECT 1 FROM jobs WHERE id = ? AND {IS_OPEN}", [job_id]) is not None
    if is_open:
        stored = {name: json.dumps(value) if isinstance(value, dict) else value for name, value in columns.items()}
        update_rows(db, "jobs", stored, id=job_id)
    return is_open


def jobs_about(db: Database, name: str) -> list[JobRow]:
    """Return the open jobs of a user, or that make the user's adapter or begin with it."""
    sql = f"SELECT * FROM jobs WHERE (owner = :name OR :name IN (adapter, parent)) AND {IS_OPEN}"
    return [_job(row) for row in db.query(sql, {"name": name})]


def _job(row: dict[str, Any]) -> JobRow:
    return JobRow(**row | {name: json.loads(row[name]) for name in ("hyperparameters", "metadata")})


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
