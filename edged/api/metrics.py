"""`GET /metrics`: all metrics in Prometheus' text format, or in OpenMetrics where the client accepts it.

Everything is read in a worker thread: the event loop only writes the answer.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

from aiohttp import web
from prometheus_client.exposition import choose_encoder

import edged
from edged.align.metrics import recent_adapters
from edged.api.services import LIFECYCLE, Lifecycle
from edged.api.status import report
from edged.observe import readings
from edged.observe.catalogue import Samples
from edged.observe.observer import DRAIN_EVERY_S, Observer
from edged.observe.stalls import StallMonitor
from edged.store import StoreError

log = logging.getLogger("edged.api")
OBSERVER = web.AppKey("observer", Observer)
STALLS = web.AppKey("stalls", StallMonitor)


async def metrics(request: web.Request) -> web.Response:
    """All metrics for Prometheus.

    Those of all users; while the model is loading, `edged_ready` = 0 alone.
    """
    lifecycle, observer, stalls = request.app[LIFECYCLE], request.app[OBSERVER], request.app[STALLS]
    encode, content_type = choose_encoder(request.headers.get("Accept", ""))
    body = await asyncio.to_thread(lambda: encode(read(lifecycle, observer, stalls)))
    return web.Response(body=body, headers={"Content-Type": content_type})


async def observing(app: web.Application) -> AsyncIterator[None]:
    """Drain the engine's records into the histograms, before they are overwritten, while the application runs."""

    async def drain() -> None:
        while True:
            await asyncio.sleep(DRAIN_EVERY_S)
            if (services := app[LIFECYCLE].services) is not None:
                await asyncio.to_thread(app[OBSERVER].drain, services.engine)

    task = asyncio.create_task(drain())
    yield
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


def read(lifecycle: Lifecycle, observer: Observer, stalls: StallMonitor) -> Samples:
    """Return the present samples of all metrics. It reads files and the database: not for the event loop."""
    values: readings.Readings = {"edged_ready": lifecycle.problem() is None}
    services = lifecycle.services
    if services is None:
        return Samples(values)
    status, store, versions = report(lifecycle, services), services.store, services.engine.adapters()
    quarantined = status["quarantine"]["pairs"]
    store_told = bool(store.suspect or store.problem) or quarantined is None
    values |= readings.engine_readings(status) | observer.readings(services.engine)
    values |= services.runs.readings() | stalls.readings()
    values |= readings.device_readings(status["device"]) | readings.governor_readings(status["governors"])
    pairs_pending, most, unread = status["finetune"]["pairs_queued"], services.settings.metrics.adapters, False
    try:
        shown = store.read(lambda db: recent_adapters(db, versions.keys(), pairs_pending, most))
        values |= readings.adapter_readings(versions, shown) | services.job_runner.readings()
        values |= services.practice.readings({each.adapter for each in shown})
    except StoreError as error:
        log.error("no metrics of adapters: %s", error)
        unread = True
    model, policy = status["model"], status["scheduler"]["policy"]
    build = (edged.__version__, services.model, model["dtype"], model["device"], policy)
    return Samples(
        values
        | {
            "edged_build_info": {build: 1},
            "edged_start_time_seconds": services.started_at_s,
            "edged_queue_limit_requests": services.settings.serving.max_queue,
            "edged_quarantined_pairs": quarantined,
            "edged_degraded": len(status["degraded"]) + (unread and not store_told),
            "edged_adapters": {**values["edged_adapters"], "known": len(versions)},
            # After the other readings, whose errors it counts.
            **readings.store_readings(status["store"], store.errors),
        }
    )
