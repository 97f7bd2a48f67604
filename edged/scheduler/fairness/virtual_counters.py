"""Virtual token counters (Sheng et al., OSDI 2024): the service that each user has had, over the user's weight."""

from collections import OrderedDict
from collections.abc import Callable, Iterable

MAX_NAMES = 10_000
"""Names whose counters are kept. Beyond it the one that was idle longest is forgotten: it starts where the least of
those who wait stands, so it gains no more than its distance to that one, which Lemma 1 bounds."""


class VirtualCounters:
    """A counter for each name; the name with the least counter is served next.

    A name is queued while requests of its wait. `arrived` and `left` count these, `charge` counts service.
    """

    def __init__(self, weight: Callable[[str], float], most: int = MAX_NAMES) -> None:
        """`weight` returns the share of a name in relation to others, above 0."""
        self._weight, self._most = weight, most
        self._counters: OrderedDict[str, float] = OrderedDict()
        self._queued: dict[str, int] = {}
        self._last = ""
        """The name that was queued last of all, of use while none is."""

    def __len__(self) -> int:
        """Return the number of names in memory."""
        return len(self._counters)

    def counter(self, name: str) -> float:
        """Return a name's counter; that of an unknown one is 0 until it arrives."""
        return self._counters.get(name, 0.0)

    def of(self, names: Iterable[str]) -> list[float]:
        """Return the counters of names."""
        known = self._counters.get
        return [known(name, 0.0) for name in names]

    @property
    def queued(self) -> dict[str, float]:
        """The counters of the names that are queued."""
        return {name: self._counters[name] for name in self._queued}

    def backlog(self, name: str) -> int:
        """Return the number of a name's requests that wait."""
        return self._queued.get(name, 0)

    def latest(self, most: int) -> list[tuple[str, float]]:
        """Return the names that were active last with their counters, at most so many; any thread may ask."""
        return list(self._counters.items())[: -most - 1 : -1]

    def arrived(self, name: str) -> None:
        """Count a request that waits. A name that was not queued is lifted to the least that is, or to the last one.

        So nobody saves up service by asking for nothing.
        """
        if name not in self._queued:
            least = min([self._counters[other] for other in self._queued], default=self.counter(self._last))
            self._set(name, max(self.counter(name), least))
        self._queued[name] = self._queued.get(name, 0) + 1

    def left(self, name: str) -> None:
        """Count a request as not waiting any more: it was begun or cancelled."""
        self._queued[name] -= 1
        if not self._queued[name]:
            del self._queued[name]
            self._last = name

    def charge(self, name: str, service: float) -> None:
        """Count service that a name gets, by its weight."""
        self._set(name, self.counter(name) + service / self._weight(name))

    def refund(self, name: str, service: float) -> None:
        """Take back what was charged for work that was not needed, as far as it leaves the name with the least.

        Below that it would have saved up service: see `arrived`.
        """
        least = min([self._counters[other] for other in self._queued if other != name], default=0.0)
        counter = self.counter(name)
        self._set(name, max(counter - service / self._weight(name), min(counter, least)))

    def _set(self, name: str, counter: float) -> None:
        self._counters[name] = counter
        self._counters.move_to_end(name)
        if len(self._counters) > self._most:
            idle = next((known for known in self._counters if known not in self._queued and known != self._last), name)
            if idle != name:
                del self._counters[idle]
