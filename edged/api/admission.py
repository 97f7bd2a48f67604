"""In which order requests go to the engine when more come than it takes: round robin over tenants.

The engine orders what it has by deadlines, whoever asked. So it never gets more than it can soon begin, and a tenant
who sends a thousand requests at once delays the others by one turn of each, not by a thousand.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

from edged.engine.request import EngineBusy
from edged.settings.load import ServingSettings

_ENDS = 64
"""Latest ends from which the rate is told."""
_MOST_WAIT_S = 60.0


class QueueFull(EngineBusy):
    """No more may wait; `retry_after_s` says when the queue will be shorter by one."""

    def __init__(self, most: int, retry_after_s: float) -> None:
        super().__init__(f"{most} requests are waiting (serving.max_queue)")
        self.retry_after_s = retry_after_s


@dataclass(slots=True, eq=False)
class _Waiting:
    tenant: str
    choices: int
    turn: asyncio.Future[None]


class TenantQueue:
    """Used on the event loop alone: `enter` before a request's choices are submitted, `leave` when they are over."""

    def __init__(self, at_once: int, most_waiting: int, clock: Callable[[], float] = time.monotonic) -> None:
        """The engine gets at most `at_once` choices; one request may always go, even where it has more."""
        self._at_once, self._most_waiting, self._clock = at_once, most_waiting, clock
        self._inside = 0
        self.waiting = 0
        """Choices that are held back; any thread may read this and the next."""
        self.refused = 0
        """Choices that were turned away since start."""
        self._queues: OrderedDict[str, deque[_Waiting]] = OrderedDict()
        """By tenant, whoever's turn is next first."""
        self._ends: deque[tuple[float, int]] = deque(maxlen=_ENDS)

    @classmethod
    def for_engine(cls, serving: ServingSettings) -> TenantQueue:
        """The engine gets what it can run and as much again to choose from; the rest of `max_queue` waits here."""
        chosen_from = min(serving.max_sequences, serving.max_queue)
        return cls(serving.max_sequences + chosen_from, serving.max_queue - chosen_from)

    def configure(self, serving: ServingSettings) -> None:
        """Go by another `max_queue` from the next request on."""
        other = TenantQueue.for_engine(serving)
        self._at_once, self._most_waiting = other._at_once, other._most_waiting

    async def enter(self, tenant: str, choices: int) -> None:
        """Wait until the engine may have these choices. Raises QueueFull.

        Where too many wait, the latest of the tenant who has most waiting goes, whether that is this one or not.
        """
        if not self._queues and self._fits(choices):
            self._inside += choices
            return
        waiting = _Waiting(tenant, choices, asyncio.get_running_loop().create_future())
        self._queues.setdefault(tenant, deque()).append(waiting)
        self.waiting += choices
        while self.waiting > self._most_waiting:
            self._turn_away()
        try:
            await waiting.turn
        except asyncio.CancelledError:
            if waiting.turn.done() and not waiting.turn.cancelled() and not waiting.turn.exception():
                self.leave(choices)
            else:
                self._remove(waiting)
            raise

    def leave(self, choices: int) -> None:
        """Choices are over: whose turn it is goes on."""
        self._inside -= choices
        self._ends.append((self._clock(), choices))
        self._go_on()

    def retry_after_s(self) -> float:
        """How long the queue takes to become empty at the rate of late; a second where nothing is known of that."""
        if len(self._ends) < 2:
            return 1.0
        span = max(self._clock() - self._ends[0][0], 1e-3)
        per_second = sum(choices for _, choices in self._ends) / span
        return min(_MOST_WAIT_S, max(1.0, self.waiting / per_second))

    def _fits(self, choices: int) -> bool:
        return not self._inside or self._inside + choices <= self._at_once

    def _go_on(self) -> None:
        while self._queues:
            tenant, queue = next(iter(self._queues.items()))
            if not self._fits(queue[0].choices):
                return
            waiting = queue.popleft()
            self.waiting -= waiting.choices
            del self._queues[tenant]
            if queue:
                self._queues[tenant] = queue  # behind the others
            # One whose client has left in this very moment will not go.
            if not waiting.turn.cancelled():
                self._inside += waiting.choices
                waiting.turn.set_result(None)

    def _turn_away(self) -> None:
        most = max(self._queues.values(), key=lambda queue: sum(waiting.choices for waiting in queue))
        last = most[-1]
        self._remove(last)
        if not last.turn.cancelled():
            self.refused += last.choices
            last.turn.set_exception(QueueFull(self._most_waiting, self.retry_after_s()))

    def _remove(self, waiting: _Waiting) -> None:
        queue = self._queues.get(waiting.tenant)
        if queue is not None and waiting in queue:
            queue.remove(waiting)
            self.waiting -= waiting.choices
            if not queue:
                del self._queues[waiting.tenant]
        self._go_on()
