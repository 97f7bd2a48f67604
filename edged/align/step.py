"""Fine-tune work, cut into pieces that can be packed and preempted: the exact DPO step and the held-out test.

Owns the order of the work and its gradients: packed forward without autograd, head windows, then layers from last to
first in token windows from last to first (FlexLLM Algorithm 2, over the branches of a pair), then the optimizer. Must
not know who decides when a piece runs, or whose pages it uses: a `Decoder` runs single layers, the engine the forward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch

from edged.align.adapter import AdapterState
from edged.align.layer_inputs import LayerInputs
from edged.align.layout import PairLayout, Piece
from edged.align.loss import PairLogps, preference_loss
from edged.align.pair import PairScored, TokenPair
from edged.config import AlignSettings

LoraLeaves = Mapping[str, tuple[torch.Tensor, torch.Tensor]]
KeysValues = tuple[torch.Tensor, torch.Tensor]
Work = tuple[str, int]
"""A unit's kind ("head", "layer" or "step") and the tokens it covers."""

_HEAD_LOGITS = 1 << 23
"""Logits that a head unit may hold at once: 32 MiB in fp32."""


@dataclass(frozen=True, slots=True)
class Branches:
    """One pair inside a window of rows: window rows [first, last) are the pair's flat rows from `start` on.

    `earlier` are the pair's keys and values [kv_heads, start, head_dim] before the window, None when `start` is 0.
    """

    first: int
    last: int
    start: int
    pieces: tuple[Piece, ...]
    earlier: KeysValues | None


