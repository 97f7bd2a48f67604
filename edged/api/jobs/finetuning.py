"""`/v1/fine_tuning/jobs`: create, list, cancel and watch fine-tuning jobs."""

import asyncio
import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from aiohttp import web
from sqlite_utils import Database

from edged.api.jobs.bodies import Checkpoint, CheckpointList, EventList, Job, JobError, JobList, JobReport, JobRequest
from edged.api.jobs.files import demand_enabled, found_file, owner_of, owns, queried_id, unix_s
from edged.api.jobs.runner import JobRunner
from edged.api.models import split_model
from edged.api.requests import queried_integer, read_body
from edged.api.services import Services, services_of
from edged.http.access import Caller, caller_of, id_of, matches_user
from edged.http.errors import ApiError, bad_request
from edged.settings.load import USER_NAME, JobSettings
from edged.store import utc_now, utc_text
from edged.store.jobs import files, jobs

MAX_ADAPTERS = 32
"""Most adapters that the jobs of an account may make."""
MAX_LISTED = 100
_AS_STORED = ("id", "model", "hyperparameters", "seed", "trained_tokens", *jobs.FILES, "metadata")
_CHECKPOINT_METRICS = ("step", "train_loss", "valid_loss", "full_valid_loss")
_EVENT = "ftevent-"
"""Beginning of events' ids."""


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
    model, parent = split_model(services, caller, body.model)
    caller.demand_user(parent)
    if parent is not None and not services.engine.version(parent):
        raise ApiError(404, f'model "{model}" has learned nothing: name "{services.model}"', "model", "model_not_found")
    hashes = set[str]()
    for param in jobs.FILES:
        if file_id := getattr(body, param):
            file = await asyncio.to_thread(found_file, request, file_id, param)
            if file.purpose != "fine-tune":
                raise bad_request(f'file "{file.id}" is of purpose "{file.purpose}"', param)
            if file.sha256 in hashes:
                raise bad_request("both files have the same content: give one with other examples", param)
            hashes.add(file.sha256)
    job_id, now = f"ftjob-{secrets.token_hex(12)}", utc_text(utc_now())
    adapter = body.suffix or f"{jobs.name_prefix(caller.tenant)}{job_id.removeprefix('ftjob-')[:12]}"
    if not USER_NAME.fullmatch(adapter):
        raise bad_request(f'suffix "{adapter}" cannot name an adapter: use letters, digits, . _ @ -', "suffix")
    await _demand_name(services, caller, adapter)
    seed = secrets.randbelow(2**31) if body.seed is None else body.seed
    about = (services.feedback_intake.ref_model, model, parent or "", adapter, method, hyperparameters, seed)
    more = (body.training_file, body.metadata or {})
    row = jobs.JobRow(job_id, now, caller.tenant, *about, *more, validation_file=body.validation_file or None)
    # Shielded from the client's disconnect: the runner would not hear of the job.
    await asyncio.shield(asyncio.to_thread(_store_job, services, row))
    return _shown(services, row)


def _store_job(services: Services, row: jobs.JobRow) -> None:
    """Store a job, and have it begun. Raises ApiError, and StoreError."""
    services.store.write(lambda db: _insert(db, row, services.settings.jobs)).result()
    services.job_runner.refresh()
    services.job_runner.run_soon()


def _insert(db: Database, row: jobs.JobRow, settings: JobSettings) -> None:
    """Add a job. Raises ApiError where its adapter is taken, its file is gone, or its owner has too many jobs."""
    if other := jobs.open_job_of(db, row.adapter):
        raise _suffix_taken(f'job "{other}" makes adapter "{row.adapter}": give another suffix')
    if jobs.has_user_data(db, row.adapter):
        raise _suffix_taken(f'"{row.adapter}" is a user of whom answers or pairs are stored: give another suffix')
    for param in jobs.FILES:
        file_id = getattr(row, param)
        if file_id and files.find_file(db, file_id) is None:
            raise ApiError(404, f'file "{file_id}" was deleted', param, "unknown_file")
    waiting, made = jobs.count_jobs(db, row.owner)
    if waiting >= settings.max_waiting:
        told = f"{waiting} of your jobs wait or run, and jobs.max_waiting = {settings.max_waiting}: cancel one"
        raise ApiError(429, told, code="too_many_jobs", retry_after_s=60.0)
    if made >= MAX_ADAPTERS:
        told = f"your jobs made {made} adapters, and {MAX_ADAPTERS} are kept"
        raise ApiError(403, f"{told}: forget one (`edged adapters forget NAME`)", code="too_many_adapters")
    jobs.insert_job(db, row)
    jobs.add_event(db, row.created_at, row.id, f"Created fine-tuning job: {row.id}")


