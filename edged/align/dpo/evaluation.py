"""The held-out test of a version: neutral text and pairs that are not trained on, under the adapter and the base."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from edged.align.dpo.decoder import Decoder
from edged.align.dpo.loss import answer_logps, example_loss, pair_score
from edged.align.dpo.micro_batch import HeadWindow, MicroBatch, PairForward, head_windows
from edged.align.dpo.step_plan import Work, head_window_size
from edged.align.feedback.pair import PairScored, TokenPair
from edged.settings.load import AlignSettings


class HeldOutEvaluation:
    """A test that scores neutral text and held-out pairs under a version and the base: forward and head windows only.

    Neutral text comes first: it is short and shows whether the adapter is broken.
    """

    def __init__(
        self,
        adapter: str,
        version: int,
        pairs: Sequence[TokenPair],
        decoder: Decoder,
        align: AlignSettings,
        release: Callable[[np.ndarray], None],
        neutral: Sequence[TokenPair] = (),
        with_kl: bool = True,
    ) -> None:
        """`neutral` pairs have negative ids; the base's log-probabilities of them are computed where unknown.

        Without KL so are those of all pairs, and the test is about half as long.
        """
        self.adapters, self.version, self.decoder, self.align = (adapter,), version, decoder, align
        self.scores: list[PairScored] = []
        self.neutral: list[TokenPair] = []
        """Neutral pairs scored so far, with the base's log-probabilities."""
        self._neutral_logp = 0.0
        self.finished = False
        self._release, self._with_kl = release, with_kl
        self._pairs = [*(replace(pair, adapter=adapter) for pair in neutral), *pairs]
        self.groups_done = 0
        self._open()

    def _open(self) -> None:
        # KL needs the base's whole distributions; for neutral text its log-probabilities are enough.
        self.micro_batch = MicroBatch(
            [self._pairs.pop(0)],
            lambda pair: (self._with_kl and pair.pair_id >= 0) or pair.ref_chosen_logp is None,
            "nothing",
            self.decoder,
            self.align,
        )
        self._reset()

    def _reset(self) -> None:
        size = head_window_size(self.align.window_tokens, self.decoder.vocab_size)
        device = self.decoder.device
        reference, policy = head_windows(self.micro_batch, True, size), head_windows(self.micro_batch, False, size)
        known: list[HeadWindow | None] = [*reference] or [None] * len(policy)
        self._heads = list(zip(known, policy, strict=True))
        self._next = 0
        self._sums = torch.zeros(self.micro_batch.owners, device=device)
        self._kl = torch.zeros_like(self._sums)

    @property
    def packing(self) -> MicroBatch:
        """The micro-batch whose forward is computed next."""
        return self.micro_batch

    @property
    def pair_forwards(self) -> list[PairForward]:
        """All forwards under way."""
        return self.micro_batch.pair_forwards

    def restart(self) -> None:
        """Start the current pair again, after its pages were taken away."""
        self.micro_batch.restart(self._release)
        self._reset()

    def free(self) -> None:
        """Give the pair's pages back."""
        self.micro_batch.free(self._release)

    def units_left(self) -> list[Work]:
        """Head windows of the current pair that are left."""
        return [
            ("test", len(self.micro_batch.pair_forwards) * len(policy.rows)) for _, policy in self._heads[self._next :]
        ]

    def run_unit(self, _most: int = 0) -> Work:
        """Score one window, a whole one, under both policies."""
        reference, policy = self._heads[self._next]
        self._next += 1
        both = []
        with torch.no_grad():
            for head in (reference, policy) if reference is not None else (policy,):
                logps = self.decoder.logits(self.micro_batch.last.index_select(0, head.rows)).log_softmax(-1)
                self._sums.index_add_(0, head.owners, logps.gather(1, head.targets[:, None])[:, 0])
                both.append(logps)
            # KL(policy || base) over the vocabulary, exact at every scored position.
            self._kl.index_add_(0, policy.owners, (both[-1].exp() * (both[-1] - both[0])).sum(-1))
        if self._next == len(self._heads):
            self._score()
        return "test", len(both) * len(policy.rows)

    def _score(self) -> None:
        pair_forward = self.micro_batch.pair_forwards[-1]
        sums, kl = torch.stack((self._sums, self._kl)).tolist()
        pair = pair_forward.pair
        known = [pair.ref_chosen_logp or 0.0, pair.ref_rejected_logp or 0.0]
        if len(self.micro_batch.pair_forwards) == 2:
            known = sums[self.micro_batch.pair_forwards[0].owners]
        answers = answer_logps(sums[pair_forward.owners], known, pair_forward.layout.scored_tokens)
        if len(self.micro_batch.pair_forwards) == 2:
            pair = replace(pair, ref_chosen_logp=known[0], ref_rejected_logp=known[1])
        if pair.pair_id < 0:
            self.neutral.append(pair)
            self._neutral_logp += sum(answer.logp for answer in answers[:2])
        else:
            # People's own texts are far from the base by nature, before an answer has changed.
            own = pair.own if any(pair.own) else (True, True)
            measured = [at for at in range(2) if own[at]]
            tokens = sum(answers[at].num_tokens for at in measured)
            mean_kl = sum(kl[pair_forward.owners][at] for at in measured) / max(tokens, 1)
            loss = example_loss(pair, answers, self.align)
            self.scores.append(pair_score(pair, self.version, "held_out", answers, loss, mean_kl))
        self.free()
        if self._pairs:
            self.groups_done += 1
            self._open()
        else:
            self.finished = True

    @property
    def neutral_nll(self) -> tuple[float, float] | None:
        """NLL of the neutral text in nats per token under (the adapter, the base); None without such text."""
        num_tokens = sum(len(pair.chosen) + len(pair.rejected) for pair in self.neutral)
        base = sum((pair.ref_chosen_logp or 0.0) + (pair.ref_rejected_logp or 0.0) for pair in self.neutral)
        return (-self._neutral_logp / num_tokens, -base / num_tokens) if num_tokens else None
