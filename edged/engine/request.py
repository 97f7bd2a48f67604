"""What is asked of the engine and what it answers: requests, sampling parameters, events.

Owns the data that crosses between the engine thread and its callers. Must not know HTTP, SQL or torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from edged.scheduler.task import ServiceClass

FinishReason = Literal["stop", "length", "cancelled", "error"]


class EngineBusy(RuntimeError):
    """The queue is full."""


class EngineStopping(EngineBusy):
    """The engine takes no more requests: it is stopping, or it has failed."""


class RequestRefused(ValueError):
    """The request can never be served; the message says why."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn. Defaults are OpenAI's; `top_k` 0 and `min_p` 0 switch those off.

    `logprobs` is the number of alternatives to report beside the drawn token's log-probability (0-20),
    None to report nothing. Log-probabilities are the model's own, before penalties and temperature.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()


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
