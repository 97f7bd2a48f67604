"""The guard's rule: when a version is taken back by itself, as its test of language and of held-out pairs came out.

Language comes first: an adapter that breaks it tells nothing true of any pair.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from edged.align.feedback.pair import PairScored
from edged.settings.load import GuardSettings

_CHANCE = 0.05
"""Most probability of a loss of accuracy by chance alone at which a version is taken back."""
_CALM_NLL, _CALM_KL = 0.05, 0.3
"""Shares of the bounds on language up to which steps are taken whole."""


@dataclass(frozen=True, slots=True)
class TestScore:
    """One version's test: held-out pairs that were right, KL to the base, change of neutral text's NLL."""

    __test__ = False

    version: int
    correct: Mapping[int, float]
    """1 right, 0 wrong, 0.5 undecided, by pair id."""
    kl_nats: float | None
    """Mean over the tokens of the held-out answers; None without any."""
    nll_change: float | None = None
    """Of neutral text, relative to the base: 0.02 is 2 % more; None without such text."""

    @classmethod
    def of(cls, version: int, scores: Sequence[PairScored], neutral: tuple[float, float] | None = None) -> TestScore:
        """The score that a test's figures come to; `neutral` is the NLL under (the adapter, the base)."""
        tokens = [score.chosen_tokens + score.rejected_tokens or 1 for score in scores]
        kl = sum((score.kl_nats or 0.0) * count for score, count in zip(scores, tokens, strict=True))
        return cls(
            version,
            {score.pair_id: _correct(score.reward_margin) for score in scores},
            kl / sum(tokens) if scores else None,
            neutral[0] / neutral[1] - 1.0 if neutral else None,
        )

    def accuracy(self, pairs: Collection[int]) -> float:
        """Reward accuracy in [0, 1] over `pairs`, all of which it must have scored."""
        return sum(self.correct[pair] for pair in pairs) / len(pairs)

    def better_than(self, best: TestScore | None, settings: GuardSettings) -> bool:
        """Whether later versions are to be compared with this one: it is as good on the pairs that both scored."""
        if len(self.correct) < settings.min_pairs:
            return False
        common = self.correct.keys() & best.correct.keys() if best else ()
        return best is None or not common or self.accuracy(common) >= best.accuracy(common)


def _correct(margin: float) -> float:
    # An untrained adapter has margin 0 everywhere: neither right nor wrong.
    return 0.5 if margin == 0 else float(margin > 0)


def broken_language(score: TestScore, settings: GuardSettings) -> str:
    """Why a version's language is broken, or ""."""
    if score.kl_nats is not None and not score.kl_nats <= settings.max_kl_nats:
        return f"KL to the base is {score.kl_nats:.2f} nats a token, the bound is {settings.max_kl_nats:g}"
    if score.nll_change is not None and not score.nll_change <= settings.max_nll_change:
        return f"NLL of neutral text is {score.nll_change:+.0%}, the bound is {settings.max_nll_change:+.0%}"
    return ""


def caution(score: TestScore, settings: GuardSettings) -> float:
    """Share of the step size that is left to a version this near to the bounds on language, over 0 and at most 1.

    Steps shrink from a twentieth of the bound on neutral text on, and from three tenths of that on KL, by the square.
    """
    nll, kl = score.nll_change or 0.0, score.kl_nats or 0.0
    nearest = max(nll / (_CALM_NLL * settings.max_nll_change), kl / (_CALM_KL * settings.max_kl_nats), 1.0)
    return nearest**-2


def lost_accuracy(score: TestScore, best: TestScore | None, settings: GuardSettings) -> str:
    """Why a version knows the user's preferences worse than `best` did, or "": by the pairs that both were tested on.

    The loss must be large, and unlikely to be chance (an exact sign test over the pairs that changed, one-sided).
    """
    common = score.correct.keys() & best.correct.keys() if best else set()
    if best is None or len(common) < settings.min_pairs:
        return ""
    before, now = best.accuracy(common), score.accuracy(common)
    lost = sum(score.correct[pair] < best.correct[pair] for pair in common)
    won = sum(score.correct[pair] > best.correct[pair] for pair in common)
    if before - now <= settings.max_accuracy_drop or _by_chance(won, lost + won) > _CHANCE:
        return ""
    return (
        f"held-out reward accuracy fell from {before:.2f} (version {best.version}) to {now:.2f} on "
        f"{len(common)} pairs, the bound on the loss is {settings.max_accuracy_drop:g}"
    )


def _by_chance(won: int, changed: int) -> float:
    """Probability that of `changed` pairs at most `won` turn out better where both ways are as likely."""
    return sum(math.comb(changed, count) for count in range(won + 1)) / 2**changed
