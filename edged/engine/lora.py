"""LoRA in the packed batch: every target linear is wrapped once and holds slots for several adapters.

Owns which weights a packed token sees. What the weights are, and their files, is `edged.align.adapter`'s.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import nn

from edged.align.decoder import LoraRows
from edged.align.transfer import upload

LoraWeights = Mapping[str, tuple[torch.Tensor, torch.Tensor]]
"""Module name -> (A of shape [rank, in_features], B of shape [out_features, rank])."""


Run = tuple[int, int, int]
"""(start, stop, slot) of consecutive packed rows that one adapter answers."""

_FEW_ROWS = 16
"""Runs up to so many rows are multiplied together, padded to the longest of them; longer ones one by one."""
_ALONE_ROWS = 16
"""Up to so many rows one CPU core multiplies an update sooner than two of them meet."""
_MOST_SPARE = 2
"""Slots multiplied together lie side by side; at most so many times as many as are used."""


@dataclass(frozen=True, slots=True)
class _Together:
    """Short runs as one batched product over the slots [low, high): `gather` [slots * width] rows of the packed batch,
    padded with any row; `rows` [n] are those with an adapter and `places` [n] where they are among the gathered."""

    low: int
    high: int
    gather: torch.Tensor
    rows: torch.Tensor
    places: torch.Tensor
    span: slice | None
    """`rows`, where they lie side by side."""
    even: bool
    """Whether `gather` is `span`: runs of one length, of neighbouring slots. Then nothing is copied."""


@dataclass(frozen=True, slots=True)
class LoraTiles:
    """Runs cut into tiles of at most `rows` rows, for `triton_lora`: `table` [tiles, 3] of (first row, rows, slot)."""

    table: torch.Tensor
    rows: int


class LoraRuns:
    """What the wrapped linears of one model do at present; shared by all of them."""

    def __init__(self) -> None:
        self.single: list[Run] = []
        """Runs that are multiplied one by one; rows in no run see the base model."""
        self.together: _Together | None = None
        self.kernel: Literal["torch", "triton"] = "torch"
        """What multiplies the runs: torch, one by one or `together`, or Triton's kernels, in `tiles`."""
        self.tiles: LoraTiles | None = None
        self.training: Sequence[LoraRows] = ()
        """Who sees which weights, with autograd, while a fine-tune unit runs; together they are all rows."""
        self.threads = 0
        """Threads to go back to after updates that are too small to be shared between cores; 0: they are not."""

    def set(self, runs: list[Run], device: torch.device, tiles: LoraTiles | None = None) -> None:
        """The runs of the coming forward; `tiles` are the same for Triton's kernels, if they are on the device."""
        if self.kernel == "triton":
            from edged.engine import triton_lora  # triton is slow to import, and not everywhere

            self.tiles = tiles if tiles is not None or not runs else triton_lora.cut(runs, device)
            return
        rows_in_runs = sum(stop - start for start, stop, _ in runs)
        self.threads = torch.get_num_threads() if device.type == "cpu" and rows_in_runs <= _ALONE_ROWS else 0
        few = [run for run in runs if run[1] - run[0] <= _FEW_ROWS]
        slots = [slot for _, _, slot in few]
        if len(few) < 2 or max(slots) + 1 - min(slots) > _MOST_SPARE * len(few):
            self.single, self.together = runs, None
            return
        self.single = [run for run in runs if run[1] - run[0] > _FEW_ROWS]
        low, high = min(slots), max(slots) + 1
        width = max(stop - start for start, stop, _ in few)
        gather = np.zeros((high - low, width), np.int64)
        rows = np.concatenate([np.arange(start, stop) for start, stop, _ in few])
        places = np.concatenate([(slot - low) * width + np.arange(stop - start) for start, stop, slot in few])
        gather.reshape(-1)[places] = rows
        first, last = int(rows[0]), int(rows[-1]) + 1
        span = slice(first, last) if last - first == len(rows) else None
        even = span is not None and np.array_equal(gather.reshape(-1), rows)
        tables = upload([gather.reshape(-1), rows, places], device)
        self.together = _Together(low, high, tables[0], tables[1], tables[2], span, even)


