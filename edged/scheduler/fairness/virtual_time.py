"""The virtual time of fair sharing (Justitia): when each application would end if all shared the box, as tags.

Work is counted in KV token-iterations: a call with a prompt of p tokens holds p + i tokens as it makes the i-th one of
its answer, so with an answer of d tokens it costs `call_cost(p, d)` in all (Justitia, Eq. 1).
"""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Hashable, Iterator
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
    number: int
    """Its place among all that were opened."""
    calls: int = 0
    """Number of its live calls."""
    served: float = 0.0
    tag: float = 0.0
    """Virtual time at which it would end under fair sharing."""
    fair_end_s: float = math.inf
    """When virtual time passed the tag, in seconds of the clock: when it would have ended under fair sharing."""

    @property
    def alone(self) -> float:
        """Virtual time at which it would end if its sharer had nothing else: the least goes first."""
        return self.begun + self.cost / self.weight


_tag = attrgetter("tag")
_alone = attrgetter("alone")


@dataclass(slots=True, eq=False)
class _Sharer:
    weight: float
    chain: list[Application] = field(default_factory=list)
    """Its open applications, one after the other: their tags rise."""
    tag: float = 0.0
    """Virtual time at which all its work would be done."""
    ended: float = -math.inf
    """Virtual time at which its ended applications would have been done, by what they really needed."""
    next_tag: float = math.inf
    """The first of its tags that lies ahead; inf where none does."""
    head: tuple[float, int] = (math.inf, 0)
    """Tag and number of its first application."""


