"""An exact DPO step, cut into units that can be packed with serving and preempted."""

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import torch

from edged.align.dpo.adapter_step import AdapterStep
from edged.align.dpo.backward import FullGraphBackward, RecomputeBackward, upstream_of
from edged.align.dpo.decoder import Decoder
from edged.align.dpo.loss import LOSSES, answer_logps
from edged.align.dpo.micro_batch import HeadWindow, MicroBatch, PairForward, head_windows
from edged.align.dpo.step_plan import Recompute, StepPlan, Work
from edged.align.feedback.pair import TokenPair
from edged.settings.load import AlignSettings


class DpoStep:
    """An optimizer step of each member adapter over its pairs, one micro-batch of them after the other.

    Its life cycle: while `micro_batch.tokens_left`, the engine packs `take`n pieces into its forwards, fills `last`
    and `inputs` of the micro-batch, and calls `advance` (a kept graph fills the policy's rows itself); then `run_unit`
    until `finished`.
    Beside units the same may be done for the group `ahead`, where `look_ahead` has opened it.
    Members share the units, which read the base weights once for all; every row uses its own adapter. Each member's
    gradient is exactly that of a step of its own on whole sequences, and so is all that follows from it.
    """

    def __init__(
        self,
        adapter_steps: Sequence[AdapterStep],
        decoder: Decoder,
        align: AlignSettings,
        release: Callable[[np.ndarray], None],
        max_tokens: int,
        recompute: Recompute = "full",
    ) -> None:
        """`max_tokens`: see `StepPlan`. Groups of at most a window recompute what `recompute` says."""
        self.decoder, self.align = decoder, align
        self.adapter_steps = by_adapter = {adapter_step.adapter: adapter_step for adapter_step in adapter_steps}
        self.adapters = tuple(self.adapter_steps)
        self.finished = False
        self._release = release
        self._leaves = {adapter_step.adapter: adapter_step.parameters(decoder.dtype) for adapter_step in adapter_steps}
        self.keeps_graph = recompute != "full"
        self._lean = recompute == "selective"
        self._plan = StepPlan(
            [pair for adapter_step in adapter_steps for pair in adapter_step.examples],
            # Version 0 answers as the base: its own log-probabilities are the reference's. The plan must not refer to
            # the step, whose device memory is freed with the last reference to it.
            lambda pair: pair.ref_chosen_logp is None and by_adapter[pair.adapter].version > 0,
            align,
            decoder.layer_count,
            decoder.vocab_size,
            max_tokens,
            self.keeps_graph,
            len(adapter_steps),
            decoder.keeps_states,
        )
        self.ahead: MicroBatch | None = None
        """The micro-batch after `micro_batch`, where its forward may be computed ahead."""
        self._open()

    def _open(self) -> None:
        """Begin the plan's current group, or go on with what of its forward was computed ahead."""
        keep: Literal["graph", "inputs"] = "graph" if self._plan.graphed else "inputs"
        self.micro_batch = self.ahead or self._micro_batch(self._plan.pairs, keep)
        self.ahead = None
        self._reset_group()

    def _micro_batch(self, pairs: Sequence[TokenPair], keep: Literal["graph", "inputs"]) -> MicroBatch:
        return MicroBatch(pairs, self._plan.needs_reference, keep, self.decoder, self.align)

    def look_ahead(self) -> None:
        """Open the next micro-batch, if there is one, once the present one's forward has ended."""
        if self.ahead is None and self._plan.following and not self.micro_batch.tokens_left:
            self.ahead = self._micro_batch(self._plan.following, "inputs")

    @property
    def packing(self) -> MicroBatch:
        """The micro-batch whose forward is computed next."""
        return self.micro_batch if self.ahead is None or self.micro_batch.tokens_left else self.ahead

    @property
    def pair_forwards(self) -> list[PairForward]:
        """All forwards under way, those computed ahead last."""
        return self.micro_batch.pair_forwards + (self.ahead.pair_forwards if self.ahead is not None else [])

    def _reset_group(self) -> None:
        size = self._plan.head_size
        self._heads: list[HeadWindow] = []
        """Windows of predictions that are scored; `_heads_left` are the others, in order."""
        self._heads_left = [head for kind in (True, False) for head in head_windows(self.micro_batch, kind, size)]
        self._sums = torch.zeros(self.micro_batch.owners, dtype=torch.float32, device=self.decoder.device)
        """Log-probabilities of the group's scored texts."""
        self._weighted = torch.zeros_like(self._sums)
        """The same of each token times its probability, for DFT."""
        self._backward: RecomputeBackward | FullGraphBackward | None = None
        about = self.micro_batch, self.decoder, self._leaves, self._lean
        self._graph = FullGraphBackward(*about) if self._plan.graphed else None

    @property
    def groups_done(self) -> int:
        """Number of micro-batches that ended."""
        return self._plan.groups_done

    # -- the forward -------------------------------------------------------------------------------------------------

    def restart(self) -> None:
        """Start the current micro-batch again from nothing, after its pages were taken away."""
        self.free()
        self.ahead = None
        self.micro_batch.restart(self._release)
        for adapter_step in self.adapter_steps.values():
            adapter_step.restart()
        self._plan.restart()
        self._reset_group()

    def free(self) -> None:
        """Give all pages back."""
        for micro_batch in (self.micro_batch, self.ahead):
            if micro_batch is not None:
                micro_batch.free(self._release)

    # -- the units ---------------------------------------------------------------------------------------------------

    def units_left(self) -> list[Work]:
        """Units of the current micro-batch after its forward, as far as they are known before the losses."""
        return list(self._plan.units)

    def run_unit(self, most: int = 0) -> Work:
        """Run the next unit, or `most` of its rows (see `StepPlan.take_unit`), and return what ran."""
        unit = self._plan.take_unit(most)
        if unit[0] == "step":
            self._end_step()
            return unit
        if unit[0] == "graph":
            assert self._graph is not None
            self._graph.forward_unit()
        elif unit[0] in ("score", "head"):
            self._head_unit(unit[1])
            if self._plan.scored:
                self._decide()
        else:
            assert self._backward is not None
            self._backward.run_unit(unit[1])
        if self._plan.group_ended:
            self._end_group()
        return unit

    def _head_unit(self, rows: int) -> None:
        """Compute log-probabilities of the next window's last `rows`, and for the policy their gradient in the same
        pass of the head."""
        head = self._heads_left.pop(0)
        if rows < len(head.rows):
            rest, head = head.split(len(head.rows) - rows)
            self._heads_left.insert(0, rest)
        self._heads.append(head)
        hidden = self.micro_batch.last.index_select(0, head.rows)
        with torch.set_grad_enabled(not head.reference):
            hidden.requires_grad_(not head.reference)
            logits = self.decoder.logits(hidden)
        flat = logits.detach()
        total = flat.logsumexp(-1, keepdim=True)
        logps = flat.gather(1, head.targets[:, None]) - total
        if not head.reference:
            # d sum(log p) / d logits = onehot - softmax
            upstream = (flat - total).exp_().neg_()
            upstream.scatter_add_(1, head.targets[:, None], torch.ones_like(logps))
            if LOSSES[self.align.loss].weighs_tokens:
                self._weighted.index_add_(0, head.owners, (logps * logps.exp())[:, 0])
                upstream *= logps.exp()
            if head.floors is not None:
                # Huber's loss of how far the base's own tokens fell under what the base gave them.
                fall = head.floors[:, None] - logps
                slope = fall.clamp(0.0, 1.0)
                upstream *= slope
                logps = torch.where(fall.isinf(), logps, -slope * (fall - slope / 2))
            (head.gradient,) = torch.autograd.grad(logits, hidden, upstream)
        self._sums.index_add_(0, head.owners, logps[:, 0])

    def _decide(self) -> None:
        """Compute the losses from the sums of each pair's answers, apply CheckEnd, and start the backward pass."""
        sums, weighted = torch.stack((self._sums, self._weighted)).tolist()
        coefficients = [0.0] * len(sums)
        reference: dict[int, Sequence[float]] = {}
        active: list[tuple[int, int]] = []
        for pair_forward in self.micro_batch.pair_forwards:
            pair, own = pair_forward.pair, sums[pair_forward.owners]
            if pair_forward.reference:
                reference[id(pair)] = own
                continue
            known = reference.get(id(pair), own)
            if pair.ref_chosen_logp is not None and pair.ref_rejected_logp is not None:
                known = (pair.ref_chosen_logp, pair.ref_rejected_logp)
            answers = answer_logps(own, known, pair_forward.layout.scored_tokens, weighted[pair_forward.owners])
            loss = self.adapter_steps[pair.adapter].add_pair(pair, answers)
            if loss is not None:
                coefficients[pair_forward.owners] = [pair.weight * coefficient for coefficient in loss.coefficients]
                # Rows behind the last answer that has a coefficient have no gradient.
                stops = [
                    stop for (_, stop), each in zip(pair_forward.layout.spans, loss.coefficients, strict=False) if each
                ]
                active.append((pair_forward.kept, pair_forward.kept + max(stops, default=0)))
        windows = self._plan.begin_backward(active)
        if active:
            upstream = upstream_of(self.micro_batch, self._heads, coefficients, self.decoder)
            self._backward = self._graph
            if self._graph is not None:
                self._graph.upstream = upstream
            else:
                self._backward = RecomputeBackward(self.micro_batch, windows, upstream, self.decoder, self._leaves)

    def _end_group(self) -> None:
        # The layers' inputs are freed to make room for the mean gradient.
        self._backward = self._graph = self.micro_batch.inputs = None
        self.micro_batch.masks.clear()
        self.micro_batch.free(self._release)
        if not self._plan.last_group:
            for adapter_step in self.adapter_steps.values():
                adapter_step.mark()
            self._plan.next_group()
            self._open()
        elif not any(adapter_step.trained for adapter_step in self.adapter_steps.values()):
            self._end_step()

    def _end_step(self) -> None:
        """Take all members' optimizer steps in one unit: between two of them no member could leave the step."""
        self.finished = True
        for adapter_step in self.adapter_steps.values():
            adapter_step.finish()
