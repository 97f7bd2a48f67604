"""The guard: its state of each adapter, and whether a version's test of language and held-out pairs takes it back.

Language comes first: the scores of an adapter that breaks it say nothing about any pair.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from statistics import fmean
from typing import Literal

from edged.align.adapters.adapter import CopiedVersion
from edged.align.feedback.pair import PairScored
from edged.runtime.chance import by_chance
from edged.settings.load import GuardSettings

MIN_PAIRS = 4
"""Held-out pairs that the guard needs before it judges."""
MAX_ACCURACY_DROP = 0.34
"""Held-out reward accuracy that may be lost against the best version."""
_CHANCE = 0.05
"""Highest probability that a loss of accuracy is chance at which a version is taken back."""
_CALM_NLL, _CALM_KL = 0.05, 0.3
"""Shares of the bounds on language up to which steps keep their full size."""

_CHANGE_ENDS = 8
"""Number of first and of last pairs whose mean losses are compared."""
_CHANGE_LEAST, _CHANGE_MOST = 12, 64
"""Pairs after which a change may be recognised, and after which pairs without one count as confusion."""
_OPPOSED = 0.6
"""Share of the first pairs that must contradict what was learned for a change."""
_FALLEN = 0.8
"""Share of the first pairs' mean loss to which new pairs' must fall: pairs of a coherent change predict each other."""


@dataclass(frozen=True, slots=True)
class TestScore:
    """The score of a version's test: held-out pairs that were right, KL to the base, change of neutral text's NLL."""

    __test__ = False

    version: int
    correct: Mapping[int, float]
    """Correctness by pair id: 1 right, 0 wrong, 0.5 undecided."""
    kl_nats: float | None
    """Mean KL to the base over the tokens of the held-out answers; None without any."""
    nll_change: float | None = None
    """Change of neutral text's NLL relative to the base: 0.02 is 2 % more; None without such text."""

    @classmethod
    def of(cls, version: int, scores: Sequence[PairScored], neutral: tuple[float, float] | None = None) -> TestScore:
        """The score made of a test's scores; `neutral` is the NLL under (the adapter, the base).

        A single rating is right where the answer's reward is on its side of the middle between those of good and of
        bad answers: all rewards fall or rise together. It is undecided while there are no others of the other kind.
        """
        rewards = [[s.rating * s.reward_margin for s in scores if s.rating == kind] for kind in (1, -1)]
        middle = sum(map(fmean, rewards)) / 2 if all(rewards) else None

        def margin(score: PairScored) -> float:
            return 0.0 if score.rating and middle is None else score.reward_margin - score.rating * (middle or 0.0)

        tokens = [score.chosen_tokens + score.rejected_tokens or 1 for score in scores]
        kl = sum((score.kl_nats or 0.0) * count for score, count in zip(scores, tokens, strict=True))
        return cls(
            version,
            # An untrained adapter has margin 0 everywhere: neither right nor wrong.
            {s.pair_id: 0.5 if margin(s) == 0 else float(margin(s) > 0) for s in scores},
            kl / sum(tokens) if scores else None,
            neutral[0] / neutral[1] - 1.0 if neutral else None,
        )

    def accuracy(self, pairs: Collection[int]) -> float:
        """Reward accuracy in [0, 1] over `pairs`, all of which it must have scored."""
        return sum(self.correct[pair] for pair in pairs) / len(pairs)

    def better_than(self, best: TestScore | None) -> bool:
        """Whether later versions are to be compared with this score: it is no worse on the pairs that both have."""
        if len(self.correct) < MIN_PAIRS:
            return False
        common = self.correct.keys() & best.correct.keys() if best else ()
        return best is None or not common or self.accuracy(common) >= best.accuracy(common)


@dataclass(slots=True)
class PreferenceChange:
    """A possible change of a user's preferences under observation: trained on at once, and kept where it proves true.

    It has the first-party pairs since they began to contradict earlier ones, with their losses before training (nats).
    """

    since: int
    """The version before the change; 0: the untrained adapter."""
    pair_ids: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    contrary: list[bool] = field(default_factory=list)
    """Whether the adapter preferred the rejected answer, by pair."""
    longer: int = 0
    """Tokens by which the chosen answers are longer than the rejected ones, summed."""

    def take(self, pair_id: int, loss: float, contrary: bool, longer: int) -> None:
        """Add a pair, scored before it is trained on."""
        self.pair_ids.append(pair_id)
        self.losses.append(loss)
        self.contrary.append(contrary)
        self.longer += longer

    @property
    def verdict(self) -> Literal["", "change", "confusion"]:
        """The verdict on the pairs so far; "" while undecided."""
        opposed = len(self.losses) >= _CHANGE_LEAST and fmean(self.contrary[:_CHANGE_LEAST]) >= _OPPOSED
        if opposed and fmean(self.losses[-_CHANGE_ENDS:]) <= _FALLEN * fmean(self.losses[:_CHANGE_ENDS]):
            return "change"
        return "confusion" if len(self.losses) >= _CHANGE_MOST else ""

    @property
    def summary(self) -> str:
        """A description of the change in a few words."""
        mean = self.longer / max(len(self.pair_ids), 1)
        summary = f"preferences have changed since version {self.since}: {len(self.pair_ids)} pairs"
        if abs(mean) < 1:
            return summary
        return f"{summary}, for answers {abs(mean):.0f} tokens {'longer' if mean > 0 else 'shorter'}"


class AdapterHealth(Enum):
    """The judgement of an adapter's current version."""

    SOUND = "sound"
    """Nothing speaks against it; it is tested in its turn."""
    SUSPECT = "suspect"
    """It is tested before the adapter's next step, since it or a pair is strange."""
    WITHDRAWN = "withdrawn"
    """It is bad, and another one is read to take its place: nothing begins with it."""


