"""What the routes work with, and in which phase of its life the daemon is."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from aiohttp import web

from edged.api.admission import TenantQueue
from edged.api.errors import ApiError, unavailable
from edged.api.event_router import EventRouter
from edged.api.event_streams import Feed
from edged.api.feedback_intake import FeedbackIntake
from edged.api.limits import UserLimits
from edged.engine.engine import Engine
from edged.governors.governors import Governors
from edged.reload import ReloadResult, adopted
from edged.settings.live import Live
from edged.settings.load import Settings
from edged.store import Store
from edged.store.maintenance import Maintenance
from edged.store.user_quota import UserQuota
from edged.telemetry.device import DeviceMonitor
from edged.text.tokenizer import Tokenizer

Phase = Literal["loading", "ready", "draining"]


@dataclass(frozen=True, slots=True)
class Services:
    """The running parts. `model` is the base model's name in the API."""

    settings: Settings
    model: str
    vocab_size: int
    engine: Engine
    store: Store
    codec: Tokenizer
    event_router: EventRouter
    feed: Feed
    feedback_intake: FeedbackIntake
    monitor: DeviceMonitor
    admission: TenantQueue
    limits: UserLimits
    footprint: UserQuota
    governors: Governors
    upkeep: Maintenance
    started_at_s: float
    """Unix time."""
    reload: Callable[[], Awaitable[ReloadResult]]
    """Reads the settings again; raises ConfigError."""
    live: Live[Settings]
    """The settings in force, for parts that read them when they decide."""
    forgetting: set[asyncio.Task[Any]] = field(default_factory=set)
    """Adapters being forgotten: the daemon ends no earlier."""
    forgetting_stages: dict[str, str] = field(default_factory=dict)
    """What is being done just now to forget each of them."""


@dataclass(slots=True)
class Lifecycle:
    """The phase, and the services once the model is loaded."""

    phase: Phase = "loading"
    services: Services | None = None
    opened_s: float = field(default_factory=time.monotonic)

    def configure(self, settings: Settings) -> None:
        """Requests from now on are answered under other settings.

        Under other rules or tokens nobody goes on watching by the old ones: streams end, and who still may begins anew.
        """
        if self.services is not None:
            before = self.services.settings
            self.services = replace(self.services, settings=adopted(before, settings))
            if settings.access != before.access:
                self.services.feed.close()

    def ready(self, services: Services) -> None:
        """Requests are served from now on."""
        self.services, self.phase = services, "ready"

    def drain(self) -> None:
        """New requests are refused from now on."""
        self.phase = "draining"

    def problem(self) -> ApiError | None:
        """Why nothing can be served now; None when it can."""
        if self.services is not None and self.services.engine.error:
            return unavailable(self.services.engine.error, "engine_stopped")
        if self.phase == "ready":
            return None
        return unavailable(
            "the model is being loaded" if self.phase == "loading" else "the daemon is stopping", self.phase
        )


LIFECYCLE = web.AppKey("lifecycle", Lifecycle)


def services_of(request: web.Request) -> Services:
    """The services of a request's daemon. Raises ApiError while the model is loading."""
    lifecycle = request.app[LIFECYCLE]
    if lifecycle.services is None:
        raise lifecycle.problem() or unavailable("the daemon has not started", "loading")
    return lifecycle.services
