"""Admission: the queue before the engine, and the rate limits of each user.

Without `fairness.policy` the engine orders its requests by deadline, whichever tenant sent them. So it never gets more
than it can soon begin, and tenants take turns here: one who sends a thousand requests at once delays the others by one
turn of each, not by a thousand. With it the engine decides whose turn it is. So whoever waits at all has a request in
the engine's queue, and here each waits behind the same tenant's alone.
"""

import asyncio
import math
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from edged.engine.request import EngineBusy
from edged.runtime.token_bucket import TokenBucket
from edged.settings.load import LimitSettings, ServingSettings

_ENDS = 64
"""Latest ends of choices from which the rate is estimated."""
_MAX_WAIT_S = 60.0
_ASKS_S = 60.0
"""Time for which a tenant who asked is expected to ask again."""
WRITES_OF_ONE = 2
"""Feedback of one caller that is with the database's writer at once: what others write waits behind it."""
ERASURES_PER_MINUTE = 3
"""Users that a caller who is no admin may have forgotten in a minute: each time all tables are searched."""
CHANGES_PER_MINUTE = 30
"""Times that a caller may have jobs paused or resumed in a minute: each waits for a step, and for the disk."""
_BUCKETS = ("requests_per_minute", "tokens_per_minute", "feedback_per_minute")
"""Settings of `[limits]` that have a token bucket for each user; 0 means no limit."""
_MAX_USERS = 10_000
"""Users in memory. Beyond it the one who was away longest and has nothing open is forgotten: in a minute a
bucket is full again anyhow."""


class QueueFull(EngineBusy):
    """Raised for a request that the full queue refuses; `retry_after_s` estimates when to try again, in seconds."""

    def __init__(self, most: int, retry_after_s: float) -> None:
        super().__init__(f"{most} requests are waiting (serving.max_queue)")
        self.retry_after_s = retry_after_s


def queue_sizes(serving: ServingSettings) -> tuple[int, int]:
    """Return (choices that the engine holds at once, choices that may wait here).

    The engine gets what it can run and as much again to choose from; the rest of `max_queue` waits.
    """
    chosen_from = min(serving.max_sequences, serving.max_queue)
    return serving.max_sequences + chosen_from, serving.max_queue - chosen_from


