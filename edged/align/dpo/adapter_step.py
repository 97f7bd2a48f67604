"""One adapter's part in a DPO step: its pairs, their losses and outcomes, its gradient, and its optimizer step."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from edged.align.adapters.adapter import AdapterState, GradientTooLarge
from edged.align.adapters.form import LoraLeaves
from edged.align.dpo.decoder import LoraParameters, with_scaling
from edged.align.dpo.loss import AnswerLogps, ExampleLoss, example_loss, pair_score
from edged.align.feedback.outliers import OutlierDetector, Verdict
from edged.align.feedback.pair import PairScored, TokenPair
from edged.runtime import logs
from edged.settings.load import AlignSettings
from edged.tensors.oom import out_of_memory


@dataclass(frozen=True, slots=True)
class PairOutcome:
    """A pair's outcome in a step: the pair with its reference log-probabilities, its loss, whether it was trained on.

    A pair that the verdict leaves out is not trained on. Only a new pair has a score.
    """

    pair: TokenPair
    loss: float
    trained: bool
    verdict: Verdict
    score: PairScored | None = None
    objective: float = 0.0
    count: int = 1
    """How often the objective counts in the step's mean: see `ExampleLoss`."""


class AdapterStep:
    """One adapter's part in a step, over its `fresh` and `replay` pairs.

    Its gradient is the mean of d loss / d LoRA over the pairs whose loss is not under the threshold (MACE CheckEnd). A
    pair that is left out has no part in it, as if it had not been in the step.
    """

    def __init__(
        self,
        state: AdapterState,
        fresh: Sequence[TokenPair],
        replay: Sequence[TokenPair],
        detector: OutlierDetector | None = None,
        lr_scale: float = 1.0,
        untested: bool = False,
        align: AlignSettings | None = None,
    ) -> None:
        """Without a `detector` no pair is left out. `lr_scale` multiplies the step size.

        Where the version is `untested`, outlying pairs cast doubt on it first. KTO (`align.unpaired`) compares the
        single ratings of a step with each other. `align` are the step's settings, by default those in force.
        """
        self.state, self.adapter, self.version = state, state.name, state.version
        self.fresh, self.replay = list(fresh), list(replay)
        self.loss = float("nan")
        """Mean objective of the pairs that were not left out; NaN when all were."""
        self.grad_norm = 0.0
        self.error = ""
        """Reason why its optimizer step was not taken, or ""."""
        self.starved = False
        """Whether its optimizer step ran out of memory."""
        self.burst = ""
        """Reason why its fresh pairs count as a burst, or ""; then no optimizer step was taken either."""
        self.turned = False
        """Whether the user's own signals contradict earlier ones: they are trained on, and watched."""
        self.doubted = False
        """Whether pairs look outlying to a version that is not tested yet: then no optimizer step was taken."""
        self.rejected_reason = ""
        """Reason why its gradient is far too large, or ""; then no optimizer step was taken."""
        self.gradients: LoraLeaves = {name: tuple(map(torch.zeros_like, own)) for name, own in state.weights.items()}
        """Sums of the pairs' gradients so far, in fp32: those of what is served, not yet of the weights."""
        self._detector = detector or OutlierDetector()
        self._lr_scale, self._untested = lr_scale, untested
        self._fresh_ids = {pair.pair_id for pair in self.fresh}
        self._align = align or state.settings.current.align
        self.mismatched = self._mismatches() if self._align.unpaired == "kto" else []
        """Every rated answer's prompt with another one's answer, where the loss is KTO's: they are scored first."""
        self._origins: list[float] = []
        """Log-ratios of the `mismatched` ones so far."""
        self._ratios: list[float] = []
        """Log-ratios per token of practice pairs' answers: where they are the adapter's own, their mean is its KL."""
        self._taken: list[PairOutcome] = []
        """Outcomes of all pairs so far."""
        self._mark: tuple[int, int, int, list[torch.Tensor]] | None = None
        """Numbers of outcomes, `_origins` and `_ratios`, and the gradients, at the end of the latest micro-batch."""

    def _mismatches(self) -> list[TokenPair]:
        """Each rated answer's prompt with the answer before (TRL's pairs for KTO's KL); none of a single rating."""
        rated = [pair for pair in (*self.fresh, *self.replay) if pair.single]
        if len(rated) < 2:
            return []
        answers = [pair.chosen or pair.rejected for pair in rated]
        return [
            TokenPair(pair.pair_id, self.adapter, pair.prompt, answer, ())
            for pair, answer in zip(rated, answers[-1:] + answers[:-1], strict=True)
        ]

    def parameters(self, dtype: torch.dtype) -> LoraParameters:
        """Return its weights for the backward passes of a step, in the dtype of computation."""
        weights = {name: tuple(each.detach() for each in own) for name, own in self.state.served.items()}
        leaves = with_scaling(weights, self.state.form.scalings, dtype)
        for own in leaves.values():
            for each in own:
                each.requires_grad_()
        return LoraParameters(leaves, self.state.form.scalings, self.gradients)

    @property
    def examples(self) -> list[TokenPair]:
        """All that is computed, in its order."""
        return [*self.mismatched, *self.fresh, *self.replay]

    @property
    def losses(self) -> list[float]:
        """Losses of its pairs whose forwards are done."""
        return [outcome.loss for outcome in self._taken]

    @property
    def outcomes(self) -> list[PairOutcome]:
        """Outcomes of the fresh pairs."""
        return [outcome for outcome in self._taken if outcome.pair.pair_id in self._fresh_ids]

    @property
    def scores(self) -> list[PairScored]:
        """Scores of the pairs that were never trained on."""
        return [outcome.score for outcome in self._taken if outcome.score is not None]

    @property
    def trained(self) -> int:
        """Number of pairs that have a part in the gradient."""
        return sum(outcome.trained for outcome in self._taken)

    @property
    def rated(self) -> bool:
        """Whether there are single ratings in it, whose gradients are smaller than those of pairs."""
        return any(pair.single for pair in (*self.fresh, *self.replay))

    @property
    def _totals(self) -> list[torch.Tensor]:
        return [total for own in self.gradients.values() for total in own]

    def mark(self) -> None:
        """Save the state between two micro-batches, to which `restart` returns."""
        self._mark = len(self._taken), len(self._origins), len(self._ratios), [total.clone() for total in self._totals]

    def figures(self, seconds: float) -> dict[str, Any]:
        """Return what `VersionPublished` tells of the step, which took `seconds`."""
        mean = sum(self._ratios) / len(self._ratios) if self._ratios else None
        imitates = all(pair.imitate for pair in self.fresh)
        return {
            "pairs": self.trained,
            "loss": self.loss,
            "grad_norm": self.grad_norm,
            "step_s": seconds,
            "own_kl_nats": None if imitates else mean,
            "gain_nats": mean if imitates else None,
        }

    def restart(self) -> None:
        """Undo the current micro-batch: return to the end of the one before."""
        taken, origins, ratios, totals = self._mark or (0, 0, 0, None)
        del self._taken[taken:], self._origins[origins:], self._ratios[ratios:]
        if totals is None:
            torch._foreach_zero_(self._totals)
        else:
            torch._foreach_copy_(self._totals, totals)

    def add_pair(self, pair: TokenPair, answers: Sequence[AnswerLogps]) -> ExampleLoss | None:
        """Take in the log-probabilities of a pair's answers; returns its loss.

        None: it has no part in the gradient, as its loss is under the threshold or far too high, or it is mismatched.
        """
        if len(self._origins) < len(self.mismatched):
            self._origins.append(answers[0].ratio)
            return None
        origin = max(0.0, sum(self._origins) / len(self._origins)) if self._origins else 0.0
        loss = example_loss(pair, answers, self._align, origin)
        fresh = pair.pair_id in self._fresh_ids
        judged = fresh and not pair.practice
        verdict = self._detector.judge(pair, loss.loss, loss.reward_margin) if judged else Verdict()
        train = (pair.imitate or loss.loss >= self._align.loss_threshold) and not verdict.why
        known = replace(pair, ref_chosen_logp=answers[0].ref_logp, ref_rejected_logp=answers[1].ref_logp)
        if pair.practice and not (pair.imitate and pair.ref_chosen_logp is not None):
            tokens = sum(answer.num_tokens for answer in answers[:2])
            self._ratios.append(sum(answer.ratio for answer in answers[:2]) / max(tokens, 1))
        new = judged and not pair.epochs_done and not pair.single
        score = pair_score(pair, self.version, "prequential", answers, loss) if new else None
        self._taken.append(PairOutcome(known, loss.loss, train, verdict, score, loss.objective, loss.count))
        return loss if train else None

    def holds(self, pair_ids: Collection[int]) -> bool:
        """Whether any of these pairs is in the step."""
        return any(pair.pair_id in pair_ids for pair in (*self.fresh, *self.replay))

    def _max_norm(self) -> float:
        """The largest usual gradient norm; infinite where all new pairs to train on are trusted."""
        trained = [outcome.pair.exempt for outcome in self.outcomes if outcome.trained]
        return math.inf if trained and all(trained) else self._detector.max_norm()

    def finish(self) -> None:
        """Take the optimizer step, if a pair is to be trained on and loss and gradient are finite and usual.

        `error`, `burst`, `doubted` and `rejected_reason` tell why it was not taken.
        """
        new = [outcome for outcome in self.outcomes if not (outcome.pair.epochs_done or outcome.pair.exempt)]
        judged = [outcome for outcome in new if outcome.pair.telling]
        burst = self._detector.burst([outcome.verdict for outcome in judged])
        # A change of preferences begins as a burst of the user's own signals.
        self.turned = bool(burst) and all(outcome.pair.first_party for outcome in judged)
        self.burst = "" if self.turned else burst
        self.doubted = self._untested and bool(burst or any(outcome.verdict.why for outcome in judged))
        kept = [outcome for outcome in self._taken if not outcome.verdict.why]
        if self.doubted or self.burst or not kept:
            return
        total = sum(outcome.count * outcome.objective for outcome in kept)
        self.loss = total / max(1, sum(outcome.count for outcome in kept))
        if not math.isfinite(self.loss):
            self.error = f"loss is {self.loss}"
        elif self.trained:
            trained = [outcome for outcome in self._taken if outcome.trained]
            weight, count = (sum(of) for of in zip(*((each.pair.weight, each.count) for each in trained), strict=True))
            try:
                rest = (count, weight, self._max_norm(), self._lr_scale, self._align)
                self.grad_norm = self.state.step(self.state.master_gradients(self.gradients), *rest)
            except GradientTooLarge as error:
                self.rejected_reason, self.doubted = str(error), self._untested
            except FloatingPointError as error:
                self.error = str(error)
            except (RuntimeError, MemoryError) as error:
                # Such as out of memory: this state is as before the step, adapters stepped before it keep theirs.
                self.error, self.starved = logs.first_line(error, with_kind=True), out_of_memory(error)
