"""The detector of poisoned pairs: judges an adapter's new pairs by loss, earlier preferences and the step's gradient.

Losses and norms are judged by the adapter's own latest ones, robustly: deviations are multiples of 1.4826 * MAD (the
median absolute deviation, scaled to a normal distribution's standard deviation; Rousseeuw & Croux 1993) above the
median. The loss is one-sided and bounded for pairs that agree with what was learned (it goes to 0), so that honest
pairs stay close together while pairs that say the opposite do not. Norms are compared by their logarithm, as they grow
by orders of magnitude while an adapter learns. Thresholds were measured: docs/results/poisoning.md.
"""

import math
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from statistics import median

from edged.align.feedback.pair import TokenPair
from edged.settings.load import FeedbackSettings

_WINDOW = 64
"""Latest losses and norms that a new one is compared with."""
_LEAST = 32
"""Fewest values from which the usual range is estimated."""
SUSPICIOUS_DEVIATIONS = 6.0
"""Deviations of a loss above the median that make a pair suspicious: it counts for a burst."""
BURST_SHARE = 0.5
"""Share of suspicious pairs among the latest that makes a burst."""
ALARM_S = 3600.0
"""How long a burst has a user's new pairs quarantined, unless somebody decides."""
_SUSPICIOUS_LOSS = 1.0
_OUTLYING_LOSS = 4.0
"""Nats below which a loss is never suspicious, or outlying: an untrained adapter's is 0.69."""
_OUTLYING_FACTOR = 2.0
"""Deviations that make a pair outlying by itself, as a multiple of those that make it suspicious."""
_NORM_DEVIATIONS = 8.0
_LATEST = 8
"""Number of latest pairs among which the share of suspicious ones makes a burst."""
_CONTRARY, _BY_CHANCE = 16, 2e-5
"""Number of latest pairs among which contrary ones make a burst, too; the highest probability that is not chance."""
_REMEMBERED = 256
"""Number of latest pairs that a new one can contradict."""
_TELLING_TOKENS = 8
"""Most tokens of an answer whose meaning depends on its prompt, as that of "yes" and "no" does."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A pair's judgement: `suspicious` ones together make a burst; a reason `why` leaves it out by itself."""

    suspicious: bool = False
    why: str = ""
    contrary: bool = False
    """Whether the adapter prefers the rejected answer, as it always does in a few pairs."""


@dataclass(frozen=True, slots=True)
class OutlierHistory:
    """The history of an adapter that a restart restores.

    It has the latest losses and gradient norms, oldest first, and whether each of these pairs was contrary; how long
    an alarm goes on; the newest version that passed its test; how much smaller steps are; the baseline version.
    """

    losses: Sequence[float] = ()
    norms: Sequence[float] = ()
    alarm_left_s: float = 0.0
    tested_version: int = -1
    lr_scale: float = 1.0
    baseline_version: int = 0
    baseline_nll_change: float | None = None
    baseline_kl_nats: float | None = None
    contrary: Sequence[bool] = ()


