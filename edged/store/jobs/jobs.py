"""The tables `jobs`, `job_events` and `job_checkpoints`: fine-tuning jobs, what they report, and what they keep."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from sqlite_utils import Database

from edged.store.rows import NAMED, first_column, first_value, insert_row, update_rows

OPEN = ("validating_files", "queued", "running")
"""Statuses of jobs that have not ended."""
IS_OPEN = f"status IN {OPEN}"
FILES = ("training_file", "validation_file")
"""Columns with the ids of a job's files."""
_CHECKPOINTS = "job_checkpoints AS kept JOIN jobs ON jobs.id = job_id"
_KEPT_CHECKPOINTS = 3
"""Newest checkpoints of a job, which answer; the names of older ones stay taken."""
_LATEST_EVENTS = 64
"""Events of a job among which no message stands twice."""
_KEPT = 20
"""Ended jobs of one owner that never began and are kept."""


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
    paused: int = 0
    trained_tokens: int | None = None
    """Tokens that the steps of an ended job have trained on."""
    finished_at: str | None = None
    error_code: str | None = None
    error: str | None = None
    error_param: str | None = None
    result_file: str | None = None
    validation_file: str | None = None
    paused_at: int | None = None
    """Number of steps that it had taken when it was paused; None since it goes on."""
    other_steps: int = 0
    """AdamW's steps that others' pairs took while it was paused."""


@dataclass(frozen=True, slots=True)
class JobAdapters:
    """Adapters that fine-tuning jobs made or make."""

    owners: Mapping[str, str] = field(default_factory=dict)
    """The owners of those whose names begin with their owners' own."""
    checkpoints: Mapping[str, str] = field(default_factory=dict)
    """The jobs' owners of all checkpoints ADAPTER@STEP, also retired ones; who speaks for ADAPTER speaks for them."""

    def owner(self, adapter: str) -> str:
        """Return the owner of an adapter or of a checkpoint; "" where no job's owner is it."""
        return self.checkpoints.get(adapter) or self.owners.get(adapter, "")


NO_ADAPTERS = JobAdapters()


@dataclass(frozen=True, slots=True)
class JobEvent:
    """A line of a job's report: a message, of which `data` is empty, or the metrics of a `step` in `data`."""

    id: int
    created_at: str
    level: str
    message: str
    step: int | None
    data: dict[str, Any]


def insert_job(db: Database, job: JobRow) -> None:
    """Add a job; the owner's oldest ones that ended before they began go."""
    insert_row(db, "jobs", asdict(job))
    old = f"""SELECT id FROM jobs WHERE owner = ? AND examples = 0 AND NOT {IS_OPEN}
              ORDER BY rowid DESC LIMIT -1 OFFSET {_KEPT}"""
    db.execute(f"DELETE FROM job_events WHERE job_id IN ({old})", [job.owner])
    db.execute(f"DELETE FROM jobs WHERE id IN ({old})", [job.owner])


def find_job(db: Database, job_id: str) -> JobRow | None:
    """Return a job by its id; None where there is none."""
    return next(_jobs(db, "id = :id", {"id": job_id}), None)


def list_jobs(
    db: Database, owner: str | None, after: str, most: int, metadata: Mapping[str, str] | None = None
) -> list[JobRow]:
    """Return up to `most` jobs (of one owner) that have this metadata, newest first, from that `after` a job on."""
    wanted = "SELECT 1 FROM json_each(:wanted) AS wanted WHERE NOT EXISTS"
    has = "SELECT 1 FROM json_each(jobs.metadata) AS had WHERE had.key = wanted.key AND had.value = wanted.value"
    values = {"owner": owner, "after": after, "wanted": json.dumps(dict(metadata or {}))}
    these = "(:owner IS NULL OR owner = :owner) AND (:after = '' OR rowid < (SELECT rowid FROM jobs WHERE id = :after))"
    return list(_jobs(db, f"{these} AND NOT EXISTS ({wanted} ({has}))", values, f"DESC LIMIT {most}"))


def open_jobs(db: Database, base: str) -> list[JobRow]:
    """Return the open jobs of a base, oldest first."""
    return list(_jobs(db, f"{IS_OPEN} AND base = :base", {"base": base}))


def open_jobs_of_users(db: Database, *names: str) -> list[JobRow]:
    """Return the open jobs of users, or that make a user's adapter or begin with it."""
    theirs = " OR ".join(f"{column} IN {NAMED}" for column in ("owner", "adapter", "parent"))
    return list(_jobs(db, f"({theirs}) AND {IS_OPEN}", {"names": json.dumps(names)}))


def open_job_of(db: Database, adapter: str, base: str = "") -> str:
    """Return the id of the open job (of a `base`, one that is not paused) that makes an adapter; "" for none."""
    sql = f"SELECT id FROM jobs WHERE adapter = ? AND {IS_OPEN} AND (? = '' OR base = ? AND NOT paused)"
    return first_value(db, sql, [adapter, base, base]) or ""


