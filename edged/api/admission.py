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
    """Of its request, where it is the first of them."""
    begun: bool
    turn: asyncio.Future[None]


class TenantQueue:
    """Used on the event loop alone: `enter` before a choice of a request is submitted, `leave` when it is over."""

    def __init__(self, at_once: int, most_waiting: int, clock: Callable[[], float] = time.monotonic) -> None:
        """The engine gets at most `at_once` choices."""
        self._at_once, self._most_waiting, self._clock = at_once, most_waiting, clock
        self._inside = 0
        self.waiting = 0
        """Choices that are held back; any thread may read this and the next."""
        self.refused = 0
        """Choices that were turned away since start."""
        self._queues: OrderedDict[str, deque[_Waiting]] = OrderedDict()
        """By tenant, whoever's turn is next first."""
        self._ends: deque[float] = deque(maxlen=_ENDS)

    @classmethod
    def for_engine(cls, serving: ServingSettings) -> TenantQueue:
        """The engine gets what it can run and as much again to choose from; the rest of `max_queue` waits here."""
        chosen_from = min(serving.max_sequences, serving.max_queue)
        return cls(serving.max_sequences + chosen_from, serving.max_queue - chosen_from)

    def configure(self, serving: ServingSettings) -> None:
        """Go by another `max_queue` from the next request on."""
        other = TenantQueue.for_engine(serving)
        self._at_once, self._most_waiting = other._at_once, other._most_waiting

    async def enter(self, tenant: str, choices: int = 1, begun: bool = False) -> None:
        """Wait until the engine may have one more choice. Raises QueueFull.

        A request's first choice enters with the number of all its `choices`, the others when it has `begun`; those that
        will not enter are withdrawn. Where too many wait, the latest request of the tenant who has most waiting goes,
        whether that is this one or not; but none that has begun, and one that is alone may have more than all room.
        """
        fits = begun or not (self._inside or self.waiting)
        if not begun:
            self.waiting += choices
        if not self._queues and self._inside < self._at_once and (fits or not self._crowded):
            self._inside += 1
            self.waiting -= 1
            return
        waiting = _Waiting(tenant, choices, begun, asyncio.get_running_loop().create_future())
        self._queues.setdefault(tenant, deque()).append(waiting)
        while not fits and self._crowded and self._turn_away():
            pass
        try:
            await waiting.turn
        except asyncio.CancelledError:
            if waiting.turn.done() and not waiting.turn.cancelled() and not waiting.turn.exception():
                self.waiting += 1
                self.leave()
            else:
                self._remove(waiting)
            if not begun:
                self.withdraw(choices)
            raise

    def withdraw(self, choices: int) -> None:
        """So many choices of a request will not enter."""
        self.waiting -= choices

    def leave(self) -> None:
        """A choice is over: whose turn it is goes on."""
        self._inside -= 1
        self._ends.append(self._clock())
        self._go_on()

    @property
    def _crowded(self) -> bool:
        return self._inside + self.waiting > self._at_once + self._most_waiting

    def retry_after_s(self) -> float:
        """How long the queue takes to become empty at the rate of late; a second where nothing is known of that."""
        if len(self._ends) < 2:
            return 1.0
        span = max(self._clock() - self._ends[0], 1e-3)
        return min(_MOST_WAIT_S, max(1.0, self.waiting * span / len(self._ends)))

    def _go_on(self) -> None:
        while self._queues and self._inside < self._at_once:
            tenant, queue = next(iter(self._queues.items()))
            waiting = queue.popleft()
            del self._queues[tenant]
            if queue:
                self._queues[tenant] = queue  # behind the others
            # One whose client has left in this very moment will not go.
            if not waiting.turn.cancelled():
                self._inside += 1
                self.waiting -= 1
                waiting.turn.set_result(None)

    def _turn_away(self) -> bool:
        """Refuse the latest of the tenant who has most waiting; False where all that wait have begun."""
        new = [[waiting for waiting in queue if not waiting.begun] for queue in self._queues.values()]
        most = max(new, key=lambda queue: sum(waiting.choices for waiting in queue), default=[])
        if not most:
            return False
        self._remove(most[-1])
        if not most[-1].turn.cancelled():
            self.withdraw(most[-1].choices)
            self.refused += most[-1].choices
            most[-1].turn.set_exception(QueueFull(self._most_waiting, self.retry_after_s()))
        return True

    def _remove(self, waiting: _Waiting) -> None:
        queue = self._queues.get(waiting.tenant)
        if queue is not None and waiting in queue:
            queue.remove(waiting)
            if not queue:
                del self._queues[waiting.tenant]
        self._go_on()