@dataclass(slots=True)
class GuardState:
    """The guard's state of one adapter: versions tested, the version to restore, and how large steps may be."""

    health: AdapterHealth = AdapterHealth.SOUND
    tested_version: int = -1
    fully_tested: int = 0
    """The version last tested with all held-out pairs."""
    not_finite_version: int = -1
    """The latest version that answered with numbers that are not finite."""
    withdrawn: set[int] = field(default_factory=set)
    """Versions that are not to be restored."""
    restored_version: int = 0
    """The version whose weights were restored last."""
    restored_at_step: int = 0
    """Number of steps that had ended at that restoration."""
    best: TestScore | None = None
    """The score that later versions are compared with."""
    third_party_since_best: int = 0
    """By how many the third-party pairs outnumber first-party ones, of those trained on since `best`."""
    last_good: CopiedVersion | None = None
    """The newest version that passed its test, with the optimizer's moments."""
    lr_scale: float = 1.0
    """Factor of the step size, halved each time that the language broke."""
    passed_in_a_row: int = 0
    """Tests passed since the last failed one, or since `lr_scale` was doubled."""
    lr_scale_margin: float = 1.0
    """Another factor of the step size, smaller the nearer the latest tested version is to the bounds on language."""
    change: PreferenceChange | None = None
    """The change of preferences under observation."""
    version_before_change: int = 0
    """The version before the latest change of preferences."""
    baseline_version: int = 0
    """The version that a fine-tuning job left, 0: none. Its language judges later ones; none before it is restored."""
    baseline_nll_change: float | None = None
    """Change of neutral text's NLL of the baseline version, not under 0; None: not measured."""
    baseline_kl_nats: float | None = None
    """Highest KL to the base at a test of the baseline version, or of its weights; None: not measured."""

    def request_test(self) -> None:
        """Have the current version tested before the next step; one that was withdrawn is replaced instead."""
        if self.health is not AdapterHealth.WITHDRAWN:
            self.health = AdapterHealth.SUSPECT

    def take_test(self, version: int) -> None:
        """Take in that a version was tested, or that its test was given up."""
        self.tested_version = version
        if self.health is AdapterHealth.SUSPECT:
            self.health = AdapterHealth.SOUND

    def measure_baseline(self, score: TestScore) -> None:
        """Take in a test of the baseline version's weights: later versions are judged by it."""
        if score.nll_change is not None and math.isfinite(score.nll_change):
            self.baseline_nll_change = max(0.0, score.nll_change)
        if score.kl_nats is not None and math.isfinite(score.kl_nats):
            self.baseline_kl_nats = max(self.baseline_kl_nats or 0.0, score.kl_nats)

    def relative(self, score: TestScore) -> TestScore:
        """A score whose language is compared with the baseline version's, as far as measured, and not the base's."""
        nll, kl = score.nll_change, score.kl_nats
        if nll is not None:
            nll = (1.0 + nll) / (1.0 + (self.baseline_nll_change or 0.0)) - 1.0
        return replace(score, kl_nats=kl if kl is None else kl - (self.baseline_kl_nats or 0.0), nll_change=nll)

    def comparable(self, score: TestScore) -> TestScore:
        """A score without the language that was not measured of the baseline version, if there is one."""
        if not self.baseline_version:
            return score
        kl = None if self.baseline_kl_nats is None else score.kl_nats
        return replace(score, kl_nats=kl, nll_change=None if self.baseline_nll_change is None else score.nll_change)


def broken_language(score: TestScore, settings: GuardSettings) -> str:
    """The reason why a version's language is broken, or ""."""
    if score.kl_nats is not None and not score.kl_nats <= settings.max_kl_nats:
        return f"KL to the base is {score.kl_nats:.2f} nats a token, the bound is {settings.max_kl_nats:g}"
    if score.nll_change is not None and not score.nll_change <= settings.max_nll_change:
        return f"NLL of neutral text is {score.nll_change:+.0%}, the bound is {settings.max_nll_change:+.0%}"
    return ""


def lr_scale_margin(score: TestScore, settings: GuardSettings) -> float:
    """The factor, in (0, 1], of the step size of a version this near to the bounds on language.

    Steps shrink by the square from a twentieth of the bound on neutral text on, and from three tenths of that on KL.
    """
    nll, kl = score.nll_change or 0.0, score.kl_nats or 0.0
    nearest = max(nll / (_CALM_NLL * settings.max_nll_change), kl / (_CALM_KL * settings.max_kl_nats), 1.0)
    return nearest**-2


def lost_accuracy(score: TestScore, best: TestScore | None) -> str:
    """The reason why a version predicts preferences worse than `best`, or "", by the pairs that both were tested on.

    The loss must be large, and unlikely to be chance (an exact sign test over the pairs that changed, one-sided).
    """
    common = score.correct.keys() & best.correct.keys() if best else set()
    if best is None or len(common) < MIN_PAIRS:
        return ""
    before, now = best.accuracy(common), score.accuracy(common)
    lost = sum(score.correct[pair] < best.correct[pair] for pair in common)
    won = sum(score.correct[pair] > best.correct[pair] for pair in common)
    if before - now <= MAX_ACCURACY_DROP or by_chance(lost, lost + won) > _CHANCE:
        return ""
    fell = f"held-out reward accuracy fell from {before:.2f} (version {best.version}) to {now:.2f}"
    return f"{fell} on {len(common)} pairs, the bound on the loss is {MAX_ACCURACY_DROP:g}"
