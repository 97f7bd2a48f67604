"""The preference losses: from four sums of log-probabilities to a loss and its two derivatives."""

import math
from dataclasses import asdict, dataclass
from typing import Literal

from edged.align.feedback.pair import PairScored, Split, TokenPair


@dataclass(frozen=True, slots=True)
class PairLogps:
    """Summed log-probabilities of a pair's answers in nats, under the policy and the reference, and their lengths."""

    chosen_logp: float
    rejected_logp: float
    ref_chosen_logp: float
    ref_rejected_logp: float
    chosen_tokens: int
    rejected_tokens: int


@dataclass(frozen=True, slots=True)
class PairLoss:
    """A pair's loss and its two derivatives, d loss / d summed log-probability of the chosen and rejected answer."""

    loss: float
    reward_margin: float
    chosen_grad: float
    rejected_grad: float


def preference_loss(
    logps: PairLogps, beta: float, kind: Literal["sigmoid", "ipo"] = "sigmoid", sft_weight: float = 0.0
) -> PairLoss:
    """The preference loss of one pair, and the derivatives of its sum with the chosen answer's NLL.

    The NLL counts per token, times `sft_weight`: RPO (Pang et al. 2024, Eq. 2), TRL's `loss_type=["sigmoid", "sft"]`.
    It is left out of `loss`, which measures how well the preference is learned.

    "sigmoid": -log sigmoid(beta * margin), Rafailov et al. 2023 Eq. 7 (MACE 3.1).
    "ipo": (h - 1/(2 beta))^2 over per-token means, Azar et al. 2023 Eq. 17 with TRL's length normalisation.
    The reward margin is beta times the difference of the summed log-ratios for both, as TRL reports it.
    """
    chosen_ratio = logps.chosen_logp - logps.ref_chosen_logp
    rejected_ratio = logps.rejected_logp - logps.ref_rejected_logp
    margin = beta * (chosen_ratio - rejected_ratio)
    chosen_n, rejected_n = max(logps.chosen_tokens, 1), max(logps.rejected_tokens, 1)
    sft_grad = -sft_weight / chosen_n
    if kind == "sigmoid":
        return PairLoss(_softplus(-margin), margin, sft_grad - beta * _sigmoid(-margin), beta * _sigmoid(-margin))
    gap = chosen_ratio / chosen_n - rejected_ratio / rejected_n - 1.0 / (2.0 * beta)
    return PairLoss(gap * gap, margin, sft_grad + 2.0 * gap / chosen_n, -2.0 * gap / rejected_n)


def _sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x)) if x >= 0 else math.exp(x) / (1.0 + math.exp(x))


def _softplus(x: float) -> float:
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def pair_score(
    pair: TokenPair, version: int, split: Split, logps: PairLogps, loss: PairLoss, kl_nats: float | None = None
) -> PairScored:
    """The record of a pair's score by a version of its adapter."""
    of = (pair.pair_id, pair.adapter, version, split)
    return PairScored(*of, reward_margin=loss.reward_margin, loss=loss.loss, kl_nats=kl_nats, **asdict(logps))
