"""The held-out test: pairs that are never trained on, scored under an adapter's version and under the base.

Owns the order of its work: packed forwards, then head windows. Must not know what the scores lead to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from edged.align.decoder import Decoder
from edged.align.group import Group, Work, head_window_size, head_windows
from edged.align.loss import PairLogps, preference_loss
from edged.align.pair import PairScored, TokenPair
from edged.config import AlignSettings


class HeldOutTest:
    """Score held-out pairs under an adapter's current version and the base: forward and head windows only."""

    def __init__(
        self,
        adapter: str,
        version: int,
        pairs: Sequence[TokenPair],
        decoder: Decoder,
        align: AlignSettings,
        release: Callable[[np.ndarray], None],
    ) -> None:
        self.adapters, self.version, self.decoder, self.align = (adapter,), version, decoder, align
        self.scores: list[PairScored] = []
        self.finished = False
        self._release = release
        self._pairs = list(pairs)
        self.groups_done = 0
        self._open()

    def _open(self) -> None:
        self.group = Group([self._pairs.pop(0)], lambda _: True, "nothing", self.decoder)
        self._reset()

    def _reset(self) -> None:
        size = head_window_size(self.align.window_tokens, self.decoder.vocab_size)
        device = self.decoder.device
        reference = head_windows(self.group, True, size, device)
        policy = head_windows(self.group, False, size, device)
        self._heads = list(zip(reference, policy, strict=True))
        self._next = 0
        self._sums = torch.zeros(4, device=device)
        self._kl = torch.zeros((), device=device)

    @property
    def tokens_left(self) -> int:
        """Forward tokens of the present pair that are still to compute."""
        return self.group.tokens_left

    def restart(self) -> None:
        """The pages were taken away: the present pair starts again."""
        self.group.restart(self._release)
        self._reset()

    def free(self) -> None:
        """Give the pair's pages back."""
        self.group.free(self._release)

    def units_left(self) -> list[Work]:
        """Head windows of the present pair."""
        return [("test", 2 * len(policy.rows)) for _, policy in self._heads[self._next :]]

    def run_unit(self) -> Work:
        """Score one window under both policies."""
        reference, policy = self._heads[self._next]
        self._next += 1
        both = []
        with torch.no_grad():
            for head in (reference, policy):
                logps = self.decoder.logits(self.group.last.index_select(0, head.rows)).log_softmax(-1)
                self._sums.index_add_(0, head.owners, logps.gather(1, head.targets[:, None])[:, 0])
                both.append(logps)
            # KL(policy || base) over the vocabulary, exact at every scored position.
            self._kl += (both[1].exp() * (both[1] - both[0])).sum()
        if self._next == len(self._heads):
            self._score()
        return "test", 2 * len(policy.rows)

    def _score(self) -> None:
        stream = self.group.streams[1]
        ref_chosen, ref_rejected, chosen, rejected, kl = torch.cat((self._sums, self._kl[None])).tolist()
        logps = PairLogps(chosen, rejected, ref_chosen, ref_rejected, stream.layout.chosen, stream.layout.rejected)
        loss = preference_loss(logps, self.align.beta, self.align.loss)
        scored = sum(len(policy.rows) for _, policy in self._heads)
        self.scores.append(
            PairScored(
                pair_id=stream.pair.pair_id,
                adapter=self.adapters[0],
                version=self.version,
                split="held_out",
                chosen_logp=chosen,
                rejected_logp=rejected,
                ref_chosen_logp=ref_chosen,
                ref_rejected_logp=ref_rejected,
                reward_margin=loss.reward_margin,
                loss=loss.loss,
                kl_nats=kl / max(scored, 1),
            )
        )
        self.free()
        if self._pairs:
            self.groups_done += 1
            self._open()
        else:
            self.finished = True
