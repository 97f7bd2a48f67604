"""Draws: answers that the daemon has generated for itself, outside of a client's request."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from edged.api.event_router import EventRouter
from edged.engine.engine import Engine
from edged.engine.request import Event, FinishEvent, FinishReason, Request, TokenEvent


@dataclass(slots=True)
class Draw:
    """A request with its tokens so far, and its end."""

    request: Request
    tokens: list[TokenEvent] = field(default_factory=list)
    finish: FinishEvent | None = None

    @property
    def token_ids(self) -> list[int]:
        """The sampled tokens."""
        return [event.token_id for event in self.tokens]

    @property
    def ended(self) -> bool:
        """Whether it came to its own end."""
        return self.finish is not None and self.finish.reason == "stop"

    @property
    def whole(self) -> bool:
        """Whether it came to its own end or its length."""
        return self.finish is not None and self.finish.reason in ("stop", "length")


async def draw(
    engine: Engine, router: EventRouter, requests: Sequence[Request], on_event: Callable[[Event], None] | None = None
) -> list[Draw]:
    """Submit requests at once and return their draws, in order, when all have ended; `on_event` hears each event.

    Cancelled, it cancels them. Raises EngineBusy and RequestRefused, with none of them left running.
    """
    queue: asyncio.Queue[Event] = asyncio.Queue()
    draws = {request.request_id: Draw(request) for request in requests}
    try:
        for request in requests:
            router.expect(request.request_id, queue, counted=not request.candidate)
            engine.submit(request)
        while any(each.finish is None for each in draws.values()):
            event = await queue.get()
            if isinstance(event, TokenEvent):
                draws[event.request_id].tokens.append(event)
            else:
                draws[event.request_id].finish = event
            if on_event is not None:
                on_event(event)
    finally:
        reason: FinishReason = "cancelled"
        for name, each in draws.items():
            if each.finish is None:
                router.drop(name)
                engine.cancel(name, reason)
    return list(draws.values())
