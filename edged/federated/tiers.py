"""Device matching (Venn Algorithm 4): a request may wait for boxes of one speed, so that its answers come together."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

_TAIL = 0.95
_MIN_PARTICIPANTS = 20
"""Earlier participants a tier, without which a campaign is matched with any box."""
_MAX_PARTICIPANTS = 400


@dataclass(frozen=True, slots=True)
class Tier:
    """The boxes of `from_speed` <= tokens a second < `below_speed`."""

    from_speed: float
    below_speed: float
    speedup: float
    """95th percentile of the tier's response times over that of all (g_u)."""
    response_s: float
    """The latter: t_response."""

    def holds(self, speed: float) -> bool:
        """Tell whether a box of this speed is in it."""
        return self.from_speed <= speed < self.below_speed

    def gain_s(self, schedule_s: float, tier_schedule_s: float) -> float:
        """Return the seconds by which waiting for the tier ends a round earlier, from the waits for any box and for it.

        It is above 0 where V + g_u c < 1 + c: Algorithm 4's line 5 for a wait that is V times as long.
        """
        return schedule_s - tier_schedule_s + (1 - self.speedup) * self.response_s


@dataclass(slots=True)
class TierProfile:
    """Speeds and response times of a campaign's latest participants."""

    responses: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=_MAX_PARTICIPANTS))

    def draw(self, tiers: int, chance: random.Random) -> Tier | None:
        """Draw one of so many tiers, even by speed; None while too few participants are known."""
        if len(self.responses) < tiers * _MIN_PARTICIPANTS:
            return None
        speeds = sorted(speed for speed, _ in self.responses)
        cuts = [float("-inf"), *(speeds[len(speeds) * cut // tiers] for cut in range(1, tiers)), float("inf")]
        drawn = chance.randrange(tiers)
        low, high = cuts[drawn : drawn + 2]
        own = [response_s for speed, response_s in self.responses if low <= speed < high]
        whole_s = _tail([response_s for _, response_s in self.responses])
        return Tier(low, high, _tail(own) / whole_s, whole_s) if own and whole_s else None


def _tail(responses_s: list[float]) -> float:
    """Return the 95th percentile."""
    return sorted(responses_s)[int(_TAIL * len(responses_s))]
