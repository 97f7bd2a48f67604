"""What one user may take in a minute and at once, and whose request goes next to the engine: round robin over tenants.

The engine orders what it has by deadlines, whoever asked. So it never gets more than it can soon begin, and a tenant
who sends a thousand requests at once delays the others by one turn of each, not by a thousand.
"""

import asyncio
import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

from edged.engine.request import EngineBusy
from edged.runtime.token_bucket import TokenBucket
from edged.settings.load import LimitSettings, ServingSettings

_ENDS = 64
"""Latest ends from which the rate is told."""
_MOST_WAIT_S = 60.0
_BUCKETS = ("requests_per_minute", "tokens_per_minute", "feedback_per_minute")
"""Settings; 0 is no limit."""
_MOST_USERS = 10_000
"""Users who are remembered. Beyond it the one who was away longest and has nothing open is forgotten: in a minute a
bucket is full again anyhow."""


class QueueFull(EngineBusy):
    """No more may wait; `retry_after_s` says when the queue will be shorter by one."""

    def __init__(self, most: int, retry_after_s: float) -> None:
        super().__init__(f"{most} requests are waiting (serving.max_queue)")
        self.retry_after_s = retry_after_s


def queue_sizes(serving: ServingSettings) -> tuple[int, int]:
    """The engine gets what it can run and as much again to choose from; the rest of `max_queue` waits."""
    chosen_from = min(serving.max_sequences, serving.max_queue)
    return serving.max_sequences + chosen_from, serving.max_queue - chosen_from


@dataclass(slots=True, eq=False)
class _Waiting:
    tenant: str
    choices: int
    """Of its request, where it is the first of them."""
    begun: bool
    turn: asyncio.Future[None]


class TenantQueue:
    """Used on the event loop alone: `enter` before a choice of a request is submitted, `leave` when it is over."""

    def __init__(self, sizes: Callable[[], tuple[int, int]], clock: Callable[[], float] = time.monotonic) -> None:
        """`sizes` says how many choices the engine gets at once, and how many may wait here: see `queue_sizes`."""
        self._sizes, self._clock = sizes, clock
        self._inside = 0
        self.waiting = 0
        """Choices that are held back; any thread may read this and the next."""
        self.refused = 0
        """Choices that were turned away since start."""
        self._queues: OrderedDict[str, deque[_Waiting]] = OrderedDict()
        """By tenant, whoever's turn is next first."""
        self._ends: deque[float] = deque(maxlen=_ENDS)

    async def enter(self, tenant: str, choices: int = 1, begun: bool = False) -> None:
        """Wait until the engine may have one more choice. Raises QueueFull.

        A request's first choice enters with the number of all its `choices`, the others when it has `begun`; those that
        will not enter are withdrawn. Where too many wait, the latest request of the tenant who has most waiting goes,
        whether that is this one or not; but none that has begun, and one that is alone may have more than all room.
        """
        fits = begun or not (self._inside or self.waiting)
        if not begun:
            self.waiting += choices
        waiting = _Waiting(tenant, choices, begun, asyncio.get_running_loop().create_future())
        self._queues.setdefault(tenant, deque()).append(waiting)
        while not fits and self._inside + self.waiting > sum(self._sizes()) and self._turn_away():
            pass
        self._go_on()
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

    def retry_after_s(self) -> float:
        """How long the queue takes to become empty at the rate of late; a second where nothing is known of that."""
        if len(self._ends) < 2:
            return 1.0
        span = max(self._clock() - self._ends[0], 1e-3)
        return min(_MOST_WAIT_S, max(1.0, self.waiting * span / len(self._ends)))

    def _go_on(self) -> None:
        while self._queues and self._inside < self._sizes()[0]:
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
            most[-1].turn.set_exception(QueueFull(self._sizes()[1], self.retry_after_s()))
        return True

    def _remove(self, waiting: _Waiting) -> None:
        queue = self._queues.get(waiting.tenant)
        if queue is not None and waiting in queue:
            queue.remove(waiting)
            if not queue:
                del self._queues[waiting.tenant]
        self._go_on()


