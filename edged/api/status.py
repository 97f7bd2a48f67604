"""`GET /v1/status`, `/healthz`, `/readyz`.

Owns what the daemon says of itself. Must not know how the numbers are counted.
"""

from __future__ import annotations

import time

from aiohttp import web

import edged
from edged.api import wire
from edged.api.access import caller_of
from edged.api.services import LIFECYCLE, services_of


async def status(request: web.Request) -> web.Response:
    """Queues, bins, pages, fine-tuning, device. Adapters are named to those alone who may speak for them."""
    services, caller = services_of(request), caller_of(request)
    lifecycle = request.app[LIFECYCLE]
    body = {
        "version": edged.__version__,
        "phase": lifecycle.phase,
        "uptime_s": time.monotonic() - lifecycle.opened_s,
        **services.engine.status(),
        "open_requests": services.hub.open_requests,
        "device": services.monitor.read(),
        "governors": services.governors.report(),
    }
    body["queue"]["waiting"] += services.admission.waiting
    learning = body["finetune"]
    learning["active_adapters"] = [name for name in learning["active_adapters"] if caller.speaks_for(name)]
    return web.json_response(body, dumps=wire.dumps)


async def healthz(request: web.Request) -> web.Response:
    """200 as long as the process should be left alone: loading, serving, draining."""
    lifecycle = request.app[LIFECYCLE]
    problem = lifecycle.problem()
    if problem and problem.code not in ("loading", "draining"):
        raise problem
    return web.json_response({"status": "ok", "phase": lifecycle.phase})


async def readyz(request: web.Request) -> web.Response:
    """200 when completions are served, 503 while the model is loading and from SIGTERM on."""
    if problem := request.app[LIFECYCLE].problem():
        raise problem
    return web.json_response({"status": "ready"})
