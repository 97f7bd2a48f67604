"""`GET /v1/status`, `/healthz`, `/readyz`: the daemon's status, and probes for a supervisor."""

import asyncio
import time

from aiohttp import web

import edged
from edged.api.responses import Health, Ready
from edged.api.services import LIFECYCLE, Lifecycle, Services, services_of
from edged.http.access import Caller, caller_of
from edged.http.errors import ApiError
from edged.http.json_format import Json
from edged.http.sockets import over_tcp
from edged.store import StoreError
from edged.store.quarantine import count_quarantined


async def status(request: web.Request) -> Json:
    """What the daemon does.

    Queues, bins, pages, fine-tuning, device. A caller sees no names but those that it may speak for, and its own.
    """
    caller = caller_of(request)
    body = await asyncio.to_thread(report, request.app[LIFECYCLE], services_of(request), caller.may("admin"))
    return visible(body, caller)


def report(lifecycle: Lifecycle, services: Services, reasons: bool = False) -> Json:
    """Build the status as a JSON object. It reads the database: not for the event loop.

    With `reasons` for which the latest requests or pairs failed, which may have words of users.
    """
    engine, store, problem = services.engine.status(), services.store, ""
    quarantined: int | None = None
    try:
        quarantined = store.read(count_quarantined)
    except StoreError as error:
        problem = str(error)
    problem = store.suspect or store.problem or problem
    degraded = [*engine["degraded"], *([problem] if problem else []), *services.outcomes.problems(reasons)]
    return {
        "version": edged.__version__,
        "verdict": _verdict(services, engine["finetune"], degraded, quarantined),
        "phase": lifecycle.phase,
        "uptime_s": time.monotonic() - lifecycle.opened_s,
        **engine,
        "queue": queue(services),
        "outcomes": {**engine["outcomes"], "refused": refused(services)},
        "degraded": degraded,
        "quarantine": {"pairs": quarantined},
        "forgetting": dict(services.forgetting_stages),
        "open_requests": services.event_router.open_requests,
        "device": services.monitor.read(),
        "governors": services.governors.report,
        "store": services.maintenance.report(),
    }


def _verdict(services: Services, tuning: Json, degraded: list[str], quarantined: int | None) -> str:
    """Sum the state up in one line, such as "healthy, idle, 3 users, nothing held back"."""
    requests, users = services.event_router.open_requests, len(services.engine.adapters())
    doing = [f"{requests} request{'s' * (requests > 1)}"] if requests else []
    doing += ["learning"] if tuning["active_adapters"] else []
    back = [f"{quarantined} pair{'s' * (quarantined > 1)} held"] if quarantined else []
    if not tuning["enabled"] or tuning["held"]:
        back.append("learning held back" if tuning["enabled"] else "learning switched off")
    if holds := services.governors.report.get("memory", {}).get("holds"):
        back.append(f"{', '.join(holds)} held back")
    health = f"not as it should be: {'; '.join(degraded)}" if degraded else "healthy"
    people = f"{users} user{'s' * (users != 1)}"
    return ", ".join([health, " and ".join(doing) or "idle", people, *(back or ["nothing held back"])])


def load(lifecycle: Lifecycle, services: Services) -> Json:
    """Return the load of the engine as an ingress of a fleet reads it."""
    phase = "drained" if lifecycle.drained and lifecycle.phase == "ready" else lifecycle.phase
    told = services.engine.load().model_copy(update={"phase": phase})
    return told.model_copy(update={"waiting": told.waiting + services.admission.waiting}).model_dump()


def queue(services: Services) -> dict[str, int]:
    """Count requests by stage, with those that wait for admission, and pairs that wait for training."""
    counts = services.engine.queue()
    return {**counts, "waiting": counts["waiting"] + services.admission.waiting}


def has_work(services: Services) -> bool:
    """Whether requests or jobs are under way, or pairs wait to be learned; while the database cannot be read, too.

    It reads the database: not for the event loop.
    """
    waiting = queue(services)
    if not services.settings.align.enabled:
        del waiting["finetune"]
    try:
        jobs = services.job_runner.has_open_jobs
    except StoreError:
        return True
    return any(waiting.values()) or bool(services.forgetting or services.busy) or jobs


def refused(services: Services) -> int:
    """The number of requests since start that found the queue full."""
    return services.engine.stats.outcomes["refused"] + services.admission.refused


def visible(body: Json, caller: Caller) -> Json:
    """Return a status with the caller, and without names of adapters that the caller may not speak for."""
    learning, may, sees = body["finetune"], caller.speaks_for, caller.sees
    named: Json = {key: [name for name in learning[key] if may(name)] for key in ("active_adapters", "alarms")}
    named["practising"] = learning["practising"] if may(learning["practising"]) else ""
    forgetting = {name: stage for name, stage in body["forgetting"].items() if may(name)}
    fairness, readers = (
        {**body[part], "users": {name: told for name, told in body[part]["users"].items() if sees(name)}}
        for part in ("fairness", "readers")
    )
    fairness["runs"] = [run for run in fairness["runs"] if sees(run["user"])]
    return {
        **body,
        "caller": {"name": caller.name, "roles": sorted(caller.roles), "users": list(caller.users)},
        "forgetting": forgetting,
        "finetune": {**learning, **named},
        "fairness": fairness,
        "readers": readers,
    }


async def healthz(request: web.Request) -> Health:
    """Whether the process should be left alone.

    200 while it is loading, serving or draining.
    """
    lifecycle = request.app[LIFECYCLE]
    problem = lifecycle.problem()
    if problem and problem.code not in ("loading", "draining"):
        raise problem
    return Health(status="ok", phase=lifecycle.phase)


async def readyz(request: web.Request) -> Ready:
    """Whether completions are served.

    200 when they are, 503 while the model is loading and from SIGTERM on, and over TCP while the node is drained.
    `degraded` tells when none goes well.
    """
    lifecycle = request.app[LIFECYCLE]
    if problem := lifecycle.problem():
        raise problem
    if lifecycle.drained and over_tcp(request):
        raise ApiError(503, "an operator has drained this node: POST /v1/undrain ends it", code="drained")
    # Without the reasons, which may have words of users: anybody may ask.
    degraded = [] if lifecycle.services is None else lifecycle.services.outcomes.problems(reasons=False)
    return Ready(status="ready", degraded=degraded)
