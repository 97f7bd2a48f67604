"""The daemon's running parts, which the routes use, and its lifecycle: loading, ready, draining."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal

from aiohttp import web

from edged.api.admission import TenantQueue, UserLimits
from edged.api.event_router import EventRouter
from edged.api.event_streams import Feed
from edged.api.feedback_intake import FeedbackIntake
from edged.api.jobs.runner import JobRunner
from edged.api.outcomes import LatestOutcomes
from edged.api.practice import Practice
from edged.api.reading_speeds import ReadingSpeeds
from edged.api.rounds import Rounds
from edged.api.runs import ApplicationRuns
from edged.api.tastes import Tastes
from edged.api.version_answers import VersionAnswers
from edged.api.written_preferences import WrittenPreferences
from edged.engine.engine import Engine
from edged.governors.governors import Governors
from edged.http.errors import ApiError
from edged.reload import ReloadResult, adopted
from edged.settings.live import Live
from edged.settings.load import Settings
from edged.store import Store
from edged.store.maintenance import Maintenance
from edged.store.user_quota import UserQuota
from edged.telemetry.device import DeviceMonitor
from edged.text.grammar import GrammarCompiler
from edged.text.tokenizer import Tokenizer

Phase = Literal["loading", "ready", "draining"]
_BUSY_RETRY_S = 5.0


@dataclass(frozen=True, slots=True)
class Services:
    """The daemon's running parts. `model` is the base model's name in the API."""

    live: Live[Settings]
    """The settings in force, for parts that read them when they decide."""
    model: str
    engine: Engine
    store: Store
    tokenizer: Tokenizer
    grammars: GrammarCompiler
    event_router: EventRouter
    feed: Feed
    feedback_intake: FeedbackIntake
    version_answers: VersionAnswers
    job_runner: JobRunner
    tastes: Tastes
    practice: Practice
    monitor: DeviceMonitor
    admission: TenantQueue
    runs: ApplicationRuns
    rounds: Rounds
    limits: UserLimits
    quota: UserQuota
    reading_speeds: ReadingSpeeds
    preferences: WrittenPreferences
    governors: Governors
    maintenance: Maintenance
    started_at_s: float
    """Unix time of the start."""
    reload: Callable[[], Awaitable[ReloadResult]]
    """Reads the settings again; raises ConfigError."""
    eraser: Executor = field(default_factory=lambda: ThreadPoolExecutor(1, "edged-forget"))
    """Forgets one adapter after the other: each takes long, and other work in threads does not wait for it."""
    forgetting: set[asyncio.Future[Any]] = field(default_factory=set)
    """Tasks that forget adapters: the daemon waits for them before it ends."""
    forgetting_stages: dict[str, str] = field(default_factory=dict)
    """The present stage of each such task, by adapter."""
    outcomes: LatestOutcomes = field(default_factory=LatestOutcomes)
    reading_import: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while an imported adapter is unpacked and read."""
    busy: set[tuple[str, str]] = field(default_factory=set)
    """Running work of kinds that only one caller may do at a time, such as "backup", or each owner."""

    @property
    def settings(self) -> Settings:
        """The settings in force."""
        return self.live.current

    def configure(self, settings: Settings) -> None:
        """Replace the settings that everything reads from `live`.

        If rules or tokens changed, all event streams end, so that none goes on under old rights; clients reconnect.
        """
        before, self.live.current = self.live.current, adopted(self.live.current, settings)
        if settings.access != before.access:
            self.feed.close()

    def claim(self, what: str, whose: str = "") -> None:
        """Add `what` to `busy` until `free` is called for it. Raises ApiError (429) if it is there; `whose` else.

        Others are refused and do not wait, since they would hold a connection.
        """
        if (what, whose) in self.busy:
            message = f"another {what} is being made: try again when it is done"
            raise ApiError(429, message, code=f"{what}_busy", retry_after_s=_BUSY_RETRY_S)
        self.busy.add((what, whose))

    def free(self, what: str, whose: str = "") -> None:
        """End a claim."""
        self.busy.discard((what, whose))


@dataclass(slots=True)
class Lifecycle:
    """The daemon's phase, and its services once the model is loaded."""

    phase: Phase = "loading"
    services: Services | None = None
    drained: bool = False
    """Whether a fleet is to send no new requests here; those that come are answered."""
    opened_s: float = field(default_factory=time.monotonic)

    def problem(self) -> ApiError | None:
        """The error of every request that needs a ready daemon; None when it is ready."""
        if self.services is not None and self.services.engine.error:
            return ApiError(503, self.services.engine.error, code="engine_stopped")
        problems = {"loading": "the model is being loaded", "draining": "the daemon is stopping"}
        return ApiError(503, problems[self.phase], code=self.phase) if self.phase in problems else None


LIFECYCLE = web.AppKey("lifecycle", Lifecycle)


def services_of(request: web.Request) -> Services:
    """The services, from a request's application. Raises ApiError (503) while the model is loading."""
    lifecycle = request.app[LIFECYCLE]
    if lifecycle.services is None:
        raise lifecycle.problem() or ApiError(503, "the daemon has not started", code="loading")
    return lifecycle.services