def tenant_places(serving: ServingSettings, tenants: int) -> int:
    """Return the choices of one of several `tenants` that the engine holds at once, where it decides on turns.

    It can run `max_sequences`, so that with one more of each it always has one of everybody who waits to choose from.
    """
    return serving.max_sequences + max(1, min(serving.max_sequences, serving.max_queue) // max(1, tenants))


def max_of_one(serving: ServingSettings) -> int:
    """Return the choices of one tenant that the engine holds at once while others ask, too.

    A sixteenth of what can run, at least one, is left to the others: answers of one who has everything all end late.
    """
    return max(1, serving.max_sequences - -(-serving.max_sequences // 16))


@dataclass(slots=True, eq=False)
class _Waiting:
    """A choice in the queue; `turn` resolves when it may enter the engine."""

    tenant: str
    choices: int
    """All choices of its request, where it is the first of them."""
    begun: bool
    """Whether another choice of its request has entered before it."""
    turn: asyncio.Future[None]


class TenantQueue:
    """A queue of choices before the engine; used on the event loop alone.

    `enter` before a choice of a request is submitted, `leave` when it is over.
    """

    def __init__(
        self,
        sizes: Callable[[], tuple[int, int]],
        clock: Callable[[], float] = time.monotonic,
        places: Callable[[int], int | None] = lambda _: None,
        max_of_one: Callable[[], float] = lambda: math.inf,
    ) -> None:
        """`sizes` returns how many choices the engine gets at once, and how many may wait here: see `queue_sizes`.

        `places` returns how many the engine gets of one tenant, by the number of tenants; None while tenants take turns
        here. `max_of_one` returns how many it gets of one in any case, while several ask.
        """
        self._sizes, self._clock, self._places, self._max_of_one = sizes, clock, places, max_of_one
        self._asked_s: OrderedDict[str, float] = OrderedDict()
        """The times at which tenants asked last, within `_ASKS_S`, the earliest first."""
        self._inside = 0
        self._inside_of: Counter[str] = Counter()
        self.waiting = 0
        """Choices that wait; any thread may read this and `refused`."""
        self.refused = 0
        """Choices that were refused since start."""
        self._queues: OrderedDict[str, deque[_Waiting]] = OrderedDict()
        """Waiting choices by tenant, the tenant whose turn is next first."""
        self._ends: deque[float] = deque(maxlen=_ENDS)

    async def enter(self, tenant: str, choices: int = 1, begun: bool = False) -> None:
        """Wait until the engine may have one more choice. Raises QueueFull.

        The first choice of a request enters with the number of all its `choices`, the others with `begun`; choices that
        will not enter are withdrawn. When too many wait, the latest request of the tenant with the most waiting choices
        is refused, which may be this one. A request that has begun is never refused, and a request that is alone is
        let in even if it has more choices than there is room for.
        """
        now = self._clock()
        self._asked_s.pop(tenant, None)
        self._asked_s[tenant] = now
        while now - next(iter(self._asked_s.values())) > _ASKS_S:
            self._asked_s.popitem(last=False)
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
                self.leave(tenant)
            else:
                self._remove(waiting)
            if not begun:
                self.withdraw(choices)
            raise

    @property
    def several_ask(self) -> bool:
        """Whether more than one tenant has asked within the last minute."""
        return len(self._asked_s) > 1

    def withdraw(self, choices: int) -> None:
        """Subtract choices of a request that will not enter."""
        self.waiting -= choices

    def leave(self, tenant: str) -> None:
        """Count a choice as over, and let the next in."""
        self._inside -= 1
        self._inside_of[tenant] -= 1
        if self._inside_of[tenant] <= 0:
            del self._inside_of[tenant]
        self._ends.append(self._clock())
        self._go_on()

    def retry_after_s(self) -> float:
        """Seconds until the queue is empty at the recent rate; one second where no rate is known."""
        if len(self._ends) < 2:
            return 1.0
        span = max(self._clock() - self._ends[0], 1e-3)
        return min(_MAX_WAIT_S, max(1.0, self.waiting * span / len(self._ends)))

    def _go_on(self) -> None:
        while (tenant := self._next()) is not None:
            queue = self._queues.pop(tenant)
            waiting = queue.popleft()
            if queue:
                self._queues[tenant] = queue  # behind the others
            # A choice whose client has just left is skipped.
            if not waiting.turn.cancelled():
                self._inside += 1
                self._inside_of[tenant] += 1
                self.waiting -= 1
                waiting.turn.set_result(None)

    def _next(self) -> str | None:
        """Return the tenant whose next choice the engine gets, if it gets one: the first in turn that has a place."""
        if not self._queues:
            return None
        places = self._places(len(self._inside_of.keys() | self._queues.keys()))
        if places is None and self._inside >= self._sizes()[0]:
            return None
        most = min(math.inf if places is None else places, self._max_of_one() if self.several_ask else math.inf)
        return next((tenant for tenant in self._queues if self._inside_of[tenant] < most), None)

    def _turn_away(self) -> bool:
        """Refuse the latest request of the tenant with the most waiting choices; False where all have begun."""
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
    """Raised for a user who has used up a limit; `retry_after_s` says when there is more, in seconds."""

    def __init__(self, user: str, bound: str, retry_after_s: float) -> None:
        super().__init__(f'user "{user}" has reached {bound}: come again in {retry_after_s:.0f} s')
        self.user, self.retry_after_s = user, retry_after_s


@dataclass(slots=True)
class _User:
    """A user's token buckets and open choices."""

    name: str
    buckets: dict[str, TokenBucket]
    """Token buckets by setting."""
    open_choices: int = 0
    erasures: TokenBucket = field(default_factory=lambda: TokenBucket(ERASURES_PER_MINUTE, 60.0))
    changes: TokenBucket = field(default_factory=lambda: TokenBucket(CHANGES_PER_MINUTE, 60.0))
    writing: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(WRITES_OF_ONE))

    def demand(self, setting: str, now: float) -> None:
        """Raise LimitReached when a bucket is empty."""
        if wait_s := self.buckets[setting].wait_s(now):
            raise LimitReached(self.name, f"limits.{setting} = {self.buckets[setting].most}", wait_s)


class UserLimits:
    """The rate limits of all users. `begin` a request, `end` it in any case; `feedback` counts one signal or pair."""

    def __init__(self, settings: LimitSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings, self._clock = settings, clock
        self._users: OrderedDict[str, _User] = OrderedDict()

    def configure(self, settings: LimitSettings) -> None:
        """Apply other limits; all users begin with full buckets again, and their open requests stay counted."""
        self._settings = settings
        for user in self._users.values():
            user.buckets = self._full_buckets()

    def __len__(self) -> int:
        """Return the number of users in memory."""
        return len(self._users)

    def begin(self, user: str, choices: int, num_tokens: int) -> None:
        """Count a request of `choices` answers and `num_tokens` at most, or raise LimitReached and count nothing.

        The tokens of the longest answers are taken at once, and `end` puts back what was not used: a user with any
        tokens left may ask for more than a minute's worth, but not for several such requests at once.
        """
        self.demand(user, choices)
        known, now = self._user(user), self._clock()
        known.open_choices += choices
        known.buckets["requests_per_minute"].take(now)
        known.buckets["tokens_per_minute"].take(now, num_tokens)

    def demand(self, user: str, choices: int) -> None:
        """Raise LimitReached if `begin` would refuse now; to be called before the prompt is tokenized."""
        known, now, most = self._user(user), self._clock(), self._settings.concurrent_requests
        if most and known.open_choices and known.open_choices + choices > most:
            raise LimitReached(user, f"limits.concurrent_requests = {most}", 1.0)
        known.demand("requests_per_minute", now)
        known.demand("tokens_per_minute", now)

    def end(self, user: str, choices: int, unused_tokens: int) -> None:
        """End a request; `unused_tokens` of those that `begin` took were not generated and are put back."""
        known = self._user(user)
        known.open_choices = max(0, known.open_choices - choices)
        known.buckets["tokens_per_minute"].take(self._clock(), -unused_tokens)

    def feedback(self, user: str) -> None:
        """Count one signal or pair. Raises LimitReached."""
        known, now = self._user(user), self._clock()
        known.demand("feedback_per_minute", now)
        known.buckets["feedback_per_minute"].take(now)

    def erasure(self, caller: str) -> None:
        """Count one forgetting that a caller asks for. Raises LimitReached."""
        self._take(caller, self._user(caller).erasures, f"{ERASURES_PER_MINUTE} erasures a minute")

    def change(self, caller: str) -> None:
        """Count one pausing or resuming of a job that a caller asks for. Raises LimitReached."""
        self._take(caller, self._user(caller).changes, f"{CHANGES_PER_MINUTE} changes of jobs a minute")

    def _take(self, caller: str, bucket: TokenBucket, bound: str) -> None:
        now = self._clock()
        if wait_s := bucket.wait_s(now):
            raise LimitReached(caller, bound, wait_s)
        bucket.take(now)

    def writing(self, caller: str) -> asyncio.Semaphore:
        """Return the turns of a caller's feedback at the database's writer, which takes all writes in their order."""
        return self._user(caller).writing

    def no_feedback(self, user: str) -> None:
        """Take back one count of `feedback`, for a signal that did not come about."""
        self._user(user).buckets["feedback_per_minute"].take(self._clock(), -1.0)

    def headers(self, user: str) -> dict[str, str]:
        """Return OpenAI's rate-limit headers: what is left of requests and tokens, where they are limited."""
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
            if len(self._users) >= _MAX_USERS:
                idle = next((known for known, user in self._users.items() if not user.open_choices), None)
                if idle is not None:
                    del self._users[idle]
            self._users[name] = _User(name, self._full_buckets())
        self._users.move_to_end(name)
        return self._users[name]

    def _full_buckets(self) -> dict[str, TokenBucket]:
        return {setting: TokenBucket(getattr(self._settings, setting), 60.0) for setting in _BUCKETS}
