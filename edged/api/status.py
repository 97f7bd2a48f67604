"""`GET /v1/status`, `/healthz`, `/readyz`."""

import asyncio
import time

from aiohttp import web

import edged
from edged.api.access import Caller, caller_of
from edged.api.openai_format import Json
from edged.api.responses import Health, Ready
from edged.api.services import LIFECYCLE, Lifecycle, Services, services_of
from edged.store import StoreError
from edged.store.quarantine import count_quarantined


async def status(request: web.Request) -> Json:
    """Queues, bins, pages, fine-tuning, device. Adapters are named to those alone who may speak for them."""
    body = await asyncio.to_thread(report, request.app[LIFECYCLE], services_of(request))
    return visible(body, caller_of(request))


def report(lifecycle: Lifecycle, services: Services) -> Json:
    """The status, JSON-ready. It reads the database: not for the event loop."""
    engine, store, problem = services.engine.status(), services.store, ""
    quarantined: int | None = None
    try:
        quarantined = store.read(count_quarantined)
    except StoreError as error:
        problem = str(error)
    problem = store.suspect or store.problem or problem
    return {
        "version": edged.__version__,
        "phase": lifecycle.phase,
        "uptime_s": time.monotonic() - lifecycle.opened_s,
        **engine,
        "queue": queue(services),
        "outcomes": {**engine["outcomes"], "refused": refused(services)},
        "degraded": engine["degraded"] + ([problem] if problem else []),
        "quarantine": {"pairs": quarantined},
        "forgetting": dict(services.forgetting_stages),
        "open_requests": services.event_router.open_requests,
        "device": services.monitor.read(),
        "governors": services.governors.report,
        "store": services.upkeep.report(),
    }


def queue(services: Services) -> dict[str, int]:
    """Requests by stage, also those that wait to be let in, and pairs that wait to be learned."""
    counts = services.engine.queue()
    return {**counts, "waiting": counts["waiting"] + services.admission.waiting}


def refused(services: Services) -> int:
    """Requests since start that found the queue full."""
    return services.engine.stats.outcomes["refused"] + services.admission.refused


def visible(body: Json, caller: Caller) -> Json:
    """A status as a caller may see it: who that is, and no adapter's name that it may not hear of."""
    learning, sees = body["finetune"], caller.speaks_for
    named = {key: [name for name in learning[key] if sees(name)] for key in ("active_adapters", "alarms")}
    forgetting = {name: stage for name, stage in body["forgetting"].items() if sees(name)}
    known = {"name": caller.name, "roles": sorted(caller.roles), "users": list(caller.users)}
    return {**body, "caller": known, "forgetting": forgetting, "finetune": {**learning, **named}}


async def healthz(request: web.Request) -> Health:
    """200 as long as the process should be left alone: loading, serving, draining."""
    lifecycle = request.app[LIFECYCLE]
    problem = lifecycle.problem()
    if problem and problem.code not in ("loading", "draining"):
        raise problem
    return Health(status="ok", phase=lifecycle.phase)


async def readyz(request: web.Request) -> Ready:
    """200 when completions are served, 503 while the model is loading and from SIGTERM on."""
    if problem := request.app[LIFECYCLE].problem():
        raise problem
    return Ready(status="ready")