class LoraLinear(nn.Module):
    """A linear (of any kind, quantized too) plus one low-rank update per slot: y = base(x) + x A^T B^T alpha/rank."""

    def __init__(self, base: nn.Module, name: str, runs: LoraRuns, down: torch.Tensor, up: torch.Tensor) -> None:
        """`down` [slots, in_features, rank] and `up` [slots, rank, out_features], which `LoraSlots` fills."""
        super().__init__()
        self.base, self.name, self._runs = base, name, runs
        self.in_features, self.out_features = down.shape[1], up.shape[2]
        self.register_buffer("down", down, False)
        self.register_buffer("up", up, False)
        # Views made once: at one row, making them takes a fifth of the update's time.
        self._by_slot = list(zip(down.unbind(), up.unbind(), strict=True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` is [1, tokens, in_features]."""
        y = self.base(x)
        state = self._runs
        if state.training:
            return y + self._update(x, state.training)
        if state.tiles is not None:
            from edged.engine import triton_lora

            y = y.contiguous()
            rows = x.reshape(-1, self.in_features).contiguous(), y.view(-1, self.out_features)
            triton_lora.add_updates(*rows, self.down, self.up, state.tiles)  # type: ignore[arg-type]
        elif state.single or state.together is not None:
            # Rows may lie apart (one product for several linears), but not a row's features.
            y = y if y.stride(-1) == 1 else y.contiguous()
            self.add(x.view(-1, self.in_features), y.view(-1, self.out_features))
        return y

    def add(self, rows_in: torch.Tensor, rows_out: torch.Tensor) -> None:
        """Add the updates of torch's runs to `rows_out` [tokens, out_features]; `rows_in` [tokens, in_features]."""
        state = self._runs
        if state.threads:
            torch.set_num_threads(1)
        try:
            self._add(rows_in, rows_out, state)
        finally:
            if state.threads:
                torch.set_num_threads(state.threads)

    def _update(self, x: torch.Tensor, rows: Sequence[LoraRows]) -> torch.Tensor:
        """Every adapter's update of its own rows, with autograd."""
        # One adapter's rows are all of them: neither the way there nor the way back copies anything.
        alone = len(rows) == 1
        parts = [x] if alone else x.split([part.stop - part.start for part in rows], dim=1)
        updates = []
        for own, part in zip(parts, rows, strict=True):
            a, b = part.leaves.weights[self.name]
            updates.append((own @ a.t().to(x.dtype)) @ (b.t() * part.leaves.scaling).to(x.dtype))
        return updates[0] if alone else torch.cat(updates, dim=1)

    def _add(self, rows_in: torch.Tensor, rows_out: torch.Tensor, state: LoraRuns) -> None:
        """Add every run's update to its rows of the output."""
        for start, stop, slot in state.single:
            down, up = self._by_slot[slot]
            if stop - start == len(rows_in):
                rows_out.addmm_(rows_in @ down, up)
            else:
                rows_out[start:stop].addmm_(rows_in[start:stop] @ down, up)
        if state.together is not None:
            self._add_together(rows_in, rows_out, state.together)

    def _add_together(self, rows_in: torch.Tensor, rows_out: torch.Tensor, runs: _Together) -> None:
        slots = slice(runs.low, runs.high)
        rows = rows_in[runs.span] if runs.even else rows_in.index_select(0, runs.gather)
        padded = rows.view(runs.high - runs.low, -1, self.in_features)
        added = torch.bmm(torch.bmm(padded, self.down[slots]), self.up[slots])  # type: ignore[index]
        own = added.view(-1, self.out_features)
        if not runs.even:
            own = own.index_select(0, runs.places)
        if runs.span is not None:
            rows_out[runs.span].add_(own)
        else:
            # Not index_add_, which on the CPU takes ten times as long.
            rows_out.index_copy_(0, runs.rows, own.add_(rows_out.index_select(0, runs.rows)))


class NoSuchLinears(ValueError):
    """`target_modules` name no linear of the model."""


def target_linears(model: nn.Module, targets: str | list[str]) -> list[str]:
    """Names of the linears that LoRA is applied to, as PEFT resolves `target_modules`.

    "all-linear" is every linear of the decoder but the language-model head. Raises NoSuchLinears when nothing matches.
    """
    head = model.get_output_embeddings()  # type: ignore[operator]
    linears = [
        name
        for name, module in model.named_modules()
        if module is not head and hasattr(module, "in_features") and hasattr(module, "out_features")
    ]
    if targets == "all-linear":
        return linears
    # Slow to import: it brings whatever quantization packages there are.
    from peft import LoraConfig
    from peft.tuners.tuners_utils import check_target_module_exists

    config = LoraConfig(target_modules=targets)
    found = [name for name in linears if check_target_module_exists(config, name)]
    if not found:
        raise NoSuchLinears(f'align.target_modules = {targets!r} matches no linear of the model; try "all-linear"')
    return found


class _Bank:
    """A (side 0) or B (side 1) of all linears to which it has one shape, so that an adapter's are copied at once."""

    def __init__(self, side: int, names: list[str], whole: torch.Tensor) -> None:
        """`whole` [linears, slots, in_features, rank], of B [linears, slots, rank, out_features]."""
        self._side, self._names, self._whole = side, names, whole

    def parts(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every linear's own slots, by its name."""
        return zip(self._names, self._whole.unbind(), strict=True)

    def load(self, slot: int, weights: LoraWeights, scaling: float) -> None:
        """Copy an adapter's matrices into `slot`, transposed, with the scaling folded into B."""
        together = torch.stack([weights[name][self._side] for name in self._names])
        if self._side == 1:
            together.mul_(scaling)
        self._whole[:, slot].copy_(together.transpose(1, 2))


class LoraSlots:
    """All wrapped linears of a model, and which adapter version sits in which slot."""

    def __init__(self, model: nn.Module, targets: list[str], slots: int, rank: int, dtype: torch.dtype) -> None:
        self.runs = LoraRuns()
        self.linears: dict[str, LoraLinear] = {}
        self.slots, self.rank, self.dtype = slots, rank, dtype
        self.device = next(model.parameters()).device
        bases = {name: model.get_submodule(name) for name in targets}
        downs = self._banks(0, bases)
        ups = self._banks(1, bases)
        self._all_banks = downs + ups
        down = dict(itertools.chain.from_iterable(bank.parts() for bank in downs))
        up = dict(itertools.chain.from_iterable(bank.parts() for bank in ups))
        for name, base in bases.items():
            parent_name, _, attribute = name.rpartition(".")
            wrapped = LoraLinear(base, name, self.runs, down[name], up[name])
            setattr(model.get_submodule(parent_name), attribute, wrapped)
            self.linears[name] = wrapped

    def _banks(self, side: int, bases: Mapping[str, nn.Module]) -> list[_Bank]:
        """Empty slots of one side of all linears, those of one size on one device together."""
        alike: dict[tuple[int, torch.device], list[str]] = {}
        for name, base in bases.items():
            size = int(base.out_features if side else base.in_features)  # type: ignore[arg-type]
            device = next(itertools.chain(base.parameters(), base.buffers())).device
            alike.setdefault((size, device), []).append(name)
        banks = []
        for (size, device), names in alike.items():
            shape = (self.rank, size) if side else (size, self.rank)
            whole = torch.zeros(len(names), self.slots, *shape, dtype=self.dtype, device=device)
            banks.append(_Bank(side, names, whole))
        return banks

    @property
    def size_bytes(self) -> int:
        """What the slots hold."""
        weights = sum(x.in_features + x.out_features for x in self.linears.values()) * self.rank * self.slots
        return weights * self.dtype.itemsize

    @torch.no_grad()
    def load(self, slot: int, weights: LoraWeights, scaling: float) -> None:
        """Put an adapter's weights into `slot`."""
        for bank in self._all_banks:
            bank.load(slot, weights, scaling)

    @contextmanager
    def packed(self, runs: list[Run], tiles: LoraTiles | None = None) -> Iterator[None]:
        """Rows of the packed batch see their own slot."""
        self.runs.set(runs, self.device, tiles)
        try:
            yield
        finally:
            self.runs.set([], self.device)

    @contextmanager
    def tiled(self, tiles: LoraTiles | None) -> Iterator[None]:
        """Rows see the slots of tiles that outlive the forward; None: all see the base."""
        self.runs.tiles = tiles
        try:
            yield
        finally:
            self.runs.tiles = None

    @contextmanager
    def training(self, rows: Sequence[LoraRows]) -> Iterator[None]:
        """Rows see their own adapter's weights, with autograd; `rows` cover them all, in order."""
        self.runs.training = rows
        try:
            yield
        finally:
            self.runs.training = ()