def _suffix_taken(message: str) -> ApiError:
    return ApiError(409, message, "suffix", "suffix_taken")


async def _demand_name(services: Services, caller: Caller, adapter: str) -> None:
    """Raise ApiError where the caller's jobs may not make an adapter of this name.

    They may make those that the caller speaks for, and those that begin with the caller's name, unless somebody else
    is meant by them. The latter are the caller's then, so none of them may be another account's name.
    """
    access, prefix = services.settings.access, jobs.name_prefix(caller.tenant)
    own = adapter.startswith(prefix) and adapter != caller.tenant
    third_party = not caller.speaks_for(adapter) and (
        not own or any(user != "*" and matches_user(user, adapter) for user in access.granted_users)
    )
    if third_party or (own and await asyncio.to_thread(id_of, "user", adapter) is not None):
        told = f'let it begin with "{prefix}" and be no account\'s name, or leave it out'
        raise ApiError(403, f'suffix "{adapter}" is not for {caller.label}: {told}', "suffix", "forbidden_user")
    if services.engine.version(adapter) is not None or adapter in services.engine.adapter_files.left:
        raise _suffix_taken(f'adapter "{adapter}" exists: give another suffix')


async def list_jobs(request: web.Request) -> JobList:
    """Jobs, newest first.

    The caller's own; an admin's are all. `?metadata[KEY]=VALUE` chooses among them.
    """
    services, owner = services_of(request), owner_of(caller_of(request))
    limit, after = _page(request)
    wanted = {name[9:-1]: value for name, value in request.query.items() if name.startswith("metadata[")}
    rows = await asyncio.to_thread(services.store.read, lambda db: jobs.list_jobs(db, owner, after, limit + 1, wanted))
    return JobList(object="list", data=[_shown(services, row) for row in rows[:limit]], has_more=len(rows) > limit)


def _page(request: web.Request) -> tuple[int, str]:
    """Return how many rows are asked for, and after which. Raises ApiError."""
    return queried_integer(request, "limit", 20, 1, MAX_LISTED), queried_id(request)


async def get_job(request: web.Request) -> Job:
    """One job."""
    return _shown(services_of(request), await asyncio.to_thread(_found, request))


async def cancel(request: web.Request) -> Job:
    """Cancel a job, one's own or one that makes an adapter for which the caller speaks.

    What it has learned stays: the last version is served as BASE:SUFFIX.
    """
    return await _changed(request, "cancel", JobRunner.end)


async def pause(request: web.Request) -> Job:
    """Pause a job.

    It keeps its place, and goes on where it was when it is resumed.
    """
    return await _changed(request, "pause", partial(JobRunner.pause, paused=True))


async def resume(request: web.Request) -> Job:
    """Let a paused job go on."""
    return await _changed(request, "resume", partial(JobRunner.pause, paused=False))


async def _changed(request: web.Request, what: str, change: Callable[[JobRunner, jobs.JobRow], None]) -> Job:
    """Change an open job. Raises ApiError."""
    row = await asyncio.to_thread(_found, request, what == "cancel")
    if row.status not in jobs.OPEN:
        raise bad_request(f'job "{row.id}" has {row.status}: there is nothing to {what}', "id")
    services, whose = services_of(request), caller_of(request).tenant
    if what != "cancel":
        services.limits.change(whose)
    services.claim("change", whose)
    changed = asyncio.ensure_future(asyncio.to_thread(change, services.job_runner, row))
    changed.add_done_callback(lambda _: services.free("change", whose))
    # Shielded from the client's disconnect: it is half changed.
    await asyncio.shield(changed)
    row = await asyncio.to_thread(_found, request, what == "cancel")
    if not owns(caller_of(request), row.owner):
        row = replace(row, training_file="", validation_file=None, result_file=None, metadata={}, hyperparameters={})
    return _shown(services, row)


