"""The device scheduler: which open request gets a box that checks in, by a policy. It reads no clock and sends nothing.

Boxes that nobody needs stay known as idle until they leave. A plan is made anew when a request opens, is full or is
withdrawn; between two plans a box costs a lookup.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from math import inf

from edged.federated.campaigns import Campaign, RoundRequest
from edged.federated.policies import DevicePolicy, Queues
from edged.federated.signature import Capacity, signature
from edged.federated.supply import Supply
from edged.federated.tiers import TierProfile


class DeviceScheduler:
    """Boxes and open requests. `now` is in seconds of any clock that does not go back."""

    def __init__(self, policy: DevicePolicy, chance: random.Random, max_tiers: int = 2) -> None:
        self.open: list[RoundRequest] = []
        self.full: list[RoundRequest] = []
        """Requests that have all their boxes: the caller takes them out and dispatches them."""
        self.idle: defaultdict[Capacity, dict[str, None]] = defaultdict(dict)
        """Names of idle boxes by what they have."""
        self._held: dict[str, RoundRequest] = {}
        """Open requests by the boxes that they have."""
        self._policy, self._chance, self._max_tiers = policy, chance, max_tiers
        self._arrived: Supply[Capacity] = Supply()
        self._asked: Supply[None] = Supply()
        self._profiles: defaultdict[str, TierProfile] = defaultdict(TierProfile)
        self._required: list[Capacity] = []
        self._atoms: dict[Capacity, int] = {}
        self._queues: Queues = {}
        self._lapse_s = inf
        """When the next tier lapses."""

    def check_in(self, box: str, capacity: Capacity, now: float) -> RoundRequest | None:
        """Take in a box that is ready to serve, and return the request that it is granted to, if any needs it.

        A box that is known already, idle or granted, stays what it is.
        """
        if box in self._held or box in self.idle[capacity]:
            return self._held.get(box)
        self._arrived.add(capacity, now)
        if capacity not in self._atoms:
            self._atoms[capacity] = signature(capacity, self._required)
        if self._atoms[capacity] not in self._queues:
            self._plan(now)
        if now >= self._lapse_s:
            self.match(now)
        return self._grant(box, capacity, now)

    def leave(self, box: str, capacity: Capacity) -> None:
        """Forget a box that is idle or was granted to a request that is still open."""
        self.idle[capacity].pop(box, None)
        if box in self._held:
            del self._held.pop(box).granted[box]

    def request(self, campaign: Campaign, rounds_left: int, now: float) -> RoundRequest:
        """Open a request for a campaign's next round, and grant it idle boxes."""
        later = (rounds_left - 1) * campaign.asked if campaign.declares_rounds else 0
        opened = RoundRequest(campaign, now, campaign.asked, later, self._chance.random())
        if campaign.requires not in self._required:
            self._required.append(campaign.requires)
            self._atoms = {capacity: signature(capacity, self._required) for capacity in self._atoms}
        self._asked.add(None, now, campaign.asked)
        self.open.append(opened)
        self._plan(now)
        self.match(now)
        return opened

    def withdraw(self, request: RoundRequest, now: float) -> None:
        """Close an open request; its boxes go to others."""
        self._close(request, now)
        for box, capacity in request.granted.items():
            self._grant(box, capacity, now)

    def answered(self, campaign: Campaign, capacity: Capacity, response_s: float) -> None:
        """Learn how long a participant took from the dispatch to its answer, which may be late."""
        self._profiles[campaign.name].responses.append((capacity.tokens_per_s, response_s))

    def ended(self, campaign: Campaign) -> None:
        """Forget a campaign's participants."""
        self._profiles.pop(campaign.name, None)

    def match(self, now: float) -> None:
        """Grant idle boxes that are needed, those of the fewest requirements first."""
        lapses = (request.tier_until_s for request in self.open if request.tier and request.tier_until_s > now)
        self._lapse_s = min(lapses, default=inf)
        for capacity in sorted(self.idle, key=lambda capacity: self._atoms[capacity].bit_count()):
            names = self.idle[capacity]
            while names and self._grant(names.popitem()[0], capacity, now):
                pass

    def _grant(self, box: str, capacity: Capacity, now: float) -> RoundRequest | None:
        """Give a box to the first request that takes it; without one, it is idle."""
        for requests in self._queues[self._atoms[capacity]]:
            for request in requests:
                if request.takes(capacity, now):
                    request.granted[box] = capacity
                    self._held[box] = request
                    if not request.missing:
                        self.full.append(request)
                        self._close(request, now)
                    return request
        self.idle[capacity][box] = None
        return None

    def _close(self, request: RoundRequest, now: float) -> None:
        self.open.remove(request)
        for box in request.granted:
            del self._held[box]
        self._plan(now)

    def _plan(self, now: float) -> None:
        """Make the plan anew, as Venn does at each request's arrival and completion (4.4.2)."""
        self._arrived.forget(now)
        self._asked.forget(now)
        known = Counter({capacity: 1 for capacity, names in self.idle.items() if names}) | self._arrived.counts
        supply: Counter[int] = Counter()
        for capacity, count in known.items():
            supply[self._atoms[capacity]] += count
        eligible = {
            capacity: frozenset(atom for atom in supply if atom >> bit & 1)
            for bit, capacity in enumerate(self._required)
        }
        groups: defaultdict[frozenset[int], list[RoundRequest]] = defaultdict(list)
        for request in self.open:
            groups[eligible[request.campaign.requires]].append(request)
        self._queues = self._policy.queues(groups, supply)
        if self._policy.queue_length and self._max_tiers > 1 and supply.total() > self._asked.counts[None]:
            for requests in groups.values():
                own = {atom for atom, ranked in self._queues.items() if ranked and ranked[0] is requests}
                if own and not requests[0].was_head:
                    self._confine(requests[0], own, now)

    def _confine(self, request: RoundRequest, atoms: set[int], now: float) -> None:
        """Draw a tier for a request that has become the first of its group, and set it where that pays (Algorithm 4).

        The paper's waits are the demand over the arrivals; here idle boxes shorten them, and a tier's arrivals count.
        """
        request.was_head = True
        tier = self._profiles[request.campaign.name].draw(self._max_tiers, self._chance)
        if tier is None:
            return
        own = [capacity for capacity, atom in self._atoms.items() if atom in atoms]
        any_s = self._wait_s(request.missing, own, now)
        tier_s = self._wait_s(request.missing, [each for each in own if tier.holds(each.tokens_per_s)], now)
        gain_s = tier.gain_s(any_s, tier_s)
        if gain_s > 0:
            request.tier, request.tier_until_s = tier, now + tier_s + gain_s
            self._lapse_s = min(self._lapse_s, request.tier_until_s)

    def _wait_s(self, missing: int, own: list[Capacity], now: float) -> float:
        """Return the seconds until so many boxes of these capacities are there, by those idle and the arrivals."""
        missing -= sum(len(self.idle[capacity]) for capacity in own if capacity in self.idle)
        arrived = sum(self._arrived.counts[capacity] for capacity in own)
        if missing <= 0:
            return 0.0
        return missing * self._arrived.span_s(now) / arrived if arrived else inf
