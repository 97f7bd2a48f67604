"""LoRA in the packed batch: every target linear is wrapped once and holds slots for several adapters.

The adapters' weights and files are in `edged.align.adapters.adapter`.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from edged.align.adapters.form import LoraLeaves
from edged.align.dpo.decoder import LoraRows
from edged.engine.lora.runs import LoraTiles, Run
from edged.engine.lora.segments import LoraSegments, NativeUpdates, ShortRuns, why_no_updates
from edged.tensors.device_copy import upload


class LinearWrapper(nn.Module):
    """A module in the place of a linear, its `base`: who reads weight or bias there gets the linear's own."""

    def __getattr__(self, name: str) -> Any:
        """Return the base's weight and bias, and this module's other attributes."""
        found = super().__getattr__("base" if name in ("weight", "bias") else name)
        return getattr(found, name) if name in ("weight", "bias") else found


class SharedInput:
    """Outputs of linears with one input: the first one to get that input computes the others' outputs, too."""

    def __init__(self) -> None:
        self._input: torch.Tensor | None = None
        self._outputs: dict[int, torch.Tensor] = {}
        """Outputs for `_input` that are not taken yet."""

    def clear(self) -> None:
        """Keep neither an input nor outputs."""
        self._input, self._outputs = None, {}

    def take(self, x: torch.Tensor, index: int, compute: Callable[[], Sequence[torch.Tensor]]) -> torch.Tensor:
        """Return output `index` of `compute()` for `x`; nothing of `x` is kept once all outputs are taken."""
        if x is not self._input or index not in self._outputs:
            self._input, self._outputs = x, dict(enumerate(compute()))
        out = self._outputs.pop(index)
        if not self._outputs:
            self._input = None
        return out


_SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of linears of one parent that get the same input, in transformers' decoders."""
_NORM_ROWS = 512
"""Rows of a weight that are merged at once in fp32, to make their norms."""
_PLACES = {leaf: place for group in _SIBLINGS for place, leaf in enumerate(group)}


def siblings(names: Iterable[str]) -> list[list[str]]:
    """Group module paths: those with one input together, in the order of `_SIBLINGS`, all others alone."""
    groups: dict[str, list[str]] = {}
    for name in names:
        parent, _, leaf = name.rpartition(".")
        first = next((group[0] for group in _SIBLINGS if leaf in group), None)
        groups.setdefault(name if first is None else f"{parent}.{first}", []).append(name)
    return [sorted(group, key=lambda name: _PLACES.get(name.rpartition(".")[2], 0)) for group in groups.values()]


