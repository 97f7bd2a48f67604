"""A change of a user's preferences under observation: it is followed at once, and kept where it proves to be one."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import fmean
from typing import Literal

_FEW = 8
"""Pairs at either end whose mean losses are compared."""
_LEAST, _MOST = 12, 64
"""Pairs after which a change may be recognised, and after which pairs that teach nothing are confusion."""
_OPPOSED = 0.6
"""A change is one where so many of the first pairs contradict what was learned, and not just some of them."""
_FALLEN = 0.8
"""A change is coherent where new pairs' losses have fallen to this share: what was learned from some tells others."""


@dataclass(slots=True)
class PreferenceChange:
    """The direct pairs since they began to say something else than before, with their losses before training (nats)."""

    since: int
    """The version before; 0: the untrained adapter."""
    pair_ids: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    contrary: list[bool] = field(default_factory=list)
    """Whether the adapter preferred the other answer."""
    longer: int = 0
    """Tokens that the preferred answers are longer than the others, summed."""

    def take(self, pair_id: int, loss: float, contrary: bool, longer: int) -> None:
        """One more pair, scored before it is trained on."""
        self.pair_ids.append(pair_id)
        self.losses.append(loss)
        self.contrary.append(contrary)
        self.longer += longer

    @property
    def verdict(self) -> Literal["", "change", "confusion"]:
        """What it has turned out to be; "" while that is open."""
        opposed = len(self.losses) >= _LEAST and fmean(self.contrary[:_LEAST]) >= _OPPOSED
        if opposed and fmean(self.losses[-_FEW:]) <= _FALLEN * fmean(self.losses[:_FEW]):
            return "change"
        return "confusion" if len(self.losses) >= _MOST else ""

    @property
    def told(self) -> str:
        """The change in a few words."""
        mean = self.longer / max(len(self.pair_ids), 1)
        told = f"preferences have changed since version {self.since}: {len(self.pair_ids)} pairs"
        if abs(mean) < 1:
            return told
        return f"{told}, for answers {abs(mean):.0f} tokens {'longer' if mean > 0 else 'shorter'}"
