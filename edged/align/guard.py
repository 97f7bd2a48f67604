"""When a version is taken back by itself: the judgement over held-out tests.

Owns the rule. Must not know how a version is restored.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from edged.align.pair import PairScored
from edged.config import GuardSettings


@dataclass(frozen=True, slots=True)
class HeldOutScore:
    """One held-out test: per pair whether its margin was right; the mean KL to the base in nats per answer token."""

    version: int
    correct: Mapping[int, float]
    """1 right, 0 wrong, 0.5 undecided, by pair id."""
    kl_nats: float

    @classmethod
    def of(cls, version: int, scores: Sequence[PairScored]) -> HeldOutScore:
        """What one test's scores come to."""
        correct = {score.pair_id: _correct(score.reward_margin) for score in scores}
        return cls(version, correct, sum(score.kl_nats or 0.0 for score in scores) / len(scores))

    def accuracy(self, pairs: Collection[int]) -> float:
        """Reward accuracy in [0, 1] over `pairs`, all of which it must have scored."""
        return sum(self.correct[pair] for pair in pairs) / len(pairs)

    def better_than(self, best: HeldOutScore | None, settings: GuardSettings) -> bool:
        """Whether it is to be the one that later versions are compared with: as good on the pairs that both scored."""
        if len(self.correct) < settings.min_pairs:
            return False
        common = self.correct.keys() & best.correct.keys() if best else ()
        return best is None or not common or self.accuracy(common) >= best.accuracy(common)


def _correct(margin: float) -> float:
    # An untrained adapter has margin 0 everywhere: neither right nor wrong.
    return 0.5 if margin == 0 else float(margin > 0)


def judge(score: HeldOutScore, best: HeldOutScore | None, settings: GuardSettings) -> str:
    """Why a version must go, or "" when it may stay."""
    if len(score.correct) < settings.min_pairs:
        return ""
    if not score.kl_nats <= settings.max_kl_nats:
        return f"guard: KL to the base is {score.kl_nats:.2f} nats per token, the bound is {settings.max_kl_nats:g}"
    common = score.correct.keys() & best.correct.keys() if best else set()
    if best is None or len(common) < settings.min_pairs:
        return ""
    before, now = best.accuracy(common), score.accuracy(common)
    if before - now > settings.max_accuracy_drop:
        return (
            f"guard: held-out reward accuracy fell from {before:.2f} (version {best.version}) to {now:.2f} on "
            f"{len(common)} pairs, the bound on the loss is {settings.max_accuracy_drop:g}"
        )
    return ""
