"""The losses of a step: from the log-probabilities of an example's answers to its loss, and a coefficient per answer.

A step adds up, over all answers, each coefficient times the gradient of the answer's log-probability: so any loss of
log-probabilities of whole answers is one function here.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from edged.align.feedback.pair import PairScored, Split, TokenPair
from edged.settings.load import AlignSettings


@dataclass(frozen=True, slots=True)
class AnswerLogps:
    """An answer's log-probability in nats under policy and reference, summed over its `num_tokens` scored tokens.

    `weighted` is the sum of each token's own log-probability times its probability, where the loss asks for it.
    """

    logp: float
    ref_logp: float
    num_tokens: int
    weighted: float = 0.0

    @property
    def ratio(self) -> float:
        """The log-ratio of policy and reference."""
        return self.logp - self.ref_logp

    @property
    def mean(self) -> float:
        """The log-probability per token."""
        return self.logp / max(self.num_tokens, 1)


def answer_logps(
    sums: Sequence[float], reference: Sequence[float], num_tokens: Sequence[int], weighted: Sequence[float] = ()
) -> list[AnswerLogps]:
    """The scored texts of an example; the reference's log-probability is 0 where it is not given."""
    tables = zip_longest(sums, reference, num_tokens, weighted, fillvalue=0)
    return [AnswerLogps(logp, ref_logp, int(count), total) for logp, ref_logp, count, total in tables]


@dataclass(frozen=True, slots=True)
class ExampleLoss:
    """An example's loss, and d (`count` * objective) / d log-probability of each of its answers.

    A step's objective and gradient are means over examples, each of which counts `count` times.
    """

    loss: float
    """How much there is left to learn."""
    coefficients: tuple[float, ...]
    reward_margin: float = 0.0
    count: int = 1
    weighted: float | None = None
    """The objective, where that is not the loss: DFT's is small where an answer is all but impossible."""

    @property
    def objective(self) -> float:
        """The quantity of which the coefficients are derivatives."""
        return self.loss if self.weighted is None else self.weighted


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss by name, and its traits: `align.loss` and the methods of fine-tuning jobs choose among `LOSSES`."""

    function: Callable[[Sequence[AnswerLogps], AlignSettings], ExampleLoss]
    """Loss and coefficients of a pair's chosen and rejected answer and, where it `scores_prompt`, of its prompt."""
    method: str | None = None
    """Its name as the method of a fine-tuning job."""
    trl: str | None = None
    """Its `loss_type` in TRL's DPOTrainer."""
    has_reference: bool = True
    """Whether the reference has a part in it."""
    scores_prompt: bool = False
    """Whether it needs the prompt's own log-probability."""
    adds_nll: bool = False
    """Whether the chosen answer's NLL is added, as `align.sft_weight` says."""
    chosen_alone: bool = False
    """Whether it is of the chosen answer alone, so that a good rating without a pair is an example of it."""
    weighs_tokens: bool = False
    """Whether each token counts by its probability."""


def preference_loss(answers: Sequence[AnswerLogps], align: AlignSettings) -> ExampleLoss:
    """The loss `align.loss` of a pair's chosen and rejected answer and, where it `scores_prompt`, of its prompt.

    The chosen answer's NLL per token, times `align.sft_weight`, is added to the coefficients of losses that `adds_nll`
    names (RPO, Pang et al. 2024, Eq. 2; TRL's `loss_type=["sigmoid", "sft"]`, and `cpo_alpha` of SimPO). It is left out
    of the loss, which measures how well the preference is learned.
    The reward margin is beta times the difference of the summed log-ratios, whatever the loss.
    """
    row = LOSSES[align.loss]
    found = row.function(answers, align)
    margin = align.beta * (answers[0].ratio - answers[1].ratio)
    chosen, *rest = found.coefficients
    if row.adds_nll:
        chosen -= align.sft_weight / max(answers[0].num_tokens, 1)
    return replace(found, coefficients=(chosen, *rest), reward_margin=margin)


def scores_prompt(align: AlignSettings, pair: TokenPair) -> bool:
    """Whether the loss of a pair needs its prompt's own log-probability."""
    return LOSSES[align.loss].scores_prompt and not pair.single


def _sigmoid_loss(answers: Sequence[AnswerLogps], align: AlignSettings) -> ExampleLoss:
    """DPO: -log sigmoid(beta * margin), Rafailov et al. 2023 Eq. 7 (MACE 3.1); smoothed labels make it cDPO."""
    chosen, rejected = answers
    loss, slope = _log_sigmoid(align.beta * (chosen.ratio - rejected.ratio), align.label_smoothing)
    return ExampleLoss(loss, (align.beta * slope, -align.beta * slope))


def _ipo_loss(answers: Sequence[AnswerLogps], align: AlignSettings) -> ExampleLoss:
    """(h - 1/(2 beta))^2 over per-token means, Azar et al. 2023 Eq. 17 with TRL's length normalisation."""
    chosen, rejected = answers
    lengths = max(chosen.num_tokens, 1), max(rejected.num_tokens, 1)
    gap = chosen.ratio / lengths[0] - rejected.ratio / lengths[1] - 1.0 / (2.0 * align.beta)
    return ExampleLoss(gap * gap, (2.0 * gap / lengths[0], -2.0 * gap / lengths[1]))


def _simpo_loss(answers: Sequence[AnswerLogps], align: AlignSettings) -> ExampleLoss:
    """-log sigmoid(beta * difference of means - gamma), Meng et al. 2024 Eq. 6."""
    chosen, rejected = answers
    loss, slope = _log_sigmoid(align.beta * (chosen.mean - rejected.mean) - align.simpo_gamma, align.label_smoothing)
    return ExampleLoss(
        loss, (align.beta * slope / max(chosen.num_tokens, 1), -align.beta * slope / max(rejected.num_tokens, 1))
    )