class Decoder(Protocol):
    """What a step needs of the served model."""

    layer_count: int
    hidden_size: int
    vocab_size: int
    device: torch.device
    dtype: torch.dtype

    def read_kv(self, layer: int, pages: np.ndarray, rows: int) -> KeysValues:
        """Keys and values [kv_heads, rows, head_dim] of the first `rows` rows in `pages`."""

    def run_branches(
        self,
        layer: int,
        hidden: torch.Tensor,
        call: Mapping[str, Any],
        branches: Sequence[Branches],
        weights: LoraLeaves,
        scaling: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """One layer with autograd: [tokens, hidden] -> output, own keys, own values ([kv_heads, tokens, head_dim])."""

    def layer_linears(self, layer: int) -> list[str]:
        """Names of the LoRA linears in a layer."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Final norm and head: [tokens, hidden] -> [tokens, vocab] in fp32."""


@dataclass(slots=True, eq=False)
class Stream:
    """One pair's forward under one policy: the adapter's or, when `reference`, the base model's."""

    pair: TokenPair
    layout: PairLayout
    reference: bool
    row: int
    """Its first row in the group's last hidden states."""
    kept: int
    """Its first row in the layer inputs; -1 when they are not kept."""
    pages: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    done: int = 0


class Group:
    """Some pairs whose forwards are computed together: their streams, and the last layer's output for all rows."""

    def __init__(
        self, pairs: Sequence[TokenPair], reference: Callable[[TokenPair], bool], keep: bool, decoder: Decoder
    ):
        layouts = [PairLayout.of(pair) for pair in pairs]
        self.streams: list[Stream] = []
        row = kept = 0
        for pair, layout in zip(pairs, layouts, strict=True):
            for is_reference in (True, False):
                if is_reference and not reference(pair):
                    continue
                keeps = keep and not is_reference
                self.streams.append(Stream(pair, layout, is_reference, row, kept if keeps else -1))
                row += layout.tokens
                kept += layout.tokens if keeps else 0
        self.rows, self.kept_rows = row, kept
        self.last = torch.empty(row, decoder.hidden_size, dtype=decoder.dtype, device=decoder.device)
        self.inputs = (
            LayerInputs(decoder.layer_count, kept, decoder.hidden_size, decoder.dtype, decoder.device) if keep else None
        )

    @property
    def tokens_left(self) -> int:
        """Forward tokens that are not computed yet."""
        return sum(stream.layout.tokens - stream.done for stream in self.streams)

    def take(self, tokens: int) -> list[tuple[Stream, Piece]]:
        """The next `tokens` forward tokens as pieces; `advance` makes them done."""
        taken: list[tuple[Stream, Piece]] = []
        for stream in self.streams:
            stop = min(stream.layout.tokens, stream.done + tokens)
            if stop > stream.done:
                taken += [(stream, piece) for piece in stream.layout.pieces(stream.done, stop)]
                tokens -= stop - stream.done
        return taken

    def advance(self, tokens: int) -> None:
        """Mark the next `tokens` as computed."""
        for stream in self.streams:
            n = min(tokens, stream.layout.tokens - stream.done)
            stream.done += n
            tokens -= n

    def scored(self, stream: Stream) -> tuple[np.ndarray, np.ndarray, int]:
        """(rows in `last`, target ids, number of the chosen answer's) of a stream's scored predictions."""
        chosen, rejected = stream.layout.scored_rows()
        rows = np.concatenate((chosen, rejected)) + stream.row
        return rows, np.concatenate(stream.layout.targets()), len(chosen)


@dataclass(slots=True)
class HeadWindow:
    """Scored predictions of one unit: rows of the group's last hidden states, targets, and each one's sum."""

    rows: torch.Tensor
    targets: torch.Tensor
    owners: torch.Tensor
    """Index of (stream, answer): 2 * stream + 0 for chosen, + 1 for rejected."""
    reference: bool
    gradient: torch.Tensor | None = None
    """d (sum of its log-probabilities) / d (last hidden state), per row."""


def head_windows(group: Group, reference: bool, size: int, device: torch.device) -> list[HeadWindow]:
    """Cut the scored predictions of the reference's or the policy's streams into windows of at most `size`."""
    rows, targets, owners = [], [], []
    for index, stream in enumerate(group.streams):
        if stream.reference == reference:
            r, t, chosen = group.scored(stream)
            rows.append(r)
            targets.append(t)
            owners.append(np.where(np.arange(len(r)) < chosen, 2 * index, 2 * index + 1))
    if not rows:
        return []
    tables = torch.from_numpy(np.stack([np.concatenate(x) for x in (rows, targets, owners)])).to(device)
    return [HeadWindow(part[0], part[1], part[2], reference) for part in tables.split(size, dim=1)]


def head_window_size(window_tokens: int, vocab_size: int) -> int:
    """Predictions per head unit: the window, or fewer where the vocabulary's logits would be large."""
    return max(8, min(window_tokens, _HEAD_LOGITS // vocab_size))


class DpoStep:
    """One optimizer step of one adapter over some pairs, pair group by pair group.

    Its life: while `tokens_left`, the engine packs `take`n pieces into its forwards, fills `group.last` and
    `group.inputs`, and calls `advance`; then `run_unit` until `finished`. The gradient is the mean over the pairs whose
    loss is not under the threshold (MACE CheckEnd) of d loss / d LoRA, exactly as on whole sequences.
    """

    def __init__(
        self,
        state: AdapterState,
        fresh: Sequence[TokenPair],
        replay: Sequence[TokenPair],
        decoder: Decoder,
        align: AlignSettings,
        release: Callable[[np.ndarray], None],
    ) -> None:
        self.state, self.decoder, self.align = state, decoder, align
        self.adapter, self.version = state.name, state.version
        self.fresh, self.replay = list(fresh), list(replay)
        self.outcomes: list[tuple[TokenPair, float, bool]] = []
        """(pair with its reference log-probabilities, loss, whether it was trained on) of the fresh pairs."""
        self.scores: list[PairScored] = []
        self.loss = float("nan")
        self.grad_norm = 0.0
        self.trained = 0
        self.error = ""
        self.finished = False
        self._release = release
        self._losses: list[float] = []
        self._gradients = {n: (torch.zeros_like(a), torch.zeros_like(b)) for n, (a, b) in state.weights.items()}
        self._batches = self._cut([*self.fresh, *self.replay])
        self._head_size = head_window_size(align.window_tokens, decoder.vocab_size)
        self._open()

    def _cut(self, pairs: list[TokenPair]) -> list[list[TokenPair]]:
        """Groups of about two windows: few enough rows to keep, enough of them for full windows."""
        groups: list[list[TokenPair]] = []
        room = 0
        for pair in pairs:
            size = len(pair.prompt) + len(pair.chosen) + len(pair.rejected)
            if not groups or size > room:
                groups.append([])
                room = 2 * self.align.window_tokens
            groups[-1].append(pair)
            room -= size
        return groups

    def _open(self) -> None:
        """Begin the next group's forward."""
        # Version 0 answers as the base: its own log-probabilities are the reference's.
        self.group = Group(
            self._batches.pop(0), lambda p: p.ref_chosen_logp is None and self.version > 0, True, self.decoder
        )
        self._reset_group()

    def _reset_group(self) -> None:
        d = self.decoder.device
        self._heads = head_windows(self.group, True, self._head_size, d)
        self._heads += head_windows(self.group, False, self._head_size, d)
        self._next_head = 0
        self._sums = torch.zeros(2 * len(self.group.streams), dtype=torch.float32, device=d)
        self._windows: list[tuple[int, int]] = []
        self._layer, self._next_window = -1, 0
        self._earlier: dict[int, KeysValues] = {}
        self._decided = False

    # -- the forward -------------------------------------------------------------------------------------------------

    @property
    def tokens_left(self) -> int:
        """Forward tokens of the present group that are still to compute."""
        return self.group.tokens_left

    def restart(self) -> None:
        """The group's pages were taken away: its forward starts again; earlier groups' gradients stay."""
        for stream in self.group.streams:
            stream.done = 0
        self.free()
        self._reset_group()

    def free(self) -> None:
        """Give the group's pages back."""
        for stream in self.group.streams:
            if len(stream.pages):
                self._release(stream.pages)
                stream.pages = stream.pages[:0]

    # -- the units ---------------------------------------------------------------------------------------------------

    def units_left(self) -> list[Work]:
        """What is left of this group after its forward, as far as it can be known before the losses are."""
        work: list[Work] = [("head", len(head.rows)) for head in self._heads[self._next_head :]]
        if self._decided:
            windows, layers = self._windows, self._layer
        else:
            windows, layers = self._spans([(0, self.group.kept_rows)]), self.decoder.layer_count - 1
        sizes: list[Work] = [("layer", stop - start) for start, stop in windows]
        if layers >= 0:
            work += sizes[self._next_window :] + sizes * layers
        if not self._batches:
            work.append(("step", 0))
        return work

    def run_unit(self) -> Work:
        """Run the next unit; what ran."""
        if self._next_head < len(self._heads):
            head = self._heads[self._next_head]
            self._next_head += 1
            self._head_unit(head)
            if self._next_head == len(self._heads):
                self._decide()
            return "head", len(head.rows)
        if self._layer >= 0:
            start, stop = self._windows[self._next_window]
            self._layer_unit(self._layer, start, stop)
            self._next_window += 1
            if self._next_window == len(self._windows):
                self._next_window, self._layer, self._earlier = 0, self._layer - 1, {}
            if self._layer < 0:
                self._end_group()
            return "layer", stop - start
        self._end_step()
        return "step", 0

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
        fresh = {pair.pair_id for pair in self.fresh}
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
            loss = preference_loss(logps, self.align.beta, self.align.loss)
            train = loss.loss >= self.align.loss_threshold
            if train:
                coefficients[2 * index] = pair.weight * loss.chosen_grad
                coefficients[2 * index + 1] = pair.weight * loss.rejected_grad
                active.append((stream.kept, stream.kept + stream.layout.tokens))
            self._losses.append(loss.loss)
            if pair.pair_id in fresh:
                self._record(pair, logps, loss.loss, loss.reward_margin, train)
        self.trained += len(active)
        self._decided = True
        self._windows = self._spans(active)
        if active:
            self._layer = self.decoder.layer_count - 1
            self._earlier = {}
            self._upstream = self._scaled_gradient(coefficients)
        else:
            self._end_group()

    def _record(self, pair: TokenPair, logps: PairLogps, loss: float, margin: float, train: bool) -> None:
        known = _with_reference(pair, logps.ref_chosen, logps.ref_rejected)
        self.outcomes.append((known, loss, train))
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
                    reward_margin=margin,
                    loss=loss,
                )
            )

    def _scaled_gradient(self, coefficients: list[float]) -> torch.Tensor:
        """d loss / d (last layer's output) for the kept rows: the head's gradients times each answer's coefficient."""
        device = self.decoder.device
        scale = torch.tensor(coefficients, dtype=torch.float32).to(device)
        kept_row = torch.full((self.group.rows,), -1, dtype=torch.int64)
        for stream in self.group.streams:
            if stream.kept >= 0:
                first = stream.row
                kept_row[first : first + stream.layout.tokens] = torch.arange(
                    stream.kept, stream.kept + stream.layout.tokens
                )
        kept_row = kept_row.to(device)
        out = torch.zeros(self.group.kept_rows, self.decoder.hidden_size, dtype=torch.float32, device=device)
        for head in self._heads:
            if head.gradient is not None:
                weighted = head.gradient.float() * scale.index_select(0, head.owners)[:, None]
                out.index_add_(0, kept_row.index_select(0, head.rows), weighted)
                head.gradient = None
        return out.to(self.decoder.dtype)

    def _spans(self, active: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Windows of the active kept rows, last first; neighbours share windows, gaps end them."""
        runs: list[tuple[int, int]] = []
        for start, stop in active:
            if runs and runs[-1][1] == start:
                runs[-1] = (runs[-1][0], stop)
            else:
                runs.append((start, stop))
        size = self.align.window_tokens
        return [(max(start, last - size), last) for start, stop in reversed(runs) for last in range(stop, start, -size)]

    def _layer_unit(self, layer: int, start: int, stop: int) -> None:
        """Recompute one layer on one window from its kept input and back-propagate through it.

        The output's gradient and the gradient that later windows left on this window's own K/V go in; the gradients of
        the input, of the earlier K/V and of the layer's LoRA matrices come out.
        """
        assert self.group.inputs is not None
        branches, owners, leaves = self._branches(layer, start, stop)
        hidden = self.group.inputs.hidden[layer, start:stop].detach().requires_grad_(layer > 0)
        names = self.decoder.layer_linears(layer)
        weights = {name: self.state.weights[name] for name in names}
        call = self.group.inputs.window(layer, start, stop)
        with torch.enable_grad():
            out, keys, values = self.decoder.run_branches(
                layer, hidden, call, branches, weights, self.state.spec.scaling
            )
        outputs, upstream = [out], [self._upstream[start:stop]]
        if any(stream.row in self._earlier for stream in owners):
            outputs += [keys, values]
            upstream += self._own_gradients(branches, owners, keys)
        inputs = [*([hidden] if layer else []), *leaves, *(t for pair in weights.values() for t in pair)]
        gradients = list(torch.autograd.grad(outputs, inputs, upstream, allow_unused=True))
        if layer:
            self._upstream[start:stop] = _present(gradients.pop(0))
        for branch, stream in zip(branches, owners, strict=True):
            if branch.earlier is not None:
                self._add_earlier(stream, branch, gradients.pop(0), gradients.pop(0))
        for name in names:
            for total in self._gradients[name]:
                total.add_(_present(gradients.pop(0)))

    def _branches(self, layer: int, start: int, stop: int) -> tuple[list[Branches], list[Stream], list[torch.Tensor]]:
        """The pairs that a window covers, with their earlier K/V as leaves."""
        branches, owners, leaves = [], [], []
        for stream in self.group.streams:
            first, last = max(start, stream.kept), min(stop, stream.kept + stream.layout.tokens)
            if stream.kept < 0 or first >= last:
                continue
            begin = first - stream.kept
            earlier = None
            if begin:
                earlier = self.decoder.read_kv(layer, stream.pages, begin)
                for tensor in earlier:
                    leaves.append(tensor.requires_grad_(True))
            pieces = tuple(stream.layout.pieces(begin, last - stream.kept))
            branches.append(Branches(first - start, last - start, begin, pieces, earlier))
            owners.append(stream)
        return branches, owners, leaves

    def _own_gradients(
        self, branches: Sequence[Branches], owners: Sequence[Stream], keys: torch.Tensor
    ) -> list[torch.Tensor]:
        """What later windows' attention left on this window's own keys and values."""
        both = [torch.zeros_like(keys), torch.zeros_like(keys)]
        for branch, stream in zip(branches, owners, strict=True):
            if stream.row in self._earlier:
                rows = slice(branch.start, branch.start + branch.last - branch.first)
                for into, total in zip(both, self._earlier[stream.row], strict=True):
                    into[:, branch.first : branch.last] = total[:, rows]
        return both

    def _add_earlier(self, stream: Stream, branch: Branches, *gradients: torch.Tensor | None) -> None:
        """Add a window's gradients of its pair's earlier K/V to the accumulators (fp32, one layer at a time)."""
        for part, gradient in enumerate(gradients):
            value = _present(gradient)
            if stream.row not in self._earlier:
                shape = (value.shape[0], branch.start, value.shape[2])
                self._earlier[stream.row] = (
                    value.new_zeros(shape, dtype=torch.float32),
                    value.new_zeros(shape, dtype=torch.float32),
                )
            self._earlier[stream.row][part][:, : branch.start] += value

    def _end_group(self) -> None:
        self._layer = -1
        self.free()
        if self._batches:
            self._open()
        elif self.trained == 0:
            self._end_step()

    def _end_step(self) -> None:
        """The optimizer, when there is something to learn and all of it is finite."""
        self.finished = True
        self.loss = sum(self._losses) / len(self._losses)
        if self.loss != self.loss or self.loss == float("inf"):
            self.error = f"loss is {self.loss}"
        elif self.trained:
            try:
                self.grad_norm = self.state.step(self._gradients, self.trained)
            except FloatingPointError as error:
                self.error = str(error)


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
        self.adapter, self.version, self.decoder, self.align = adapter, version, decoder, align
        self.scores: list[PairScored] = []
        self.finished = False
        self.loss = 0.0
        self._release = release
        self._pairs = list(pairs)
        self._open()

    def _open(self) -> None:
        self.group = Group([self._pairs.pop(0)], lambda _: True, False, self.decoder)
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
        for stream in self.group.streams:
            stream.done = 0
        self.free()
        self._reset()

    def free(self) -> None:
        """Give the pair's pages back."""
        for stream in self.group.streams:
            if len(stream.pages):
                self._release(stream.pages)
                stream.pages = stream.pages[:0]

    def units_left(self) -> list[Work]:
        """Head windows of the present pair."""
        return [("head", 2 * len(policy.rows)) for _, policy in self._heads[self._next :]]

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
        return "head", 2 * len(policy.rows)

    def _score(self) -> None:
        stream = self.group.streams[1]
        ref_chosen, ref_rejected, chosen, rejected, kl = torch.cat((self._sums, self._kl[None])).tolist()
        logps = PairLogps(chosen, rejected, ref_chosen, ref_rejected, stream.layout.chosen, stream.layout.rejected)
        loss = preference_loss(logps, self.align.beta, self.align.loss)
        scored = sum(len(policy.rows) for _, policy in self._heads)
        self.scores.append(
            PairScored(
                pair_id=stream.pair.pair_id,
                adapter=self.adapter,
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
            self._open()
        else:
            self.finished = True


FineTuneStep = DpoStep | HeldOutTest


def _present(gradient: torch.Tensor | None) -> torch.Tensor:
    """A gradient that the graph must have produced."""
    if gradient is None:
        raise RuntimeError("a decoder layer ignored its input or its LoRA matrices: its gradient cannot be computed")
    return gradient


def _with_reference(pair: TokenPair, chosen: float, rejected: float) -> TokenPair:
    return replace(pair, ref_chosen_logp=chosen, ref_rejected_logp=rejected)
