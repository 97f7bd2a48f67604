"""Which open round gets which boxes: Venn over boxes that say, at each tick, whether they may take part. No NVFlare."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from edged.federated.campaigns import Campaign, RoundRequest
from edged.federated.device_scheduler import DeviceScheduler
from edged.federated.policies import POLICIES
from edged.federated.signature import Capacity


@dataclass(frozen=True, slots=True)
class WaitingRound:
    """A round that asks for boxes: `counted` are those whose records the hub has from before it was interrupted."""

    campaign: Campaign
    rounds_left: int
    counted: frozenset[str] = frozenset()

    @property
    def missing(self) -> Campaign:
        """The campaign as it asks for boxes now."""
        return replace(self.campaign, demand=max(1, self.campaign.demand - len(self.counted)))


@dataclass(frozen=True, slots=True)
class BoxGrant:
    """A job whose round has its boxes."""

    job: str
    boxes: dict[str, Capacity]
    dispatched_s: float


class Dispatcher:
    """Open rounds by the job that does them, and the boxes that wait. `now` is in seconds of any clock."""

    def __init__(self, chance: random.Random, policy: str = "venn") -> None:
        self._scheduler = DeviceScheduler(POLICIES[policy], chance)
        self._requests: dict[str, RoundRequest] = {}
        self._waiting: dict[str, Capacity] = {}

    def tick(self, rounds: Mapping[str, WaitingRound], able: Mapping[str, Capacity], now: float) -> list[BoxGrant]:
        """Take in what is open and who is able now, and return the jobs that have their boxes."""
        # First: what opens below is granted idle boxes at once.
        for box in [box for box, capacity in self._waiting.items() if able.get(box) != capacity]:
            self._scheduler.leave(box, self._waiting.pop(box))
        for job in [job for job in self._requests if job not in rounds]:
            self._scheduler.withdraw(self._requests.pop(job), now)
        for job, each in rounds.items():
            if job not in self._requests:
                self._requests[job] = self._scheduler.request(each.missing, each.rounds_left, now)
        for box, capacity in able.items():
            # A request that has just filled up holds its boxes no more: they are not new ones.
            is_granted = any(box in request.granted for request in self._scheduler.full)
            if not is_granted and not _is_counted(box, rounds.values()):
                self._waiting[box] = capacity
                self._scheduler.check_in(box, capacity, now)
        full, self._scheduler.full[:] = list(self._scheduler.full), []
        return [self._grant(request, now) for request in full]

    def answered(self, campaign: Campaign, grant: BoxGrant, responses_s: Mapping[str, float]) -> None:
        """Learn how long the boxes of a round took from its dispatch."""
        for box, response_s in responses_s.items():
            if box in grant.boxes:
                self._scheduler.answered(campaign, grant.boxes[box], response_s)

    def ended(self, campaign: Campaign) -> None:
        """Forget a campaign."""
        self._scheduler.ended(campaign)

    def _grant(self, request: RoundRequest, now: float) -> BoxGrant:
        job = next(job for job, own in self._requests.items() if own is request)
        del self._requests[job]
        for box in request.granted:
            del self._waiting[box]
        return BoxGrant(job, dict(request.granted), now)


def _is_counted(box: str, rounds: Collection[WaitingRound]) -> bool:
    """Tell whether all open rounds have this box's record."""
    return bool(rounds) and all(box in each.counted for each in rounds)
