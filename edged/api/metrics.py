"""`GET /metrics`: Prometheus' text, or OpenMetrics where it is asked for.

Everything is read on a worker's thread: the event loop only writes the answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

from aiohttp import web
from prometheus_client.exposition import choose_encoder

import edged
from edged.align.metrics import recent_adapters
from edged.api.services import LIFECYCLE, Lifecycle, Services
from edged.api.status import engine_status, look_at_store
from edged.observe import readings
from edged.observe.catalogue import Samples
from edged.observe.observer import DRAIN_EVERY_S, Observer
from edged.store import StoreError

log = logging.getLogger("edged.api")
OBSERVER = web.AppKey("observer", Observer)


async def metrics(request: web.Request) -> web.Response:
    """All metrics, of all users; while the model is loading, only that it is."""
    lifecycle, observer = request.app[LIFECYCLE], request.app[OBSERVER]
    encode, content_type = choose_encoder(request.headers.get("Accept", ""))
    body = await asyncio.to_thread(lambda: encode(read(lifecycle, observer)))
    return web.Response(body=body, headers={"Content-Type": content_type})


async def observing(app: web.Application) -> AsyncIterator[None]:
    """While the application runs, no record is overwritten before the histograms have it."""
    task = asyncio.create_task(_drain(app[LIFECYCLE], app[OBSERVER]))
    yield
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def _drain(lifecycle: Lifecycle, observer: Observer) -> None:
    while True:
        await asyncio.sleep(DRAIN_EVERY_S)
        if lifecycle.services is not None:
            await asyncio.to_thread(observer.drain, lifecycle.services.engine)


def read(lifecycle: Lifecycle, observer: Observer) -> Samples:
    """All samples of this moment. It reads files and the database: not for the event loop."""
    samples = Samples()
    samples.put("edged_ready", lifecycle.problem() is None)
    services = lifecycle.services
    if services is None:
        return samples
    status, settings = engine_status(services), services.settings
    model, policy = status["model"], status["scheduler"]["policy"]
    build = (edged.__version__, services.model, model["dtype"], model["device"], policy)
    samples.put("edged_build_info", 1, *build)
    samples.put("edged_start_time_seconds", services.started_at_s)
    samples.put("edged_queue_limit_requests", settings.serving.max_queue)
    observer.put(services.engine, samples)
    readings.put_status(status, samples)
    readings.put_device(services.monitor.read(), samples)
    readings.put_governors(services.governors.report(), samples)
    quarantined, problem = look_at_store(services.store)
    samples.put("edged_quarantined_pairs", quarantined)
    unread = _put_adapters(services, status["finetune"]["pairs_queued"], samples)
    readings.put_degraded(status["degraded"], problem or unread, samples)
    # Last, for it tells of errors of the reading before.
    readings.put_store(services.store.path, services.store.errors, samples)
    return samples


def _put_adapters(services: Services, pairs_pending: int, samples: Samples) -> str:
    """Returns why there are none of single adapters, or ""."""
    versions, most = services.engine.adapters(), services.settings.metrics.adapters
    try:
        shown = services.store.read(lambda db: recent_adapters(db, versions.keys(), pairs_pending, most))
    except StoreError as error:
        log.error("no metrics of adapters: %s", error)
        return str(error)
    readings.put_adapters(versions, shown, samples)
    return ""
