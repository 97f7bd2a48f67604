"""Shares of the event loop's time: an account that floods the loop waits for its turns, and the others do not."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Generator, Hashable
from typing import Any, Generic, TypeVar

from edged.runtime.token_bucket import TokenBucket

T = TypeVar("T")

SHARE = 0.2
"""Part of the loop's time that one account may begin things with, while another account asks."""
_AHEAD_S = 0.02
"""Time of the loop that an account which was away may have at once."""
_ASKS_S = 10.0
"""Time for which an account that asked counts as one that asks."""
_FIRST_S = 0.001
"""The expected time of the first thing that an account begins."""
_TURN_S = 0.0001
"""Time of the loop that a turn costs beside its work: tasks, waits, and what the kernel does for a connection."""
_WEIGHT = 0.1
"""Weight of the latest time in the expected one."""
_MAX_ACCOUNTS = 1024
"""Accounts in memory. Beyond it the one that asked longest ago is forgotten."""


class LoopWork(Generic[T]):
    """A coroutine whose time on the event loop's thread is counted, step by step, until `settle` is called.

    To give it up counts again: a client who asks and leaves, over and over, costs others as much as one who stays.
    """

    def __init__(self, begin: Callable[[], Coroutine[Any, Any, T]]) -> None:
        """`begin` makes the coroutine."""
        self.spent_s = _TURN_S
        self.spend: Callable[[float], None] | None = None
        """Called with the seconds of each step."""
        self._begin, self._settled = begin, False
        self._began_s = 0.0
        """When the present step began, on the clock of the thread's own time."""

    def settle(self) -> None:
        """Count nothing that follows: it is at the engine's pace, or at that of who reads the answer."""
        self._count()
        self._settled = True

    def __await__(self) -> Generator[Any, Any, T]:
        work = self._begin()
        step: Callable[[Any], Any] = work.send
        sent: Any = None
        while True:
            if not self._settled:
                self._began_s = time.thread_time()
            try:
                waits_for = step(sent)
            except StopIteration as done:
                result: T = done.value
                return result
            finally:
                self._count()
            try:
                step, sent = work.send, (yield waits_for)
            except BaseException as error:
                step, sent, self._settled = work.throw, error, False

    def _count(self) -> None:
        """Count the present step, as far as it has come."""
        if self.spend is not None and not self._settled:
            seconds = time.thread_time() - self._began_s
            self.spent_s += seconds
            self.spend(seconds)


class LoopShare:
    """The share of one account: the time that it had, and what of it waits for its turn, first come, first served."""

    def __init__(self, alone: Callable[["LoopShare"], bool], clock: Callable[[], float]) -> None:
        """`alone` tells whether no other account asks: then nobody waits, and what was had does not count."""
        self.asked_s = clock()
        self.waiting = 0
        """Requests and connections that wait."""
        self._alone, self._clock = alone, clock
        self._bucket = TokenBucket(_AHEAD_S, _AHEAD_S / SHARE)
        self._turn = asyncio.Lock()
        self._expected_s = _FIRST_S

    async def run(self, work: LoopWork[T]) -> T:
        """Return the result of `work`, which begins when it is the account's turn."""
        self.waiting += 1
        try:
            async with self._turn:
                while wait_s := self._wait_s():  # noqa: ASYNC110 - what it owes grows meanwhile
                    await asyncio.sleep(wait_s)
                # Its time is known only when it has passed, and until then what waits behind it shall not begin, too.
                expected_s = self._expected_s
                self.take(expected_s)
        finally:
            self.waiting -= 1
        work.spend = lambda seconds: self.take(max(0.0, min(seconds, work.spent_s - expected_s)))
        try:
            return await work
        finally:
            self.take(-max(0.0, expected_s - work.spent_s))
            self._expected_s += _WEIGHT * (min(work.spent_s, _AHEAD_S) - self._expected_s)

    def take(self, seconds: float) -> None:
        """Count time that the account has had."""
        self._bucket.take(self._clock(), seconds)

    def _wait_s(self) -> float:
        self.asked_s = self._clock()
        if self._alone(self):
            self._bucket = TokenBucket(_AHEAD_S, _AHEAD_S / SHARE)
        return self._bucket.wait_s(self.asked_s, 0.0)


class LoopShares:
    """The shares of all accounts; used on the event loop alone."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.active_s = clock()
        """When an account last did something at a connection."""
        self._shares: OrderedDict[Hashable, LoopShare] = OrderedDict()
        """By account, the one that asked longest ago first."""

    def of(self, account: Hashable) -> LoopShare:
        """Return the share of an account that asks now."""
        share = self._shares.pop(account, None) or LoopShare(self._alone, self._clock)
        share.asked_s = self.active_s = self._clock()
        self._shares[account] = share
        if len(self._shares) > _MAX_ACCOUNTS:
            self._shares.popitem(last=False)
        return share

    def _alone(self, share: LoopShare) -> bool:
        other = next((known for known in reversed(self._shares.values()) if known is not share), None)
        return other is None or self._clock() - other.asked_s > _ASKS_S
