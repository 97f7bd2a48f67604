"""Campaigns, which are the jobs of a federation, and the requests for boxes that their rounds make."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil

from edged.federated.signature import Capacity
from edged.federated.tiers import Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class Campaign:
    """A federated job: so many rounds of `demand` boxes each, one after the other."""

    name: str
    submitted_s: float
    requires: Capacity
    demand: int
    rounds: int
    deadline_s: float
    """Seconds from a round's dispatch within which it has enough answers; else it is asked for again."""
    overcommit: float = 1.3
    min_response: float = 0.8
    declares_rounds: bool = False
    """Whether the scheduler may know `rounds`."""

    @property
    def asked(self) -> int:
        """Boxes that a round asks for."""
        return ceil(self.demand * self.overcommit)

    @property
    def needed(self) -> int:
        """Answers with which a round succeeds."""
        return ceil(self.demand * self.min_response)


@dataclass(slots=True, eq=False)
class RoundRequest:
    """A campaign's request for a round's boxes, open until it has as many as it asks for."""

    campaign: Campaign
    opened_s: float
    asked: int
    later: int
    """Boxes that later rounds will ask for, where the campaign declares them; else 0."""
    draw: float
    """A number between 0 and 1, by chance."""
    granted: dict[str, Capacity] = field(default_factory=dict)
    """What its boxes have, by name."""
    was_head: bool = False
    tier: Tier | None = None
    """The boxes to which it is confined; None: all."""
    tier_until_s: float = 0.0
    """The tier is not worth waiting for any longer."""

    @property
    def missing(self) -> int:
        """Boxes that it still asks for."""
        return self.asked - len(self.granted)

    @property
    def demand(self) -> int:
        """Remaining demand."""
        return self.asked - len(self.granted) + self.later

    def takes(self, capacity: Capacity, now: float) -> bool:
        """Tell whether its tier, if any, lets it have a box that meets the requirements."""
        return self.tier is None or now >= self.tier_until_s or self.tier.holds(capacity.tokens_per_s)