class LoraLinear(LinearWrapper):
    """A linear (of any kind, also quantized) plus one low-rank update per slot: y = base(x) + x A^T B^T alpha/rank.

    A slot with factors scales the base's inputs or outputs first: an IA3 vector l gives base(x * l), or base(x) * l;
    DoRA scales the output without the bias.
    """

    down: torch.Tensor
    up: torch.Tensor

    def __init__(self, base: nn.Module, name: str, runs: LoraSegments, down: torch.Tensor, up: torch.Tensor) -> None:
        """`down` [slots, in_features, rank] and `up` [slots, rank, out_features] are filled by `LoraSlots`."""
        super().__init__()
        self.base, self.name, self._runs = base, name, runs
        self._siblings: list[LoraLinear] = []
        self._shared = SharedInput()
        self.in_features, self.out_features = down.shape[1], up.shape[2]
        self.factors: list[torch.Tensor | None] = [None, None]
        """What each slot's factors of inputs [slots, in_features] and outputs [slots, out_features] have over 1; None
        until an adapter has any."""
        self.register_buffer("down", down, False)
        self.register_buffer("up", up, False)
        reason = why_no_updates("native", down.device, down.dtype, down.shape[2])
        self._native = None if reason else NativeUpdates(down, up)
        # Views made once: at one row, making them takes a fifth of the update's time.
        self._whole, self._by_slot = (down, up), list(zip(down.unbind(), up.unbind(), strict=True))

    def join(self, linears: "list[LoraLinear]") -> None:
        """Let Triton's kernels add the updates of `linears`, up to three with the same input as this, in one launch."""
        self._siblings = linears
        self._shared = linears[0]._shared if linears else SharedInput()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute [1, tokens, in_features] -> [1, tokens, out_features], with the updates of the present runs."""
        state = self._runs
        if state.training:
            return self._updated(x, state.training)
        if (tiles := state.tiles) is not None:
            return self._shared.take(x, self._siblings.index(self), lambda: self._tiled(x, tiles))
        y = self._based(x)
        if state.few or state.single or state.together is not None:
            # Rows may have a stride (one product for several linears), but a row's features must be contiguous.
            x, y = (rows if rows.stride(-1) == 1 else rows.contiguous() for rows in (x, y))
            self._add_updates(x.view(-1, self.in_features), y.view(-1, self.out_features))
        return y

    def make_factors(self, side: int) -> None:
        """Make room for each slot's factors of inputs (side 0) or outputs (1), unless it is there."""
        if self.factors[side] is None:
            like = self.up[:, 0] if side else self.down[:, :, 0]
            self.factors[side] = torch.zeros_like(like, memory_format=torch.contiguous_format)

    def _tiled(self, x: torch.Tensor, tiles: LoraTiles) -> list[torch.Tensor]:
        """Compute the outputs of all siblings with their updates."""
        from edged.engine.lora import triton as triton_lora

        outs = [linear._based(x).contiguous() for linear in self._siblings]
        ys = [out.view(-1, out.shape[-1]) for out in outs]
        downs, ups = zip(*((linear.down, linear.up) for linear in self._siblings), strict=True)
        triton_lora.add_updates(x.reshape(-1, self.in_features).contiguous(), ys, downs, ups, tiles)
        return outs

    def _based(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the base's output; rows whose adapter has factors have their inputs or outputs multiplied by them."""
        rows = self._runs.factor_rows
        y: torch.Tensor = self.base(x if rows is None else self._times_factors(0, x, *rows))
        return y if rows is None else self._times_factors(1, y, *rows)

    def _times_factors(
        self, side: int, x: torch.Tensor, at: torch.Tensor, slots: torch.Tensor, spares_bias: torch.Tensor | None
    ) -> torch.Tensor:
        if (factors := self.factors[side]) is None:
            return x
        rows, bias = x.flatten(0, -2), self._bias if side else None
        own = rows.index_select(0, at)
        part = own if bias is None or spares_bias is None else own - spares_bias * bias
        product = own.addcmul(part, factors.index_select(0, slots))
        # Outputs are nobody else's; others read the inputs, too.
        return (rows.index_copy_ if side else rows.index_copy)(0, at, product).view(x.shape)

    @property
    def _bias(self) -> torch.Tensor | None:
        bias: torch.Tensor | None = getattr(self.base, "bias", None)
        return bias

    def _add_updates(self, rows_in: torch.Tensor, out: torch.Tensor) -> None:
        """Add the updates of `rows_in` [tokens, in_features] to `out` [tokens, out_features], by the compiled kernels
        or by torch."""
        state = self._runs
        if state.few:
            slots = state.slots_of(len(rows_in))
            assert self._native is not None
            assert slots is not None
            self._native.add(rows_in, out, slots)
            return
        if state.threads:
            torch.set_num_threads(1)
        try:
            for start, stop, slot in state.single:
                down, up = self._by_slot[slot]
                every = stop - start == len(rows_in)
                inner = (rows_in if every else rows_in[start:stop]) @ down
                (out if every else out[start:stop]).addmm_(inner, up)
            if state.together is not None:
                self._add_together(rows_in, out, state.together)
        finally:
            if state.threads:
                torch.set_num_threads(state.threads)

    def _add_together(self, rows_in: torch.Tensor, out: torch.Tensor, runs: ShortRuns) -> None:
        down, up = (side[runs.low : runs.high] for side in self._whole)
        rows = rows_in[runs.span] if runs.even else rows_in.index_select(0, runs.gather)
        inner = torch.bmm(rows.view(len(down), -1, self.in_features), down)
        update = torch.bmm(inner, up).view(-1, self.out_features)
        if not runs.even:
            update = update.index_select(0, runs.places)
        if runs.span is not None:
            out[runs.span].add_(update)
        else:
            # Not index_add_, which on the CPU takes ten times as long.
            out.index_copy_(0, runs.rows, update.add_(out.index_select(0, runs.rows)))

    def _updated(self, x: torch.Tensor, rows: Sequence[LoraRows]) -> torch.Tensor:
        """Return the output with each adapter's change of its own rows, with autograd."""
        # By splits: each slice would have a gradient as large as the whole.
        sizes = [part.stop - part.start for part in rows]
        adapters = [[each.to(x.dtype) for each in part.leaves.weights.get(self.name, ())] for part in rows]
        inputs = x.flatten(0, -2).split(sizes)
        factors = [_factors(0, own) for own in adapters]
        if any(factor is not None for factor in factors):
            pairs = zip(inputs, factors, strict=True)
            products = [own if factor is None else torch.addcmul(own, own, factor) for own, factor in pairs]
            x = torch.cat(products).view(x.shape)
        y = self.base(x)
        parts = []
        for own, out, weights in zip(inputs, y.flatten(0, -2).split(sizes), adapters, strict=True):
            out, factor = out.to(x.dtype), _factors(1, weights)
            if factor is not None:
                bias = self._bias if len(weights) > 1 else None
                out = torch.addcmul(out, out if bias is None else out - bias, factor)
            if len(weights) > 1:
                out = torch.addmm(out, own @ weights[0].t(), weights[-1].t())
            parts.append(out)
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).view(y.shape)