class OutlierDetector:
    """The outlier detector of one adapter. Without settings, or with the quarantine off, no pair is suspicious."""

    def __init__(self, settings: FeedbackSettings | None = None) -> None:
        self._on = settings is not None and settings.quarantine
        self._losses: deque[float] = deque(maxlen=_WINDOW)
        self._norms: deque[float] = deque(maxlen=_WINDOW)
        self._flags: deque[bool] = deque(maxlen=_WINDOW + _LATEST)
        """Whether each of the latest pairs was suspicious."""
        self._contrary: deque[bool] = deque(maxlen=_WINDOW + _CONTRARY)
        self._said: OrderedDict[bytes, None] = OrderedDict()
        """Digests of (prompt, better answer, worse answer), newest last: the tokens themselves would be megabytes."""
        self._contradictory: set[int] = set()
        self._alarm_until_s = -math.inf
        self.tolerant = False
        """Whether no pair is left out by itself: the adapter is so far from the base that it may be the outlier."""

    # -- new pairs ---------------------------------------------------------------------------------------------------

    def note(self, pair: TokenPair) -> bool:
        """Remember a pair's preference; returns whether it is the opposite of one of the latest pairs'."""
        if not self._on or not pair.telling:
            return False
        opposite = _said(pair, pair.rejected, pair.chosen) in self._said
        said = _said(pair, pair.chosen, pair.rejected)
        self._said[said] = None
        self._said.move_to_end(said)
        if len(self._said) > _REMEMBERED:
            self._said.popitem(last=False)
        if opposite and not pair.trusted:
            self._contradictory.add(pair.pair_id)
        return opposite

    def judge(self, pair: TokenPair, loss: float, margin: float = 0.0) -> Verdict:
        """Judge a new pair by its loss (nats) and reward margin under the current version.

        A loss that is not finite does not make a pair suspicious, and no loss a single rating: it is 1 at most, with a
        gradient that vanishes, and bad answers have a high one by being the adapter's own. Nor does a choice between
        answers that are liked alike, which is chance: a user has nothing else to choose once his taste is learned.
        """
        judged = self._on and pair.telling and not (pair.trusted or pair.again or pair.epochs_done)
        if not (judged and math.isfinite(loss)):
            return Verdict()
        contrary = margin < 0
        middle, spread = self._usual(self._losses)
        allowed = SUSPICIOUS_DEVIATIONS * spread
        if not loss > max(_SUSPICIOUS_LOSS, middle + allowed):
            return Verdict(pair.pair_id in self._contradictory, contrary=contrary)
        if pair.first_party or self.tolerant or not loss > max(_OUTLYING_LOSS, middle + _OUTLYING_FACTOR * allowed):
            return Verdict(True, contrary=contrary)
        why = f"outlying: its loss is {loss:.2f} nats, the latest pairs' median is {middle:.2f}"
        return Verdict(True, why, contrary)

    def max_norm(self) -> float:
        """The largest gradient norm (L2, before clipping) that a step may have; infinite while too few are known."""
        if not self._on:
            return math.inf
        middle, spread = self._usual(self._norms)
        return math.exp(min(700.0, middle + _NORM_DEVIATIONS * spread)) if math.isfinite(middle) else math.inf

    def burst(self, judged: Sequence[Verdict]) -> str:
        """The reason why new pairs, oldest first, are a burst together with those before them, or ""."""
        suspicious = [*self._flags, *(verdict.suspicious for verdict in judged)]
        contrary = [*self._contrary, *(verdict.contrary for verdict in judged)]
        if not self._on or not any(verdict.suspicious or verdict.contrary for verdict in judged):
            return ""
        why = self._too_many(suspicious, _LATEST, "were outlying or contradictory")
        for latest in (_LATEST, _CONTRARY):
            if not why and len(contrary) >= latest + _LEAST:
                why = self._too_many(contrary, latest, "contradict what was learned")
        return why

    def _too_many(self, flags: Sequence[bool], latest: int, what: str) -> str:
        """The reason why the `latest` flags, oldest first, are a burst, or "": too many are set to be chance.

        The usual share is estimated from the flags before (a binomial tail); while too few, the share alone decides.
        """
        before, now = flags[:-latest], flags[-latest:]
        usual = (1 + sum(before)) / (2 + len(before)) if len(before) >= _LEAST else 0.0
        tail = sum(math.comb(latest, k) * usual**k * (1 - usual) ** (latest - k) for k in range(sum(now), latest + 1))
        if sum(now) < BURST_SHARE * latest or tail > _BY_CHANCE:
            return ""
        return f"burst: {sum(now)} of the latest {len(now)} pairs {what}, {usual:.0%} are usual"

    def begin_anew(self) -> None:
        """Forget the usual range and earlier preferences, as after a change of preferences."""
        for usual in (self._losses, self._flags, self._contrary, self._said, self._contradictory):
            usual.clear()

    # -- trained pairs -----------------------------------------------------------------------------------------------

    def learn(self, judged: Iterable[tuple[TokenPair, float, Verdict]], grad_norm: float | None) -> None:
        """Update the usual range with a step's new pairs that were not suspicious; it was taken, or needed none."""
        for pair, loss, verdict in judged:
            self._contradictory.discard(pair.pair_id)
            if not pair.telling or pair.epochs_done or not math.isfinite(loss):
                continue
            if not pair.trusted:
                self._flags.append(verdict.suspicious)
                self._contrary.append(verdict.contrary)
            if not verdict.suspicious:
                self._losses.append(loss)
        if grad_norm:
            self._norms.append(math.log(grad_norm))

    def forget_norms(self) -> None:
        """Forget the usual norms: gradients of an adapter of another form are not compared with them."""
        self._norms.clear()

    def restore(self, past: OutlierHistory, now: float) -> None:
        """Restore the history that an earlier run left."""
        self._losses.extend(past.losses)
        self._norms.extend(math.log(norm) for norm in past.norms if norm > 0)
        self._contrary.extend(past.contrary)
        if past.alarm_left_s > 0:
            self._alarm_until_s = now + past.alarm_left_s

    # -- the alarm ---------------------------------------------------------------------------------------------------

    def raise_alarm(self, now: float) -> None:
        """Raise the alarm after a burst: new pairs are quarantined until `clear_alarm` or for ALARM_S."""
        self._alarm_until_s = now + ALARM_S

    def alarm_left_s(self, now: float) -> float:
        """Seconds that the alarm still lasts, 0 for none. When it has ended, the usual range is estimated anew."""
        if -math.inf < self._alarm_until_s <= now:
            self.clear_alarm()
        return max(0.0, self._alarm_until_s - now)

    def clear_alarm(self) -> None:
        """End the alarm, if there is one; the usual range is estimated anew."""
        if self._alarm_until_s > -math.inf:
            self._alarm_until_s = -math.inf
            self.begin_anew()

    @staticmethod
    def _usual(values: deque[float]) -> tuple[float, float]:
        """Median and scaled MAD of values; the median is infinite while there are too few."""
        if len(values) < _LEAST:
            return math.inf, 0.0
        middle = median(values)
        return middle, 1.4826 * median(abs(value - middle) for value in values)


def _said(pair: TokenPair, better: tuple[int, ...], worse: tuple[int, ...]) -> bytes:
    telling = min(len(better), len(worse)) > _TELLING_TOKENS
    said = (() if telling else pair.prompt, better, worse)
    return blake2b(repr(said).encode(), digest_size=16).digest()