class LimitReached(Exception):
    """A user has taken what the settings allow; `retry_after_s` says when there is more."""

    def __init__(self, user: str, setting: str, limit: float, retry_after_s: float) -> None:
        super().__init__(f'user "{user}" has reached limits.{setting} = {limit}: come again in {retry_after_s:.0f} s')
        self.user, self.retry_after_s = user, retry_after_s


@dataclass(slots=True)
class _User:
    name: str
    buckets: dict[str, TokenBucket]
    """By setting."""
    open_choices: int = 0

    def demand(self, setting: str, now: float) -> None:
        """Raises LimitReached when there is nothing in a bucket."""
        if wait_s := self.buckets[setting].wait_s(now):
            raise LimitReached(self.name, setting, self.buckets[setting].most, wait_s)


class UserLimits:
    """Counts of all users. `begin` a request, `end` it in any case; `feedback` counts one signal or pair."""

    def __init__(self, settings: LimitSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings, self._clock = settings, clock
        self._users: OrderedDict[str, _User] = OrderedDict()

    def configure(self, settings: LimitSettings) -> None:
        """Count by other limits; everybody begins with full buckets again, and what is open stays counted."""
        self._settings = settings
        for user in self._users.values():
            user.buckets = self._full_buckets()

    def __len__(self) -> int:
        """Users who are remembered."""
        return len(self._users)

    def begin(self, user: str, choices: int, tokens: int) -> None:
        """Count a request of `choices` answers and at most `tokens` tokens. Raises LimitReached, and counts nothing.

        The tokens of the longest answers are taken at once, and `end` puts back what was not used: whoever has any left
        may ask for more than a minute holds, but not for several such at once.
        """
        self.demand(user, choices)
        known, now = self._user(user), self._clock()
        known.open_choices += choices
        known.buckets["requests_per_minute"].take(now)
        known.buckets["tokens_per_minute"].take(now, tokens)

    def demand(self, user: str, choices: int) -> None:
        """What `begin` would refuse now, before the work of finding out how many tokens it has. Raises LimitReached."""
        known, now, most = self._user(user), self._clock(), self._settings.concurrent_requests
        if most and known.open_choices and known.open_choices + choices > most:
            raise LimitReached(user, "concurrent_requests", most, 1.0)
        known.demand("requests_per_minute", now)
        known.demand("tokens_per_minute", now)

    def end(self, user: str, choices: int, unused_tokens: int) -> None:
        """A request is over; `unused_tokens` of those that `begin` took were never made."""
        known = self._user(user)
        known.open_choices = max(0, known.open_choices - choices)
        known.buckets["tokens_per_minute"].take(self._clock(), -unused_tokens)

    def feedback(self, user: str) -> None:
        """Count one signal or pair. Raises LimitReached."""
        known, now = self._user(user), self._clock()
        known.demand("feedback_per_minute", now)
        known.buckets["feedback_per_minute"].take(now)

    def no_feedback(self, user: str) -> None:
        """What `feedback` counted did not come about."""
        self._user(user).buckets["feedback_per_minute"].take(self._clock(), -1.0)

    def headers(self, user: str) -> dict[str, str]:
        """What is left of requests and tokens, where they are limited, in OpenAI's headers."""
        now, headers = self._clock(), dict[str, str]()
        for name in ("requests", "tokens"):
            bucket = self._user(user).buckets[f"{name}_per_minute"]
            if bucket.most < math.inf:
                headers[f"x-ratelimit-limit-{name}"] = str(bucket.most)
                headers[f"x-ratelimit-remaining-{name}"] = str(max(0, int(bucket.level(now))))
                headers[f"x-ratelimit-reset-{name}"] = f"{bucket.wait_s(now, bucket.most):.3f}s"
        return headers

    def _user(self, name: str) -> _User:
        if name not in self._users:
            if len(self._users) >= _MOST_USERS:
                idle = next((known for known, user in self._users.items() if not user.open_choices), None)
                if idle is not None:
                    del self._users[idle]
            self._users[name] = _User(name, self._full_buckets())
        self._users.move_to_end(name)
        return self._users[name]

    def _full_buckets(self) -> dict[str, TokenBucket]:
        return {setting: TokenBucket(getattr(self._settings, setting), 60.0) for setting in _BUCKETS}