async def events(request: web.Request) -> EventList:
    """The report of a job, newest first.

    Events of type "metrics" have a step's loss.
    """
    services, row = services_of(request), await asyncio.to_thread(_found, request)
    limit, after = _page(request)
    number = after.removeprefix(_EVENT)
    if after and not (number.isascii() and number.isdigit() and len(number) < 19):
        raise bad_request(f'after = "{after[:40]}" is no event\'s id', "after")
    before = int(number) if number else 2**63 - 1
    rows = await asyncio.to_thread(services.store.read, lambda db: jobs.list_events(db, row.id, before, limit + 1))
    return EventList(object="list", data=[_event(event) for event in rows[:limit]], has_more=len(rows) > limit)


def _event(event: jobs.JobEvent) -> JobReport:
    about: dict[str, Any] = {"level": event.level, "message": event.message, "data": event.data}
    about |= {"type": "metrics" if event.data else "message", "created_at": unix_s(event.created_at)}
    return JobReport(id=f"{_EVENT}{event.id}", object="fine_tuning.job.event", **about)


async def checkpoints(request: web.Request) -> CheckpointList:
    """The versions of a job after its epochs that answer, newest first.

    The last three before the end and those that open jobs begin with, each an adapter SUFFIX@STEP, and the result of a
    job that has succeeded.
    """
    services, row = services_of(request), await asyncio.to_thread(_found, request)
    limit, after = _page(request)

    def read(db: Database) -> list[Checkpoint]:
        kept = jobs.checkpoints(db, row.id)
        if row.status == "succeeded":
            kept.insert(0, (services.job_runner.plan(row).steps, row.adapter, row.finished_at or ""))
        return [_checkpoint(db, services, row, each) for each in kept if services.engine.version(each[1]) is not None]

    shown = await asyncio.to_thread(services.store.read, read)
    begin = next((place + 1 for place, each in enumerate(shown) if each.id == after), len(shown) if after else 0)
    return CheckpointList(object="list", data=shown[begin : begin + limit], has_more=len(shown) > begin + limit)


def _checkpoint(db: Database, services: Services, row: jobs.JobRow, kept: tuple[int, str, str]) -> Checkpoint:
    step, adapter, created_at = kept
    known = next((each for each in jobs.metrics_after(db, row.id, step - 1, 1) if each["step"] == step), {"step": step})
    about: dict[str, Any] = {"metrics": {name: known[name] for name in _CHECKPOINT_METRICS if name in known}}
    about |= {"id": f"{row.id.replace('ftjob', 'ftckpt')}-{step}", "fine_tuning_job_id": row.id, "step_number": step}
    about |= {"fine_tuned_model_checkpoint": f"{services.model}:{adapter}", "created_at": unix_s(created_at)}
    return Checkpoint(object="fine_tuning.job.checkpoint", **about)


def _found(request: web.Request, spoken_for: bool = False) -> jobs.JobRow:
    """Return a job of the caller's, or one whose adapter is `spoken_for` by the caller.

    Raises ApiError (404) for one that is unknown or another's.
    """
    caller, job_id = caller_of(request), request.match_info["id"]
    row = services_of(request).store.read(lambda db: jobs.find_job(db, job_id)) if job_id.isascii() else None
    if row is None or not (owns(caller, row.owner) or (spoken_for and caller.speaks_for(row.adapter))):
        raise ApiError(404, f'job "{job_id[:80]}" does not exist', "id", "unknown_job")
    return row


def _shown(services: Services, row: jobs.JobRow) -> Job:
    error = None
    if row.error is not None:
        error = JobError(code=row.error_code or "", message=row.error, param=row.error_param)
    done, pace = row.status == "succeeded", services.job_runner.paces.get(row.id)
    return Job(
        object="fine_tuning.job",
        created_at=unix_s(row.created_at),
        finished_at=unix_s(row.finished_at) if row.finished_at else None,
        estimated_finish=pace.finish_s(time.time()) if pace is not None else None,
        fine_tuned_model=f"{services.model}:{row.adapter}" if done else None,
        organization_id="",
        status="queued" if row.paused and row.finished_at is None else row.status,
        error=error,
        method={"type": row.method, row.method: {"hyperparameters": row.hyperparameters}},
        result_files=[row.result_file] if row.result_file else [],
        integrations=[],
        **{name: getattr(row, name) for name in _AS_STORED},
    )