def came_since(db: Database, adapter: str, moment: str) -> bool:
    """Whether a job that makes an adapter came at a moment (ISO, UTC) or later."""
    return bool(first_value(db, "SELECT count(*) FROM jobs WHERE adapter = ? AND created_at >= ?", [adapter, moment]))


def count_jobs(db: Database, owner: str) -> tuple[int, int]:
    """Return the numbers of an owner's open jobs, and of those that began or may begin."""
    sql = f"SELECT count(*) FILTER (WHERE {IS_OPEN}), count(*) FROM jobs WHERE owner = ? AND (examples OR {IS_OPEN})"
    return db.execute(sql, [owner]).fetchone()


def count_by_status(db: Database) -> dict[str, int]:
    """Return the number of jobs of each status."""
    counts = dict(db.execute("SELECT status, count(*) FROM jobs GROUP BY status").fetchall())
    return {status: counts.get(status, 0) for status in (*OPEN, "succeeded", "failed", "cancelled")}


def has_user_data(db: Database, name: str) -> bool:
    """Whether anything is stored for a user of this name, who may have asked or rated through whatever adapter."""
    tables = ("pairs", "completions", "adapter_versions", "job_checkpoints")
    places = [*(f"{table} WHERE adapter" for table in tables), "completions WHERE user", "signals WHERE user"]
    return any(first_value(db, f"SELECT 1 FROM {place} = ? LIMIT 1", [name]) for place in places)


def name_prefix(owner: str) -> str:
    """Return the beginning of the names that are an owner's for the adapters of its jobs.

    One for whom an ingress asks has a mark of its own: others may have the same name on this box.
    """
    _, through, last = owner.rpartition("/")
    name = last.removeprefix("token:")
    mark = f".{hashlib.sha256(owner.encode()).hexdigest()[:6]}" if through else ""
    return f"{'job' if ':' in name else name[:40]}{mark}-"


def job_adapters(db: Database) -> JobAdapters:
    """Return the adapters that open jobs make, and that ended ones have taught, with the jobs' checkpoints.

    A job's adapter of another name than its owner's own is the owner's only as long as [access] says so.
    """
    taught = f"{IS_OPEN} OR status = 'succeeded' OR trained_tokens > 0"
    made = db.execute(f"SELECT adapter, owner FROM jobs WHERE {taught} ORDER BY rowid")
    owners = {adapter: owner for adapter, owner in made if adapter.startswith(name_prefix(owner))}
    return JobAdapters(owners, dict(db.execute(f"SELECT kept.adapter, owner FROM {_CHECKPOINTS}").fetchall()))


def update_job(db: Database, job_id: str, **columns: Any) -> bool:
    """Set columns of an open job; returns whether it is open."""
    is_open = first_value(db, f"SELECT 1 FROM jobs WHERE id = ? AND {IS_OPEN}", [job_id]) is not None
    if is_open:
        update_rows(db, "jobs", columns, id=job_id)
    return is_open


def _jobs(db: Database, where: str, values: Mapping[str, Any], rest: str = "") -> Any:
    for row in db.query(f"SELECT * FROM jobs WHERE {where} ORDER BY rowid {rest}", values):
        yield JobRow(**row | {name: json.loads(row[name]) for name in ("hyperparameters", "metadata")})


def add_event(
    db: Database,
    created_at: str,
    job_id: str,
    message: str,
    level: str = "info",
    step: int | None = None,
    data: Mapping[str, Any] | None = None,
) -> None:
    """Add an event of a job, unless the job was forgotten; one of a `step` has its metrics in `data`.

    A message takes the place of the same one among the latest: jobs may be paused and resumed without end.
    """
    if step is None:
        latest = f"SELECT * FROM job_events WHERE job_id = ? ORDER BY id DESC LIMIT {_LATEST_EVENTS}"
        same = f"SELECT id FROM ({latest}) WHERE message = ? AND step IS NULL"
        db.execute(f"DELETE FROM job_events WHERE id IN ({same})", [job_id, message])
    row = {"created_at": created_at, "job_id": job_id, "level": level, "message": message, "step": step}
    condition = "EXISTS (SELECT 1 FROM jobs WHERE id = :job_id)"
    insert_row(db, "job_events", row | {"data": dict(data or {})}, condition=condition)


def record_step(db: Database, created_at: str, step: Mapping[str, Any]) -> None:
    """Add the event of a job's step (keys: the fields of its record)."""
    if step["error"]:
        return
    figures = {name: step[name] for name in ("step", "total_steps", "learning_rate", "tokens")}
    figures |= {"train_loss": step["loss"], "trained_tokens": trained_tokens(db, step["job_id"]) + step["tokens"]}
    figures["tokens_per_s"] = step["tokens"] / max(step["seconds"], 1e-9)
    message = f"step {step['step']} of {step['total_steps']}: training loss {step['loss']:.4f}"
    add_event(db, created_at, step["job_id"], message, step=step["step"], data=figures)


