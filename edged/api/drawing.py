"""Draws: answers that the daemon has generated for itself, outside of a client's request."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from edged.api.event_router import EventRouter
from edged.engine.engine import Engine
from edged.engine.request import EngineBusy, Event, FinishEvent, Request, RequestRefused, TokenEvent
from edged.text.tokenizer import Tokenizer


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

    def text(self, tokenizer: Tokenizer) -> str:
        """Return what was drawn, without the tokens that end an answer."""
        return tokenizer.decode([token for token in self.token_ids if token not in tokenizer.eos_ids])


class Drawing:
    """Requests that were submitted, and their draws so far. Use: `collect`, or `cancel`."""

    def __init__(
        self, engine: Engine, router: EventRouter, requests: Sequence[Request], asked_s: float | None = None
    ) -> None:
        """Submit the requests at once. Raises EngineBusy and RequestRefused for the first; later ones are dropped."""
        self._engine, self._router = engine, router
        self._queue: asyncio.Queue[Event] = asyncio.Queue()
        self._draws = {request.request_id: Draw(request) for request in requests}
        for number, request in enumerate(requests):
            router.expect(request.request_id, self._queue, counted=not request.candidate)
            try:
                engine.submit(request, asked_s)
            except (EngineBusy, RequestRefused):
                router.drop(request.request_id)
                if not number:
                    raise
                self._draws[request.request_id].finish = FinishEvent(request.request_id, "dropped")

    async def collect(self, on_event: Callable[[Event], None] | None = None) -> list[Draw]:
        """Return the draws, in the order of the requests, when all have ended; `on_event` hears each event.

        Cancelled, it cancels them.
        """
        try:
            while any(each.finish is None for each in self._draws.values()):
                event = await self._queue.get()
                if isinstance(event, TokenEvent):
                    self._draws[event.request_id].tokens.append(event)
                else:
                    self._draws[event.request_id].finish = event
                if on_event is not None:
                    on_event(event)
        finally:
            self.cancel()
        return list(self._draws.values())

    def cancel(self) -> None:
        """Cancel what has not ended."""
        for name, each in self._draws.items():
            if each.finish is None:
                self._router.drop(name)
                self._engine.cancel(name)
