"""The event router: it passes the engine's events to the asyncio queues of the requests that wait for them."""

import asyncio
from collections.abc import Iterable
from contextlib import suppress

from edged.engine.request import Event, FinishEvent


class EventRouter:
    """Queues of events by request id; several ids may share one queue (the choices of one completion)."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._queues: dict[str, asyncio.Queue[Event]] = {}

    @property
    def open_requests(self) -> int:
        """The number of requests that have not finished."""
        return len(self._queues)

    def expect(self, request_id: str, queue: asyncio.Queue[Event]) -> None:
        """Put all events of a request into `queue`. To be called before the request is submitted."""
        self._queues[request_id] = queue

    def drop(self, request_ids: Iterable[str]) -> None:
        """Discard further events of these requests."""
        for request_id in request_ids:
            self._queues.pop(request_id, None)

    def deliver(self, events: list[Event]) -> None:
        """Pass on the events of one iteration; returns at once, and any thread may call it."""
        # A closed loop raises RuntimeError: the daemon is at its end, and no request waits any more.
        with suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self._dispatch, events)

    def _dispatch(self, events: list[Event]) -> None:
        for event in events:
            if queue := self._queues.get(event.request_id):
                queue.put_nowait(event)
                if isinstance(event, FinishEvent):
                    del self._queues[event.request_id]
