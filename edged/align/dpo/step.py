"""One exact DPO step, cut into pieces that can be packed and preempted."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from edged.align.dpo.adapter_step import AdapterStep
from edged.align.dpo.decoder import Decoder
from edged.align.dpo.full_graph import FullGraphBackward
from edged.align.dpo.loss import PairLogps
from edged.align.dpo.micro_batch import HeadWindow, MicroBatch, Work, head_window_size, head_windows
from edged.align.dpo.recompute import RecomputeBackward, upstream_of, windows_of
from edged.align.feedback.pair import TokenPair
from edged.settings.load import AlignSettings


class DpoStep:
    """One optimizer step of each of its members over all their pairs, pair group by pair group.

    Its life: while `tokens_left`, the engine packs `take`n pieces into its forwards, fills `group.last` and
    `group.inputs`, and calls `advance` (a kept graph fills the policy's rows itself); then `run_unit` until `finished`.
    Members share the units, which read the base weights once for all; every row sees its own adapter. Each member's
    gradient is exactly what its step alone would have given, on whole sequences, and so is all that follows from it.
    """

    def __init__(
        self,
        members: Sequence[AdapterStep],
        decoder: Decoder,
        align: AlignSettings,
        release: Callable[[np.ndarray], None],
        most_tokens: int,
        keep_graph: bool = False,
    ) -> None:
        """`most_tokens` bounds what a group's forward by one policy may put into the cache.

        With `keep_graph` groups of at most a window keep their graph, so that no layer is computed twice.
        """
        self.decoder, self.align = decoder, align
        self.members = {member.adapter: member for member in members}
        self.adapters = tuple(self.members)
        self.finished = False
        self._release = release
        self._leaves = {member.adapter: member.leaves for member in members}
        self.keeps_graph = keep_graph
        windows = 1 if keep_graph else 2
        pairs = [pair for member in members for pair in (*member.fresh, *member.replay)]
        self._batches = groups_of(pairs, min(windows * align.window_tokens, most_tokens))
        self._head_size = head_window_size(align.window_tokens, decoder.vocab_size)
        self.groups_done = 0
        self._open()

    def _open(self) -> None:
        """Begin the next group's forward."""
        # Version 0 answers as the base: its own log-probabilities are the reference's.
        pairs = self._batches.pop(0)
        tokens = sum(pair.tokens for pair in pairs)
        self._graphed = self.keeps_graph and tokens <= self.align.window_tokens
        self.group = MicroBatch(
            pairs,
            lambda p: p.ref_chosen_logp is None and self.members[p.adapter].version > 0,
            "graph" if self._graphed else "inputs",
            self.decoder,
        )
        self._reset_group()

    def _reset_group(self) -> None:
        d = self.decoder.device
        self._heads = head_windows(self.group, True, self._head_size, d)
        self._heads += head_windows(self.group, False, self._head_size, d)
        self._next_head = 0
        self._sums = torch.zeros(2 * len(self.group.streams), dtype=torch.float32, device=d)
        self._backward: RecomputeBackward | FullGraphBackward | None = None
        self._graph = FullGraphBackward(self.group, self.decoder, self._leaves) if self._graphed else None

    # -- the forward -------------------------------------------------------------------------------------------------

    @property
    def tokens_left(self) -> int:
        """Forward tokens of the present group that are still to compute."""
        return self.group.tokens_left

    def restart(self) -> None:
        """The group's pages were taken away: it starts again as if nothing of it had been computed."""
        self.group.restart(self._release)
        for member in self.members.values():
            member.restart()
        self._reset_group()

    def free(self) -> None:
        """Give the group's pages back."""
        self.group.free(self._release)

    # -- the units ---------------------------------------------------------------------------------------------------

    def units_left(self) -> list[Work]:
        """What is left of this group after its forward, as far as it can be known before the losses are."""
        rows, layers = self.group.kept_rows, self.decoder.layer_count
        work: list[Work] = [("graph", rows)] * (self._graph.forward_left if self._graph else 0)
        work += [(_head_kind(head), len(head.rows)) for head in self._heads[self._next_head :]]
        if self._backward is not None:
            work += [(self._backward_kind, size) for size in self._backward.sizes_left()]
        elif self._next_head < len(self._heads):
            # A kept graph is one window: a layer's rows go back together.
            windows = windows_of([(0, rows)], rows if self._graphed else self.align.window_tokens)
            work += [(self._backward_kind, stop - start) for start, stop in windows] * layers
        if not self._batches:
            work.append(("step", len(self.members)))
        return work

    def run_unit(self) -> Work:
        """Run the next unit; what ran."""
        if self._graph is not None and self._graph.forward_left:
            return "graph", self._graph.forward_unit()
        if self._next_head < len(self._heads):
            head = self._heads[self._next_head]
            self._next_head += 1
            self._head_unit(head)
            if self._next_head == len(self._heads):
                self._decide()
            return _head_kind(head), len(head.rows)
        if self._backward is not None:
            kind, tokens = self._backward_kind, self._backward.run_unit()
            if self._backward.finished:
                self._end_group()
            return kind, tokens
        self._end_step()
        return "step", len(self.members)

    @property
    def _backward_kind(self) -> str:
        """What a backward unit is called: going back through a kept graph costs less than computing a layer again."""
        return "grad" if self._graphed else "layer"

    def _head_unit(self, head: HeadWindow) -> None:
        """Log-probabilities of a window and, for the policy, their gradient: the head is computed once, not twice."""
        hidden = self.group.last.index_select(0, head.rows)
        with torch.set_grad_enabled(not head.reference):
            hidden.requires_grad_(not head.reference)
            logits = self.decoder.logits(hidden)
        flat = logits.detach()
        total = flat.logsumexp(-1, keepdim=True)
        logps = flat.gather(1, head.targets[:, None]) - total
        self._sums.index_add_(0, head.owners, logps[:, 0])
        if not head.reference:
            # d sum(log p) / d logits = onehot - softmax
            upstream = (flat - total).exp_().neg_()
            upstream.scatter_add_(1, head.targets[:, None], torch.ones_like(logps))
            (head.gradient,) = torch.autograd.grad(logits, hidden, upstream)

    def _decide(self) -> None:
        """All four sums of each pair are known: losses, CheckEnd, and the gradient at the last layer's output."""
        sums = self._sums.tolist()
        coefficients = [0.0] * len(sums)
        reference: dict[int, tuple[float, float]] = {}
        active: list[tuple[int, int]] = []
        for index, stream in enumerate(self.group.streams):
            chosen, rejected = sums[2 * index], sums[2 * index + 1]
            if stream.reference:
                reference[id(stream.pair)] = (chosen, rejected)
                continue
            known = reference.get(id(stream.pair), (chosen, rejected))
            pair = stream.pair
            if pair.ref_chosen_logp is not None and pair.ref_rejected_logp is not None:
                known = (pair.ref_chosen_logp, pair.ref_rejected_logp)
            logps = PairLogps(chosen, rejected, known[0], known[1], stream.layout.chosen, stream.layout.rejected)
            loss = self.members[pair.adapter].take(pair, logps)
            if loss is not None:
                coefficients[2 * index] = pair.weight * loss.chosen_grad
                coefficients[2 * index + 1] = pair.weight * loss.rejected_grad
                active.append((stream.kept, stream.kept + stream.layout.tokens))
        if active:
            self._backward = self._begin_backward(active, coefficients)
        else:
            self._end_group()

    def _begin_backward(
        self, active: Sequence[tuple[int, int]], coefficients: Sequence[float]
    ) -> RecomputeBackward | FullGraphBackward:
        """From the gradient at the last layer's output: the kept rows `active` have a part in it."""
        upstream = upstream_of(self.group, self._heads, coefficients, self.decoder)
        if self._graph is not None:
            self._graph.start_backward(upstream)
            return self._graph
        windows = windows_of(active, self.align.window_tokens)
        return RecomputeBackward(self.group, windows, upstream, self.decoder, self._leaves)

    def _end_group(self) -> None:
        # The optimizer's copies take the room of the layers' inputs.
        self._backward = self._graph = self.group.inputs = None
        self.free()
        if self._batches:
            for member in self.members.values():
                member.mark()
            self.groups_done += 1
            self._open()
        elif not any(member.trained for member in self.members.values()):
            self._end_step()

    def _end_step(self) -> None:
        """The optimizers, in one unit: between two of them nobody could take a member out of the step any more."""
        self.finished = True
        for member in self.members.values():
            member.finish()


def groups_of(pairs: Sequence[TokenPair], most: int) -> list[list[TokenPair]]:
    """Groups of at most `most` tokens: few enough rows to keep, enough of them for full windows."""
    groups: list[list[TokenPair]] = []
    room = 0
    for pair in pairs:
        if not groups or pair.tokens > room:
            groups.append([])
            room = most
        groups[-1].append(pair)
        room -= pair.tokens
    return groups


def _head_kind(head: HeadWindow) -> str:
    """The reference's log-probabilities are only read: their windows cost a third of those with a gradient."""
    return "score" if head.reference else "head"