def record_validation(db: Database, created_at: str, job_id: str, figures: Mapping[str, Any]) -> None:
    """Add the event of the loss of validation examples after a step."""
    message = f"step {figures['step']} of {figures['total_steps']}: validation loss {figures['valid_loss']:.4f}"
    if "full_valid_loss" in figures:
        message += f", full validation loss {figures['full_valid_loss']:.4f}"
    add_event(db, created_at, job_id, message, step=figures["step"], data=figures)


def is_validated(db: Database, job_id: str, step: int) -> bool:
    """Whether the loss of a job's validation examples after a step was reported."""
    sql = "SELECT 1 FROM job_events WHERE job_id = ? AND step = ? AND json_extract(data, '$.valid_loss') IS NOT NULL"
    return first_value(db, sql, [job_id, step]) is not None


def list_events(db: Database, job_id: str, before: int, most: int) -> list[JobEvent]:
    """Return up to `most` of a job's events, newest first, from that `before` an event's id on."""
    sql = "SELECT id, created_at, level, message, step, data FROM job_events WHERE job_id = ? AND id < ?"
    rows = db.query(f"{sql} ORDER BY id DESC LIMIT {most}", [job_id, before])
    return [JobEvent(**row | {"data": json.loads(row["data"])}) for row in rows]


def metrics_after(db: Database, job_id: str, step: int, most: int) -> list[dict[str, Any]]:
    """Return the metrics of up to `most` steps after `step`, in their order."""
    sql = "SELECT json_group_array(json(data)) FROM job_events WHERE job_id = ? AND step > ?"
    steps = db.execute(f"{sql} AND data != '{{}}' GROUP BY step LIMIT ?", [job_id, step, most])
    return [{name: value for part in json.loads(parts) for name, value in part.items()} for (parts,) in steps]


def last_step(db: Database, job_id: str) -> int:
    """Return the latest step of a job that was taken; 0 before the first one."""
    trained = "json_extract(data, '$.train_loss') IS NOT NULL"
    return first_value(db, f"SELECT max(step) FROM job_events WHERE job_id = ? AND {trained}", [job_id]) or 0


def drop_later_steps(db: Database, job_id: str, step: int) -> None:
    """Delete the metrics of steps after `step`, which were lost and are taken again."""
    db.execute("DELETE FROM job_events WHERE job_id = ? AND step > ? AND data != '{}'", [job_id, step])


def trained_tokens(db: Database, job_id: str) -> int:
    """Return the number of tokens that a job's steps have trained on."""
    tokens = "json_extract(data, '$.trained_tokens')"
    last = f"SELECT {tokens} FROM job_events WHERE job_id = ? AND step > 0 AND {tokens} ORDER BY step DESC LIMIT 1"
    return first_value(db, last, [job_id]) or 0


# -- checkpoints -----------------------------------------------------------------------------------------------------


def keep_checkpoint(db: Database, created_at: str, job_id: str, step: int, adapter: str, free: bool) -> bool:
    """Add an adapter as a job's checkpoint after a step, where its name is `free`, and that one was not forgotten;
    returns whether it is that."""
    if free and not (was_forgotten(db, job_id, step) or has_user_data(db, adapter) or open_job_of(db, adapter)):
        row = {"adapter": adapter, "job_id": job_id, "step": step, "created_at": created_at}
        insert_row(db, "job_checkpoints", row, condition="EXISTS (SELECT 1 FROM jobs WHERE id = :job_id)")
    return checkpoint_of(db, adapter) == job_id


def was_forgotten(db: Database, job_id: str, step: int) -> bool:
    """Whether a job's checkpoint after a step was forgotten: only of that a step has a message without metrics."""
    sql = "SELECT 1 FROM job_events WHERE job_id = ? AND step = ? AND data = '{}'"
    return first_value(db, sql, [job_id, step]) is not None


def checkpoint_of(db: Database, adapter: str) -> str:
    """Return the id of the job of which an adapter is, or was, a checkpoint; "" where it is none."""
    return first_value(db, "SELECT job_id FROM job_checkpoints WHERE adapter = ?", [adapter]) or ""


def checkpoints(db: Database, job_id: str) -> list[tuple[int, str, str]]:
    """Return (step, adapter, when it was made) of a job's checkpoints, newest first, also of retired ones."""
    sql = "SELECT step, adapter, created_at FROM job_checkpoints WHERE job_id = ? ORDER BY step DESC"
    return db.execute(sql, [job_id]).fetchall()


def old_checkpoints(db: Database, job_id: str) -> list[str]:
    """Return the checkpoints that a job need not keep: beyond the newest, but for those that open jobs begin with."""
    old = f"SELECT adapter FROM job_checkpoints WHERE job_id = ? ORDER BY step DESC LIMIT -1 OFFSET {_KEPT_CHECKPOINTS}"
    return first_column(db, f"SELECT * FROM ({old}) EXCEPT SELECT parent FROM jobs WHERE {IS_OPEN}", [job_id])


def checkpoints_of_user(db: Database, name: str) -> list[str]:
    """Return the adapters that are or were checkpoints of a user's jobs, or of those that made the user's adapter."""
    return first_column(db, f"SELECT kept.adapter FROM {_CHECKPOINTS} WHERE ? IN (owner, jobs.adapter)", [name])