def _factors(side: int, weights: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return what factors of a linear's inputs (side 0) or outputs (1) have over 1 (IA3, DoRA), or None."""
    if len(weights) == 3:
        return weights[1] if side else None
    return weights[0].flatten() if len(weights) == 1 and (weights[0].shape[0] != 1) == bool(side) else None


class LoraSlots:
    """All LoRA-wrapped linears of a model and their slots of adapter weights."""

    def __init__(self, model: nn.Module, targets: list[str], slots: int, rank: int, dtype: torch.dtype) -> None:
        self.runs, self._model = LoraSegments(), model
        self.linears: dict[str, LoraLinear] = {}
        self.slots, self.rank, self.dtype = slots, rank, dtype
        self.factor_slots: set[int] = set()
        """Slots whose adapter has factors in any linear."""
        self.spares_bias: torch.Tensor | None = None
        """[slots, 1]: 1 where the adapter does not scale biases (DoRA), else 0; None until there is one."""
        self.device = next(model.parameters()).device
        bases = {name: model.get_submodule(name) for name in targets}
        self._banks: list[tuple[int, list[str], torch.Tensor]] = []
        """(side, names, slots): A (side 0) or B (side 1) of all linears of one shape, loaded by one copy:
        [linears, slots, in_features, rank]; for B [linears, slots, rank, out_features]."""
        down, up = (self._empty_slots(side, bases) for side in (0, 1))
        for name, base in bases.items():
            parent_name, _, attribute = name.rpartition(".")
            wrapped = LoraLinear(base, name, self.runs, down[name], up[name])
            setattr(model.get_submodule(parent_name), attribute, wrapped)
            self.linears[name] = wrapped
        for group in self.groups():
            for linear in group:
                linear.join(group)

    def groups(self) -> list[list[LoraLinear]]:
        """Return the linears whose updates can be added in one launch together, all others alone."""
        found: list[list[LoraLinear]] = []
        for names in siblings(self.linears):
            group = [self.linears[name] for name in names]
            alike = len({(linear.in_features, linear.down.device) for linear in group}) == 1
            found += [group] if alike else [[linear] for linear in group]
        return found

    def unwrap(self) -> None:
        """Put the linears back into their places."""
        for name, wrapped in self.linears.items():
            parent_name, _, attribute = name.rpartition(".")
            setattr(self._model.get_submodule(parent_name), attribute, wrapped.base)
            # Wrappers that hold each other would hold their slots until the next collection of garbage.
            wrapped.join([])
        self.linears = {}

    def _empty_slots(self, side: int, bases: Mapping[str, nn.Module]) -> dict[str, torch.Tensor]:
        """Allocate each linear's slots of a side, by name; linears of one size and device share a tensor."""
        alike: dict[tuple[int, torch.device], list[str]] = {}
        for name, base in bases.items():
            size = int(base.out_features if side else base.in_features)  # type: ignore[arg-type]
            device = next(itertools.chain(base.parameters(), base.buffers())).device
            alike.setdefault((size, device), []).append(name)
        own: dict[str, torch.Tensor] = {}
        for (size, device), names in alike.items():
            shape = (self.rank, size) if side else (size, self.rank)
            together = torch.zeros(len(names), self.slots, *shape, dtype=self.dtype, device=device)
            self._banks.append((side, names, together))
            own.update(zip(names, together.unbind(), strict=True))
        return own

    @property
    def size_bytes(self) -> int:
        """Bytes of all slots."""
        return sum(slots.nbytes for _, _, slots in self._banks)

    @torch.no_grad()
    def load(self, slot: int, weights: LoraLeaves, scalings: Mapping[str, float]) -> None:
        """Put an adapter's weights, as they are served, into `slot` wholly, transposed, the scalings folded into B, or
        change nothing.

        Zeros fill lower ranks, and linears that it does not adapt.
        """
        aside = []
        for side, names, slots in self._banks:
            own = torch.stack([self._filled(side, weights.get(name, ()), slots) for name in names])
            if side == 1:
                scaling = torch.tensor([scalings.get(name, 0.0) for name in names])
                own.mul_(scaling.to(own.device)[:, None, None])
            aside.append(torch.empty_like(slots[:, slot]).copy_(own.transpose(1, 2)))
        found = {(name, side): _factors(side, own) for name, own in weights.items() for side in (0, 1)}
        factors = {place: own for place, own in found.items() if own is not None}
        for name, side in factors:
            self.linears[name].make_factors(side)
        dora = any(len(own) == 3 for own in weights.values())
        if dora and self.spares_bias is None:
            self.spares_bias = torch.zeros(self.slots, 1, dtype=self.dtype, device=self.device)
        # Sequences may be running on the slot: nothing that can fail for want of memory comes between two banks.
        for (_, _, slots), own in zip(self._banks, aside, strict=True):
            slots[:, slot].copy_(own)
        for name, linear in self.linears.items():
            for side, bank in enumerate(linear.factors):
                if bank is not None:
                    bank[slot] = factors.get((name, side), 0.0)
        if self.spares_bias is not None:
            self.spares_bias[slot] = float(dora)
        self.factor_slots.discard(slot)
        if factors:
            self.factor_slots.add(slot)

    @torch.no_grad()
    def row_norms(self, name: str, down: torch.Tensor, up: torch.Tensor, scaling: float) -> torch.Tensor:
        """Return the norms of the rows of W + scaling * up @ down, by one read of a linear's plain W."""
        weight = self.linears[name].weight
        down, up = down.to(weight.device), up.to(weight.device)
        parts = zip(weight.split(_NORM_ROWS), up.split(_NORM_ROWS), strict=True)
        sums = (torch.addmm(rows.float(), own, down, alpha=scaling) for rows, own in parts)
        norms = torch.cat([torch.linalg.vector_norm(each, dim=1) for each in sums])
        # Any factor is right for a row of zeros, if only it is finite.
        return norms.masked_fill_(norms == 0, 1.0).to(self.device)

    def _filled(self, side: int, own: tuple[torch.Tensor, ...], slots: torch.Tensor) -> torch.Tensor:
        """Return A or B of a linear in the size of its slot, on its adapter's device; zeros where it has none."""
        if len(own) < 2:
            return torch.zeros(slots.shape[:1:-1], device=self.device)
        matrix = own[-1] if side else own[0]
        lower = self.rank - matrix.shape[side]
        return F.pad(matrix, (0, lower) if side else (0, 0, 0, lower)) if lower else matrix

    @contextmanager
    def packed(self, runs: list[Run], tiles: LoraTiles | None = None) -> Iterator[None]:
        """Apply each run's slot to its rows of the packed batch. Given `tiles`, Triton's kernels read only those:
        captured ones outlive the forward."""
        self._set(self.runs, runs, tiles)
        try:
            yield
        except BaseException:
            # A layer that was interrupted keeps nothing, least of all where memory is short.
            for linear in self.linears.values():
                linear._shared.clear()
            raise
        finally:
            self.runs.set([], self.device)
            self.runs.factor_rows = None

    def _set(self, segments: LoraSegments, runs: list[Run], tiles: LoraTiles | None = None) -> None:
        segments.set(runs, self.device, tiles)
        if own := [run for run in runs if run[2] in self.factor_slots]:
            rows = np.concatenate([np.arange(start, stop) for start, stop, _ in own])
            slots = np.repeat([slot for _, _, slot in own], [stop - start for start, stop, _ in own])
            at, of = upload([rows, slots], self.device)
            segments.factor_rows = at, of, None if self.spares_bias is None else self.spares_bias.index_select(0, of)

    def part_of_batch(self, runs: list[Run]) -> LoraSegments:
        """Return the `runs` of some rows of the present batch, for `LoraSegments.only`."""
        part = LoraSegments()
        part.kernel = self.runs.kernel
        self._set(part, runs)
        return part

    @contextmanager
    def training(self, rows: Sequence[LoraRows]) -> Iterator[None]:
        """Apply each adapter's weights to its own rows, with autograd; `rows` cover all rows, in order."""
        self.runs.training = rows
        try:
            yield
        finally:
            self.runs.training = ()