class VirtualTime:
    """The clock and the open applications' tags; the least tag goes first.

    The clock moves with the work that was really served: by served / (weights of those whose tags lie ahead). So
    neither fine-tuning nor a pool that is not full makes it run ahead of the box.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.applications: dict[Hashable, Application] = {}
        self._now_s = 0.0
        self._sharers: dict[str, _Sharer] = {}
        self._weights = 0.0
        """Sum of the weights of the sharers whose tags lie ahead."""
        self._ahead: list[tuple[float, int, str]] = []
        """Heap of (next tag, number, sharer); those that were moved since are passed over."""
        self._numbers = itertools.count()
        self._heads: list[tuple[float, int, _Sharer]] = []
        """Sharers in the order of their first applications."""

    def open(self, key: str, sharer: str, weight: float, cost: float) -> None:
        """Give a new application its tag. Of one sharer those with less to do come first, one after the other."""
        known = self._sharers.setdefault(sharer, _Sharer(weight))
        opened = Application(key, sharer, weight, max(1.0, cost), self.now, next(self._numbers))
        self.applications[key] = opened
        at = bisect_right(known.chain, opened.alone, key=_alone)
        known.chain.insert(at, opened)
        self._file(sharer, at, at)

    def close(self, key: str) -> None:
        """Take out an application that has ended; what it really needed counts."""
        ended = self.applications.pop(key)
        sharer = self._sharers[ended.sharer]
        at = sharer.chain.index(ended, bisect_left(sharer.chain, ended.alone, key=_alone))
        del sharer.chain[at]
        if ended.sharer != key:
            sharer.ended = max(sharer.ended, ended.begun) + ended.served / ended.weight
        self._file(ended.sharer, 0, at)

    def serve(self, work: dict[str, float], now_s: float) -> None:
        """Count work that applications got, and move the clock; who has had more than expected is expected twice as
        much."""
        self._now_s = now_s
        for key, amount in work.items():
            application = self.applications[key]
            application.served += amount
            if application.served > application.cost:
                chain = self._sharers[application.sharer].chain
                at = chain.index(application, bisect_left(chain, application.alone, key=_alone))
                del chain[at]
                while application.served > application.cost:
                    application.cost *= 2.0
                last = bisect_right(chain, application.alone, key=_alone)
                chain.insert(last, application)
                self._file(application.sharer, at, last)
        self._advance(sum(work.values()), now_s)

    def ranked(self) -> Iterator[Application]:
        """Yield the open applications by tag; nothing may change meanwhile."""
        heads, reached = self._heads, 0
        ahead: list[tuple[float, int, list[Application], int]] = []
        while ahead or reached < len(heads):
            if not ahead or (reached < len(heads) and heads[reached][:2] < ahead[0][:2]):
                tag, number, sharer = heads[reached]
                heapq.heappush(ahead, (tag, number, sharer.chain, 0))
                reached += 1
                continue
            _, _, chain, at = ahead[0]
            yield chain[at]
            if at + 1 < len(chain):
                heapq.heapreplace(ahead, (chain[at + 1].tag, chain[at + 1].number, chain, at + 1))
            else:
                heapq.heappop(ahead)

    def _file(self, name: str, first: int, last: int) -> None:
        """Set the tags of a sharer's applications anew, of which those from `first` to `last` have other places or
        others before them, and when all its work would be done."""
        sharer = self._sharers[name]
        chain = sharer.chain
        end = chain[first - 1].tag if first else sharer.ended
        for at in range(first, len(chain)):
            application = chain[at]
            end = max(application.begun, end) + application.cost / application.weight
            if end != application.tag:
                application.tag = end
                application.fair_end_s = math.inf if end > self.now else min(application.fair_end_s, self._now_s)
            elif at >= last:
                break
        sharer.tag = chain[-1].tag if chain else sharer.ended
        self._place(sharer)
        self._look_ahead(name, sharer)
        if len(self._ahead) > 4 * len(self._sharers) + 64:
            self._ahead = [entry for entry in self._ahead if self._is_next(entry)]
            heapq.heapify(self._ahead)

    def _place(self, sharer: _Sharer) -> None:
        """Put a sharer where its first application belongs."""
        head = (sharer.chain[0].tag, sharer.chain[0].number) if sharer.chain else (math.inf, 0)
        if head == sharer.head:
            return
        if sharer.head[0] < math.inf:
            del self._heads[bisect_left(self._heads, sharer.head)]
        sharer.head = head
        if sharer.chain:
            insort(self._heads, (*head, sharer))

    def _look_ahead(self, name: str, sharer: _Sharer) -> None:
        """Note the next tag of a sharer that the clock will pass; forget one who has nothing open and nothing ahead."""
        at = bisect_right(sharer.chain, self.now, key=_tag)
        tag = sharer.chain[at].tag if at < len(sharer.chain) else sharer.tag
        if tag <= self.now:
            tag = math.inf
            if not sharer.chain:
                del self._sharers[name]
        elif tag != sharer.next_tag:
            heapq.heappush(self._ahead, (tag, next(self._numbers), name))
        self._weights += sharer.weight * ((tag < math.inf) - (sharer.next_tag < math.inf))
        sharer.next_tag = tag

    def _is_next(self, entry: tuple[float, int, str]) -> bool:
        """Whether an entry of the heap still stands for its sharer."""
        tag, _, name = entry
        sharer = self._sharers.get(name)
        return sharer is not None and sharer.next_tag == tag

    def _advance(self, work: float, now_s: float) -> None:
        while self._ahead:
            tag, _, name = self._ahead[0]
            if not self._is_next(self._ahead[0]):
                heapq.heappop(self._ahead)
                continue
            needed = max(0.0, tag - self.now) * self._weights
            if needed - work > _TINY:
                break
            work = max(0.0, work - needed)
            self.now = max(self.now, tag)
            heapq.heappop(self._ahead)
            sharer = self._sharers[name]
            first, last = bisect_left(sharer.chain, tag, key=_tag), bisect_right(sharer.chain, self.now, key=_tag)
            for passed in sharer.chain[first:last]:
                passed.fair_end_s = now_s
            self._look_ahead(name, sharer)
        if self._weights > _TINY and self._ahead:
            self.now += work / self._weights
        else:
            self._weights = 0.0
