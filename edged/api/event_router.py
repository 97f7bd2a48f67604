"""The event router: it passes the engine's events to the asyncio queues of the requests that wait for them."""

import asyncio
from collections.abc import Callable
from contextlib import suppress

from edged.engine.request import Event, FinishEvent


class EventRouter:
    """Queues of events by request id; several ids may share one queue (the choices of one completion)."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._queues: dict[str, asyncio.Queue[Event]] = {}
        self._uncounted: set[str] = set()
        """Ids of requests that no client sent."""
        self._given_up: dict[str, Callable[[], object]] = {}

    @property
    def open_requests(self) -> int:
        """The number of clients' requests that have not finished."""
        return len(self._queues) - len(self._uncounted)

    def expect(self, request_id: str, queue: asyncio.Queue[Event], counted: bool = True) -> None:
        """Put all events of a request into `queue`. To be called before the request is submitted.

        One that no client sent, such as a candidate, is not `counted`.
        """
        self._queues[request_id] = queue
        if not counted:
            self._uncounted.add(request_id)

    def drop(self, request_id: str, ended: Callable[[], object] | None = None) -> None:
        """Discard further events of a request; `ended` is called once the engine has ended it."""
        self._uncounted.discard(request_id)
        if self._queues.pop(request_id, None) is not None and ended is not None:
            self._given_up[request_id] = ended
        elif ended is not None:
            ended()

    def deliver(self, events: list[Event]) -> None:
        """Pass on the events of one iteration; returns at once, and any thread may call it."""
        # A closed loop raises RuntimeError: the daemon is at its end, and no request waits any more.
        with suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self._dispatch, events)

    def _dispatch(self, events: list[Event]) -> None:
        for event in events:
            last = isinstance(event, FinishEvent)
            if queue := self._queues.get(event.request_id):
                queue.put_nowait(event)
                if last:
                    del self._queues[event.request_id]
                    self._uncounted.discard(event.request_id)
            elif last and (ended := self._given_up.pop(event.request_id, None)) is not None:
                ended()
