"""One adapter's part in a step: its pairs, their losses and outcomes, its gradient, and its optimizer step."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch

from edged.align.adapters.adapter import AdapterState, GradientTooLarge
from edged.align.dpo.decoder import LoraParameters
from edged.align.dpo.loss import PairLogps, PairLoss, preference_loss
from edged.align.feedback.outliers import OutlierDetector, Verdict
from edged.align.feedback.pair import PairScored, TokenPair
from edged.runtime import logs
from edged.tensors.oom import out_of_memory


@dataclass(frozen=True, slots=True)
class PairOutcome:
    """What came of a fresh pair: it with its reference log-probabilities, its loss, whether it was trained on.

    A pair that the verdict leaves out is not trained on.
    """

    pair: TokenPair
    loss: float
    trained: bool
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class _Mark:
    """A member as it was when a group ended; no gradients before the first."""

    gradients: list[torch.Tensor] | None
    losses: int
    outcomes: int
    scores: int
    trained: int
    weight: float


class AdapterStep:
    """An adapter in a step over its `fresh` and `replay` pairs.

    Its gradient is the mean over the pairs whose loss is not under the threshold (MACE CheckEnd) of d loss / d LoRA. A
    pair that is left out has no part in it: it is as if it had not been in the step.
    """

    def __init__(
        self,
        state: AdapterState,
        fresh: Sequence[TokenPair],
        replay: Sequence[TokenPair],
        suspicion: OutlierDetector | None = None,
        step_scale: float = 1.0,
        untested: bool = False,
    ) -> None:
        """Without a `suspicion` no pair is left out. `step_scale` multiplies the step size.

        Where the version is `untested` it is doubted before any pair is.
        """
        self.state, self.adapter, self.version = state, state.name, state.version
        self.fresh, self.replay = list(fresh), list(replay)
        self.outcomes: list[PairOutcome] = []
        """Of the fresh pairs."""
        self.scores: list[PairScored] = []
        self.loss = float("nan")
        """Mean over all pairs but those that were left out; NaN when all were."""
        self.grad_norm = 0.0
        self.trained = 0
        self.error = ""
        """Why its optimizer step was not taken."""
        self.starved = False
        """Whether that was want of memory."""
        self.burst = ""
        """Why its fresh pairs are held for a burst: then no optimizer step was taken either."""
        self.turned = False
        """Whether the user's own signals say something else than before: they are learned from, and watched."""
        self.doubted = False
        """Whether pairs look strange to a version that is not tested yet: then no optimizer step was taken."""
        self.strange = ""
        """Why its gradient is far too large: then none was taken."""
        gradients = {n: (torch.zeros_like(a), torch.zeros_like(b)) for n, (a, b) in state.weights.items()}
        self.leaves = LoraParameters(state.weights, state.spec.scaling, gradients)
        self._suspicion = suspicion or OutlierDetector()
        self._step_scale, self._untested = step_scale, untested
        self._weight = 0.0
        self._losses: list[float] = []
        self._fresh_ids = {pair.pair_id for pair in self.fresh}
        self._mark = _Mark(None, 0, 0, 0, 0, 0.0)

    @property
    def _totals(self) -> list[torch.Tensor]:
        return [total for pair in self.leaves.gradients.values() for total in pair]

    def mark(self) -> None:
        """A group ended and another follows: `restart` comes back to here."""
        gradients = [total.clone() for total in self._totals]
        counts = (len(self._losses), len(self.outcomes), len(self.scores), self.trained)
        self._mark = _Mark(gradients, *counts, self._weight)

    def restart(self) -> None:
        """The present group starts again: back to where the one before it ended."""
        mark = self._mark
        del self._losses[mark.losses :], self.outcomes[mark.outcomes :], self.scores[mark.scores :]
        self.trained, self._weight = mark.trained, mark.weight
        if mark.gradients is None:
            torch._foreach_zero_(self._totals)
        else:
            torch._foreach_copy_(self._totals, mark.gradients)

    def take(self, pair: TokenPair, logps: PairLogps) -> PairLoss | None:
        """Take the sums of one of its pairs in; its loss, None when that is under the threshold or far too high."""
        align = self.state.align
        loss = preference_loss(logps, align.beta, align.loss, align.sft_weight)
        fresh = pair.pair_id in self._fresh_ids
        verdict = self._suspicion.judge(pair, loss.loss, loss.reward_margin) if fresh else Verdict()
        train = loss.loss >= align.loss_threshold and not verdict.why
        if train:
            self.trained += 1
            self._weight += pair.weight
        if not verdict.why:
            self._losses.append(loss.loss)
        if fresh:
            self._record(pair, logps, loss, train, verdict)
        return loss if train else None

    def _record(self, pair: TokenPair, logps: PairLogps, loss: PairLoss, train: bool, verdict: Verdict) -> None:
        known = replace(pair, ref_chosen_logp=logps.ref_chosen, ref_rejected_logp=logps.ref_rejected)
        self.outcomes.append(PairOutcome(known, loss.loss, train, verdict))
        if pair.epochs_done == 0:
            self.scores.append(
                PairScored(
                    pair_id=pair.pair_id,
                    adapter=self.adapter,
                    version=self.version,
                    split="prequential",
                    chosen_logp=logps.chosen,
                    rejected_logp=logps.rejected,
                    ref_chosen_logp=logps.ref_chosen,
                    ref_rejected_logp=logps.ref_rejected,
                    reward_margin=loss.reward_margin,
                    loss=loss.loss,
                    chosen_tokens=logps.chosen_tokens,
                    rejected_tokens=logps.rejected_tokens,
                )
            )

    def holds(self, pair_ids: Collection[int]) -> bool:
        """Whether any of these pairs is in the step."""
        return any(pair.pair_id in pair_ids for pair in (*self.fresh, *self.replay))

    def _most_norm(self) -> float:
        """The largest usual gradient norm; infinite where somebody found all new pairs good."""
        trained = [outcome.pair.trusted for outcome in self.outcomes if outcome.trained]
        return math.inf if trained and all(trained) else self._suspicion.most_norm()

    def finish(self) -> None:
        """The optimizer, when there is something to learn and all of it is finite and usual.

        `error`, `burst` and `strange` say why not.
        """
        judged = [outcome for outcome in self.outcomes if not (outcome.pair.epochs_done or outcome.pair.trusted)]
        burst = self._suspicion.burst([(outcome.pair, outcome.verdict) for outcome in judged])
        self.turned, self.burst = burst.direct, "" if burst.direct else burst.why
        self.doubted = self._untested and bool(burst.why or any(outcome.verdict.why for outcome in judged))
        if self.doubted or self.burst or not self._losses:
            return
        self.loss = sum(self._losses) / len(self._losses)
        if not math.isfinite(self.loss):
            self.error = f"loss is {self.loss}"
        elif self.trained:
            try:
                self.grad_norm = self.state.step(
                    self.leaves.gradients, self.trained, self._weight, self._most_norm(), self._step_scale
                )
            except GradientTooLarge as error:
                self.strange, self.doubted = str(error), self._untested
            except FloatingPointError as error:
                self.error = str(error)
            except (RuntimeError, MemoryError) as error:
                # Want of memory, say: the state is as before the step, and those who were stepped before keep theirs.
                self.error, self.starved = logs.first_line(error, with_kind=True), out_of_memory(error)
