"""Requests to the engine, the events that answer them, and the errors that refuse them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from edged.engine.sampling.params import Sampling
from edged.scheduler.reader import Pace, Reader
from edged.scheduler.task import ServiceClass

FinishReason = Literal["stop", "length", "cancelled", "error", "dropped"]
"""The reason why a request ended; only a candidate is "dropped"."""


class EngineBusy(RuntimeError):
    """The queue is full."""


class FirstTokenLate(EngineBusy):
    """The first token would come far too late; the message names prediction, target and setting."""

    def __init__(self, predicted_s: float, target_s: float, factor: float) -> None:
        super().__init__(
            f"the first token is predicted in {predicted_s:.3g} s, and its target is {target_s:.3g} s: more than "
            f"scheduler.refuse_ttft_factor = {factor:g} targets are refused; try again later, or raise the setting"
        )
        self.retry_after_s = max(1.0, predicted_s - factor * target_s)
        """Seconds after which the queue is short enough, if nobody comes."""


class EngineStopping(EngineBusy):
    """The engine takes no more requests: it is stopping, or it has failed."""


class RequestRefused(ValueError):
    """The request can never be served; the message says why."""


@dataclass(frozen=True, slots=True)
class Request:
    """A request for one completion. `adapter` None is the base model.

    Its K/V is shared only with requests of the same `tenant`; "" is the tenant of all who share. `user` is the
    requesting user, where known, whatever the adapter; `turn` names whose turn it is, where that is another name.
    `run` is the run of an application that it belongs to, which is expected to cost `run_cost` in all.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    adapter: str | None = None
    service: ServiceClass = ServiceClass.INTERACTIVE
    tenant: str = ""
    user: str | None = None
    fairness_key: str = ""
    pace: Pace | None = None
    """Speed of the person who reads the answer while it is made, if anybody does."""
    run: str = ""
    run_cost: float = 0.0
    candidate: bool = False
    """Whether its answer is one of several to choose from: it is dropped where its room is wanted."""
    delivery: Literal["tokens", "block", "next_block", "none"] = "tokens"
    """The delivery of its tokens: each as it is made, or all at its end, as the first or a further block. "none": only
    its K/V are wanted, which an idle moment computes."""
    resumed_ids: tuple[int, ...] = ()
    """Tokens of the answer that were sampled elsewhere: it goes on after them."""

    @property
    def own(self) -> bool:
        """Whether the daemon asks it for itself, and no client: its turn has a name in brackets."""
        return self.fairness_key.startswith("(")

    @property
    def counts(self) -> bool:
        """Whether it is a request of a client's, and not a candidate or a further block of an answer."""
        return not self.candidate and self.delivery != "next_block"

    def is_of(self, name: str) -> bool:
        """Whether the request belongs to this user or adapter, which is forgotten."""
        return name in (self.adapter, self.user, self.tenant)


@dataclass(slots=True)
class TokenEvent:
    """One sampled token. `top` has the likeliest (token id, log-probability), best first."""

    request_id: str
    token_id: int
    version: int = 0
    """The adapter's version under which the token was sampled."""
    logprob: float | None = None
    top: list[tuple[int, float]] | None = None
    prompt: Sequence[tuple[float, list[tuple[int, float]]]] | None = None
    """With the first token, where it was asked for: log-probability and likeliest tokens of the prompt's second token
    and those that follow."""


@dataclass(slots=True)
class FinishEvent:
    """The end of a request, its last event. Times are seconds since submission."""

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
    reader: Reader | None = None
    """The reader's timeline at the end."""


Event = TokenEvent | FinishEvent
