"""Where the engine's time went: the seconds of prefill, decode and fine-tuning, and the iterations by what was in them.

Owns these sums and how a packed forward's time is divided among its members. Must not know clocks: it is told.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from edged.scheduler.cost import CostModel, load_of
from edged.scheduler.task import Kind, Outcome, Result

MIXES = ("serving", "finetune", "hybrid")
"""What an iteration can hold: requests alone, fine-tuning alone, both."""


@dataclass(slots=True)
class Busy:
    """Seconds since start in which the device worked, by what for; time between iterations and launches is in none.

    Written by the engine thread, read by any.
    """

    prefill_s: float = 0.0
    decode_s: float = 0.0
    finetune_s: float = 0.0
    iterations: dict[str, int] = field(default_factory=lambda: dict.fromkeys(MIXES, 0))
    iteration_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(MIXES, 0.0))
    """Whole iterations, from before the pages are taken until the tokens are delivered."""

    def add(self, cost: CostModel, result: Result, elapsed_s: float) -> tuple[float, float, float]:
        """Count an iteration, before its tasks advance; returns what `split` says of it."""
        prefill_s, decode_s, finetune_s = split(cost, result)
        self.prefill_s += prefill_s
        self.decode_s += decode_s
        self.finetune_s += finetune_s
        trained = bool(result.units) or any(outcome.task.kind is Kind.FINETUNE for outcome in result.outcomes)
        served = any(outcome.task.kind is not Kind.FINETUNE for outcome in result.outcomes)
        mix = MIXES[2] if trained and served else MIXES[1] if trained else MIXES[0]
        self.iterations[mix] += 1
        self.iteration_s[mix] += elapsed_s
        return prefill_s, decode_s, finetune_s

    def report(self) -> dict[str, Any]:
        """All sums, for the status."""
        return {
            "prefill_s": self.prefill_s,
            "decode_s": self.decode_s,
            "finetune_s": self.finetune_s,
            "iterations": dict(self.iterations),
            "iteration_s": dict(self.iteration_s),
        }


def split(cost: CostModel, result: Result) -> tuple[float, float, float]:
    """Seconds of a measured iteration for prefill, decode and fine-tuning; they add up to its forward and units.

    Fine-tune tokens pay what they are predicted to have added to the forward (MACE packs them into what serving leaves
    free); prefill and decode share the rest as their predicted forwards alone are to one another.
    """
    units_s = sum(seconds for _, seconds in result.units)
    members = {kind: [outcome for outcome in result.outcomes if outcome.task.kind is kind] for kind in Kind}
    prefills, decodes, finetunes = members[Kind.PREFILL], members[Kind.DECODE], members[Kind.FINETUNE]
    serving_s = result.forward_s
    if any(outcome.tokens for outcome in finetunes):
        whole_s = cost.forward_s(load_of(result))
        serving_s *= min(1.0, _forward_s(cost, prefills + decodes) / whole_s) if whole_s > 0.0 else 0.0
    alone_s = _forward_s(cost, prefills) if prefills else 0.0
    both_s = alone_s + (_forward_s(cost, decodes) if decodes else 0.0)
    prefill_s = serving_s * alone_s / both_s if both_s > 0.0 else 0.0
    return prefill_s, serving_s - prefill_s, units_s + result.forward_s - serving_s


def _forward_s(cost: CostModel, outcomes: list[Outcome]) -> float:
    """Predicted seconds of a forward of these alone."""
    return cost.forward_s(load_of(Result(outcomes)))