def _orpo_loss(answers: Sequence[AnswerLogps], align: AlignSettings) -> ExampleLoss:
    """NLL of prompt and chosen answer, beside -beta * log sigmoid(log odds ratio); Hong et al. 2024 Eq. 6, 7.

    An answer's odds are those of its mean log-probability. As in TRL the NLL is a mean over prompt and answer.
    """
    chosen, rejected, prompt = answers
    # p / (1 - p); an answer that is all but certain has finite odds.
    doubts = [max(-math.expm1(answer.mean), 1e-9) for answer in (chosen, rejected)]
    odds_ratio = chosen.mean - rejected.mean - math.log(doubts[0]) + math.log(doubts[1])
    loss, slope = _log_sigmoid(odds_ratio)
    num_tokens = max(prompt.num_tokens + chosen.num_tokens, 1)
    towards, away = (
        align.beta * slope / doubt / max(answer.num_tokens, 1)
        for doubt, answer in zip(doubts, (chosen, rejected), strict=True)
    )
    nll = -(prompt.logp + chosen.logp) / num_tokens
    return ExampleLoss(nll + align.beta * loss, (towards - 1 / num_tokens, -away, -1 / num_tokens))


def _sft_loss(answers: Sequence[AnswerLogps], align: AlignSettings) -> ExampleLoss:
    """NLL of the chosen answer's tokens: the step's mean is over tokens, as that of TRL's SFTTrainer is.

    "dft" has each token's probability, not differentiated, as its weight (Wu et al. 2025 Eq. 9).
    """
    chosen = answers[0]
    weighted = -chosen.weighted / max(chosen.num_tokens, 1) if LOSSES[align.loss].weighs_tokens else None
    return ExampleLoss(-chosen.mean, (-1.0, 0.0), count=chosen.num_tokens, weighted=weighted)


LOSSES = {
    "sft": Loss(_sft_loss, method="supervised", has_reference=False, chosen_alone=True),
    "dft": Loss(_sft_loss, has_reference=False, chosen_alone=True, weighs_tokens=True),
    "sigmoid": Loss(_sigmoid_loss, method="dpo", trl="sigmoid", adds_nll=True),
    "ipo": Loss(_ipo_loss, method="ipo", trl="ipo", adds_nll=True),
    "simpo": Loss(_simpo_loss, method="simpo", has_reference=False, adds_nll=True),
    "orpo": Loss(_orpo_loss, method="orpo", has_reference=False, scores_prompt=True),
}
"""All losses by name, as `align.loss` has them."""


def rating_loss(answers: Sequence[AnswerLogps], good: bool, beta: float, origin: float = 0.0) -> ExampleLoss:
    """The loss of one answer: the first, rated good, or the second, rated bad.

    It is 1 - sigmoid(+-beta * (log-ratio - origin)).

    Without an `origin` it is APO-zero's unpaired form (D'Oosterlinck et al. 2024 Eq. 7 as TRL has it); with the mean
    log-ratio of answers that belong to other prompts, 0 at least, it is KTO (Ethayarajh et al. 2024 Eq. 7).
    """
    side, ratio = (beta, answers[0].ratio) if good else (-beta, answers[1].ratio)
    doubt = _sigmoid(-side * (ratio - origin))
    slope = -side * doubt * (1.0 - doubt)
    return ExampleLoss(doubt, (slope, 0.0) if good else (0.0, slope), side * ratio)


def example_loss(
    pair: TokenPair, answers: Sequence[AnswerLogps], align: AlignSettings, origin: float = 0.0
) -> ExampleLoss:
    """The loss of a pair, or of a single rating: see `rating_loss`.

    An answer that is imitated has the NLL of its tokens to learn, and what the others fell, per token to learn. Where
    single ratings are not learned, a good answer alone is an example of a loss that is of the `chosen_alone`.
    """
    if pair.imitate:
        # One example counts as one pair, however long it is.
        count = max(1, sum(map(math.isinf, pair.floors)) or answers[0].num_tokens)
        return ExampleLoss(-answers[0].logp / count, (-1.0 / count, 0.0))
    if pair.single and not (pair.chosen and align.unpaired == "off" and LOSSES[align.loss].chosen_alone):
        return rating_loss(answers, bool(pair.chosen), align.beta, origin)
    return preference_loss(answers, align)


def _log_sigmoid(x: float, smoothing: float = 0.0) -> tuple[float, float]:
    """-log sigmoid(x) where labels are right, mixed with what it is where they are wrong; and its derivative."""
    slope = smoothing * _sigmoid(x) - (1.0 - smoothing) * _sigmoid(-x)
    return (1.0 - smoothing) * _softplus(-x) + smoothing * _softplus(x), slope


def _sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x)) if x >= 0 else math.exp(x) / (1.0 + math.exp(x))


def _softplus(x: float) -> float:
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def pair_score(
    pair: TokenPair,
    version: int,
    split: Split,
    answers: Sequence[AnswerLogps],
    loss: ExampleLoss,
    kl_nats: float | None = None,
) -> PairScored:
    """The record of a pair's score by a version of its adapter."""
    chosen, rejected = answers[:2]
    return PairScored(
        pair.pair_id,
        pair.adapter,
        version,
        split,
        chosen_logp=chosen.logp,
        rejected_logp=rejected.logp,
        ref_chosen_logp=chosen.ref_logp,
        ref_rejected_logp=rejected.ref_logp,
        reward_margin=loss.reward_margin,
        loss=loss.loss,
        kl_nats=kl_nats,
        chosen_tokens=chosen.num_tokens,
        rejected_tokens=rejected.num_tokens,
    )
