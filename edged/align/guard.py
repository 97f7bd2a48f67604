"""When a version is taken back by itself: the judgement over held-out tests.

Owns the rule. Must not know how a version is restored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edged.align.pair import PairScored
from edged.config import GuardSettings


@dataclass(frozen=True, slots=True)
class HeldOutScore:
    """One held-out test: reward accuracy in [0, 1], KL to the base in nats per answer token, over `pairs` pairs."""

    version: int
    accuracy: float
    kl_nats: float
    pairs: int

    @classmethod
    def of(cls, version: int, scores: Sequence[PairScored]) -> HeldOutScore:
        """Means over the pairs of one test."""
        n = len(scores)
        accuracy = sum(_correct(score.reward_margin) for score in scores) / n
        return cls(version, accuracy, sum(score.kl_nats or 0.0 for score in scores) / n, n)


def _correct(margin: float) -> float:
    # An untrained adapter has margin 0 everywhere: neither right nor wrong.
    return 0.5 if margin == 0 else float(margin > 0)


def judge(score: HeldOutScore, best: HeldOutScore | None, settings: GuardSettings) -> str:
    """Why a version must go, or "" when it may stay."""
    if score.pairs < settings.min_pairs:
        return ""
    if not score.kl_nats <= settings.max_kl_nats:
        return f"guard: KL to the base is {score.kl_nats:.2f} nats per token, the bound is {settings.max_kl_nats:g}"
    if best is not None and best.accuracy - score.accuracy > settings.max_accuracy_drop:
        return (
            f"guard: held-out reward accuracy fell from {best.accuracy:.2f} (version {best.version}) to "
            f"{score.accuracy:.2f}, the bound on the loss is {settings.max_accuracy_drop:g}"
        )
    return ""
