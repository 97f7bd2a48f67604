"""What is asked of the engine and what it answers: requests, sampling parameters, events."""

from dataclasses import dataclass
from typing import Literal

from edged.engine.sampling.params import Sampling
from edged.scheduler.task import ServiceClass

FinishReason = Literal["stop", "length", "cancelled", "error"]


class EngineBusy(RuntimeError):
    """The queue is full."""


class EngineStopping(EngineBusy):
    """The engine takes no more requests: it is stopping, or it has failed."""


class RequestRefused(ValueError):
    """The request can never be served; the message says why."""


@dataclass(frozen=True, slots=True)
class Request:
    """One completion asked for. `adapter` None is the base model.

    Its K/V is shared with requests of the same `tenant` alone, "" being one that all may be. `user` is who asks, where
    that is known, whatever the adapter.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    adapter: str | None = None
    service: ServiceClass = ServiceClass.INTERACTIVE
    tenant: str = ""
    user: str | None = None

    def is_of(self, name: str) -> bool:
        """Whether it goes when this user or adapter is forgotten."""
        return name in (self.adapter, self.user, self.tenant)


@dataclass(slots=True)
class TokenEvent:
    """One sampled token. `top` has (token id, log-probability), best first."""

    request_id: str
    token_id: int
    version: int = 0
    """The adapter's version that it was sampled under."""
    logprob: float | None = None
    top: list[tuple[int, float]] | None = None


@dataclass(slots=True)
class FinishEvent:
    """A request's end; nothing follows it. Times are seconds since submission (monotonic clock)."""

    request_id: str
    reason: FinishReason
    error: str = ""
    adapter: str | None = None
    version: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    queue_s: float = 0.0
    ttft_s: float = 0.0
    total_s: float = 0.0


Event = TokenEvent | FinishEvent
