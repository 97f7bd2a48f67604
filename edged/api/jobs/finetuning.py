"""`/v1/fine_tuning/jobs`: create, list, cancel and watch fine-tuning jobs."""

import asyncio
import secrets
from typing import Any

from aiohttp import web
from sqlite_utils import Database

from edged.api.access import Caller, caller_of
from edged.api.errors import ApiError, bad_request
from edged.api.jobs.bodies import EventList, Job, JobError, JobList, JobReport, JobRequest
from edged.api.jobs.files import demand_enabled, found_file, listed, owner_of, owns, shown_id, unix_s
from edged.api.models import split_model
from edged.api.requests import read_body
from edged.api.services import Services, services_of
from edged.settings.load import USER_NAME
from edged.store import utc_now, utc_text
from edged.store.jobs import files, jobs

MOST_LISTED = 100


async def create(request: web.Request) -> Job:
    """Make an adapter of a file of examples.

    The job waits for those before it, and learns when nobody's own pairs wait. `fine_tuned_model` is BASE:SUFFIX.
    """
    services, caller = services_of(request), caller_of(request)
    body = await read_body(request, JobRequest.checked)
    demand_enabled(services)
    method, hyperparameters = body.learned_by()
    if body.integrations:
        raise bad_request("integrations are not supported: leave them out", "integrations")
    if body.validation_file:
        raise bad_request("a validation file is not supported: leave it out", "validation_file")
    model, parent = split_model(services, body.model)
    caller.demand_user(parent)
    if parent is not None and not services.engine.version(parent):
        raise ApiError(404, f'model "{model}" has learned nothing: name "{services.model}"', "model", "model_not_found")
    file = await asyncio.to_thread(found_file, request, body.training_file, "training_file")
    if file.purpose != "fine-tune":
        raise bad_request(f'file "{file.id}" is of purpose "{file.purpose}"', "training_file")
    job_id = f"ftjob-{secrets.token_hex(12)}"
    adapter = body.suffix or _default_name(caller, job_id)
    if not USER_NAME.fullmatch(adapter):
        raise bad_request(
            f'suffix "{adapter}" cannot name an adapter: use letters, digits, ".", "_", "@", "-"', "suffix"
        )
    caller.demand_user(adapter)
    if services.engine.version(adapter) is not None:
        raise _taken(f'adapter "{adapter}" exists: give another suffix')
    seed = secrets.randbelow(2**31) if body.seed is None else body.seed
    about = (services.feedback_intake.ref_model, model, parent or "", adapter, method, hyperparameters, seed)
    now = utc_text(utc_now())
    row = jobs.JobRow(job_id, now, caller.tenant, *about, file.id, body.metadata or {})
    await asyncio.wrap_future(services.store.write(lambda db: _insert(db, row, services.settings.jobs.max_waiting)))
    services.job_runner.run_soon()
    return await _shown(services, row)


def _insert(db: Database, row: jobs.JobRow, most: int) -> None:
    """Add a job. Raises ApiError where its adapter is taken, its file is gone, or too many jobs wait."""
    if other := jobs.open_job_of(db, row.adapter):
        raise _taken(f'job "{other}" makes adapter "{row.adapter}": give another suffix')
    if files.find_file(db, row.training_file) is None:
        raise ApiError(404, f'file "{row.training_file}" was deleted', "training_file", "unknown_file")
    if jobs.count_open(db) >= most:
        raise ApiError(429, f"{most} jobs wait or run (jobs.max_waiting)", code="too_many_jobs", retry_after_s=60.0)
    jobs.insert_job(db, row)
    jobs.add_event(db, row.created_at, row.id, f"Created fine-tuning job: {row.id}")


def _taken(message: str) -> ApiError:
    return ApiError(409, message, "suffix", "suffix_taken")


def _default_name(caller: Caller, job_id: str) -> str:
    name = caller.name if USER_NAME.fullmatch(caller.name) else "job"
    return f"{name[:40]}-{job_id.removeprefix('ftjob-')[:12]}"


async def list_jobs(request: web.Request) -> JobList:
    """Jobs, newest first.

    The caller's own; an admin's are all. `?metadata[KEY]=VALUE` chooses among them.
    """
    services, caller = services_of(request), caller_of(request)
    rows = await asyncio.to_thread(services.store.read, lambda db: jobs.list_jobs(db, owner_of(caller)))
    for name, value in request.query.items():
        if name.startswith("metadata[") and name.endswith("]"):
            rows = [row for row in rows if row.metadata.get(name[9:-1]) == value]
    page, more = listed(request, rows, MOST_LISTED)
    return JobList(object="list", data=[await _shown(services, row) for row in page], has_more=more)


async def get_job(request: web.Request) -> Job:
    """One job."""
    return await _shown(services_of(request), await asyncio.to_thread(_found, request))


async def cancel(request: web.Request) -> Job:
    """Cancel a job.

    What it has learned stays: the last version is served as BASE:SUFFIX.
    """
    services, row = services_of(request), await asyncio.to_thread(_found, request)
    if row.status not in jobs.OPEN:
        raise bad_request(f'job "{row.id}" has {row.status}: there is nothing to cancel', "id")
    # Shielded from the client's disconnect: it is half cancelled.
    await asyncio.shield(asyncio.wrap_future(services.job_runner.end(row)))
    return await get_job(request)


async def events(request: web.Request) -> EventList:
    """The report of a job, newest first.

    Events of type "metrics" have a step's loss.
    """
    services, row = services_of(request), await asyncio.to_thread(_found, request)
    rows = await asyncio.to_thread(services.store.read, lambda db: jobs.list_events(db, row.id))
    page, more = listed(request, rows, MOST_LISTED)
    return EventList(object="list", data=[_event(event) for event in page], has_more=more)


def _event(event: jobs.JobEvent) -> JobReport:
    about: dict[str, Any] = {"level": event.level, "message": event.message, "type": event.type, "data": event.data}
    created_at = unix_s(event.created_at)
    return JobReport(id=shown_id(event), object="fine_tuning.job.event", created_at=created_at, **about)


def _found(request: web.Request) -> jobs.JobRow:
    """Return a job of the caller's. Raises ApiError (404) for one that is unknown or another's."""
    job_id = request.match_info["id"]
    row = services_of(request).store.read(lambda db: jobs.find_job(db, job_id))
    if row is None or not owns(caller_of(request), row.owner):
        raise ApiError(404, f'job "{job_id[:80]}" does not exist', "id", "unknown_job")
    return row


async def _shown(services: Services, row: jobs.JobRow) -> Job:
    tokens = await asyncio.to_thread(services.store.read, lambda db: jobs.trained_tokens(db, row.id))
    error = None
    if row.error is not None:
        error = JobError(code=row.error_code or "", message=row.error, param=row.error_param)
    done = row.status == "succeeded"
    return Job(
        id=row.id,
        object="fine_tuning.job",
        created_at=unix_s(row.created_at),
        finished_at=unix_s(row.finished_at) if row.finished_at else None,
        estimated_finish=None,
        model=row.model,
        fine_tuned_model=f"{services.model}:{row.adapter}" if done else None,
        organization_id="",
        status=row.status,
        error=error,
        hyperparameters=row.hyperparameters,
        method={"type": row.method, row.method: {"hyperparameters": row.hyperparameters}},
        seed=row.seed,
        trained_tokens=tokens if row.finished_at else None,
        training_file=row.training_file,
        validation_file=None,
        result_files=[row.result_file] if row.result_file else [],
        integrations=[],
        metadata=row.metadata,
    )
