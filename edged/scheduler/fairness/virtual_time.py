"""The virtual time of fair sharing (Justitia): when each application would end if all shared the box, as tags.

Work is counted in KV token-iterations: a call with a prompt of p tokens holds p + i tokens as it makes the i-th one of
its answer, so with an answer of d tokens it costs `call_cost(p, d)` in all (Justitia, Eq. 1).
"""

from __future__ import annotations

import heapq
import itertools
import math
from dataclasses import dataclass, field
from operator import attrgetter

_TINY = 1e-6
"""Work that is less is an error of rounding."""


def call_cost(prompt: float, answer: float) -> float:
    """Return the KV token-iterations of a call by the tokens of its prompt and answer."""
    return prompt * answer + answer * (answer + 1.0) / 2.0


@dataclass(slots=True, eq=False)
class Application:
    """One run of an application: calls that belong together."""

    key: str
    sharer: str
    """The name that shares: the user, or the application itself."""
    weight: float
    cost: float
    """Work that it is expected to need; doubled whenever it has had more."""
    begun: float
    """Virtual time of its arrival."""
    served: float = 0.0
    tag: float = 0.0
    """Virtual time at which it would end under fair sharing."""
    fair_end_s: float = math.inf
    """When virtual time passed the tag, in seconds of the clock: when it would have ended under fair sharing."""


@dataclass(slots=True)
class _Sharer:
    weight: float
    applications: dict[str, Application] = field(default_factory=dict)
    tag: float = 0.0
    """Virtual time at which all its work would be done."""
    ended: float = -math.inf
    """Virtual time at which its ended applications would have been done, by what they really needed."""


class VirtualTime:
    """The clock and the open applications' tags; the least tag goes first.

    The clock moves with the work that was really served: by served / (weights of those whose tags lie ahead). So
    neither fine-tuning nor a pool that is not full makes it run ahead of the box.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.applications: dict[str, Application] = {}
        self._sharers: dict[str, _Sharer] = {}
        self._weights = 0.0
        """Sum of the weights of the sharers whose tags lie ahead."""
        self._ahead: list[tuple[float, int, str, str]] = []
        """Heap of (tag, number, sharer, application or ""); those that were moved since are passed over."""
        self._numbers = itertools.count()
        self._ranked: list[Application] = []
        self._sorted = True

    def open(self, key: str, sharer: str, weight: float, cost: float) -> None:
        """Give a new application its tag. Of one sharer those with less to do come first, one after the other."""
        known = self._sharers.setdefault(sharer, _Sharer(weight))
        opened = Application(key, sharer, weight, max(1.0, cost), self.now)
        self.applications[key] = known.applications[key] = opened
        self._ranked.append(opened)
        self._file(sharer)

    def close(self, key: str) -> None:
        """Take out an application that has ended; what it really needed counts."""
        ended = self.applications.pop(key)
        self._ranked.remove(ended)
        sharer = self._sharers[ended.sharer]
        del sharer.applications[key]
        if ended.sharer != key:
            sharer.ended = max(sharer.ended, ended.begun) + ended.served / ended.weight
        self._file(ended.sharer)

    def serve(self, work: dict[str, float], now_s: float) -> None:
        """Count work that applications got, and move the clock; who has had more than expected is expected twice as
        much."""
        grown: set[str] = set()
        for key, amount in work.items():
            application = self.applications[key]
            application.served += amount
            if application.served > application.cost:
                grown.add(application.sharer)
                while application.served > application.cost:
                    application.cost *= 2.0
        for sharer in grown:
            self._file(sharer)
        self._advance(sum(work.values()), now_s)

    def ranked(self) -> list[Application]:
        """Return the open applications by tag; do not change the list."""
        if not self._sorted:
            self._ranked.sort(key=attrgetter("tag"))
            self._sorted = True
        return self._ranked

    def _file(self, name: str) -> None:
        """Set the tags of a sharer's applications anew, and when all its work would be done."""
        sharer, was_ahead = self._sharers[name], self._is_ahead(name)
        end = sharer.ended
        chain = sharer.applications.values()
        for application in sorted(chain, key=lambda known: known.begun + known.cost / known.weight):
            end = max(application.begun, end) + application.cost / application.weight
            if end != application.tag:
                application.tag = end
                if end > self.now:
                    application.fair_end_s = math.inf
                heapq.heappush(self._ahead, (end, next(self._numbers), name, application.key))
                self._sorted = False
        if end != sharer.tag:
            sharer.tag = end
            heapq.heappush(self._ahead, (end, next(self._numbers), name, ""))
        if len(self._ahead) > 4 * (len(self.applications) + len(self._sharers)) + 64:
            self._ahead = [entry for entry in self._ahead if self._of(entry) is not None]
            heapq.heapify(self._ahead)
        self._weights += sharer.weight * (self._is_ahead(name) - was_ahead)
        self._drop(name)

    def _of(self, entry: tuple[float, int, str, str]) -> Application | _Sharer | None:
        """Return what an entry of the heap stands for; None if that was moved since."""
        tag, _, name, key = entry
        moved = self.applications.get(key) if key else self._sharers.get(name)
        return moved if moved is not None and moved.tag == tag else None

    def _is_ahead(self, name: str) -> bool:
        sharer = self._sharers.get(name)
        return sharer is not None and sharer.tag > self.now

    def _drop(self, name: str) -> None:
        """Forget a sharer who has nothing open and nothing ahead."""
        sharer = self._sharers.get(name)
        if sharer is not None and not sharer.applications and sharer.tag <= self.now:
            del self._sharers[name]

    def _advance(self, work: float, now_s: float) -> None:
        while self._ahead:
            tag, _, name, _ = self._ahead[0]
            sharer, moved = self._sharers.get(name), self._of(self._ahead[0])
            if moved is None:
                heapq.heappop(self._ahead)
                continue
            needed = max(0.0, tag - self.now) * self._weights
            if needed - work > _TINY:
                break
            work = max(0.0, work - needed)
            self.now = max(self.now, tag)
            heapq.heappop(self._ahead)
            if isinstance(moved, Application):
                moved.fair_end_s = now_s
            elif sharer is not None:
                self._weights -= sharer.weight
                self._drop(name)
        if self._weights > _TINY and self._ahead:
            self.now += work / self._weights
        else:
            self._weights = 0.0
