"""LoRA in the packed batch: every target linear is wrapped once and holds slots for several adapters.

Owns which weights a packed token sees. What the weights are, and their files, is `edged.align.adapter`'s.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from edged.align.decoder import LoraRows
from edged.engine.lora_updates import LoraRuns, LoraTiles, LoraUpdates, Run
from edged.engine.siblings import siblings

LoraWeights = Mapping[str, tuple[torch.Tensor, torch.Tensor]]
"""Module name -> (A of shape [rank, in_features], B of shape [out_features, rank])."""


@dataclass(frozen=True, slots=True)
class Downs:
    """A of linears of one input side by side, `whole` [slots, in_features, linears * rank]; `own` is one linear's."""

    whole: torch.Tensor
    own: slice


class LoraLinear(nn.Module):
    """A linear (of any kind, quantized too) plus one low-rank update per slot: y = base(x) + x A^T B^T alpha/rank."""

    def __init__(self, base: nn.Module, name: str, runs: LoraRuns, downs: Downs, up: torch.Tensor) -> None:
        """`downs.whole[..., downs.own]` [slots, in_features, rank] is this linear's own, as is `up` [slots, rank,
        out_features]; `LoraSlots` fills both."""
        super().__init__()
        self.base, self.name, self.downs, self._runs = base, name, downs, runs
        self.in_features, self.out_features = downs.whole.shape[1], up.shape[2]
        self.register_buffer("down", downs.whole[..., downs.own], False)
        self.register_buffer("up", up, False)
        self._alone = LoraUpdates(runs, downs.whole[..., downs.own], [(slice(0, up.shape[1]), up)])

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
            self._alone.add(x.view(-1, self.in_features), [y.view(-1, self.out_features)])
        return y

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


def updates_of(linears: Sequence[LoraLinear]) -> list[tuple[list[int], LoraUpdates]]:
    """Those of linears of one input, in as few products as their A's lie in, each with the indices of its linears."""
    alike: dict[int, list[int]] = {}
    for index, linear in enumerate(linears):
        alike.setdefault(id(linear.downs.whole), []).append(index)
    found = []
    for indices in alike.values():
        own = [linears[index] for index in indices]
        members = [(linear.downs.own, linear.get_buffer("up")) for linear in own]
        found.append((indices, LoraUpdates(own[0]._runs, own[0].downs.whole, members)))
    return found


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


class _Downs:
    """A of all linears to which it has one shape, so that an adapter's are copied at once; `groups` of linears of one
    input, equally many in each, have theirs side by side."""

    def __init__(self, groups: list[list[str]], whole: torch.Tensor) -> None:
        """`whole` [groups, slots, in_features, linears of a group * rank]."""
        self._groups, self._whole = groups, whole

    def parts(self) -> Iterator[tuple[str, Downs]]:
        """Every linear's own slots, by its name."""
        for names, whole in zip(self._groups, self._whole.unbind(), strict=True):
            rank = whole.shape[2] // len(names)
            for index, name in enumerate(names):
                yield name, Downs(whole, slice(index * rank, (index + 1) * rank))

    def load(self, slot: int, weights: LoraWeights) -> None:
        """Copy an adapter's matrices into `slot`, transposed."""
        together = torch.stack([weights[name][0] for names in self._groups for name in names])
        groups, _, size, ranks = self._whole.shape
        self._whole[:, slot].copy_(together.view(groups, ranks, size).transpose(1, 2))


class _Ups:
    """B of all linears to which it has one shape."""

    def __init__(self, names: list[str], whole: torch.Tensor) -> None:
        """`whole` [linears, slots, rank, out_features]."""
        self._names, self._whole = names, whole

    def parts(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every linear's own slots, by its name."""
        return zip(self._names, self._whole.unbind(), strict=True)

    def load(self, slot: int, weights: LoraWeights, scaling: float) -> None:
        """Copy an adapter's matrices into `slot`, transposed, with the scaling folded in."""
        together = torch.stack([weights[name][1] for name in self._names]).mul_(scaling)
        self._whole[:, slot].copy_(together.transpose(1, 2))


class LoraSlots:
    """All wrapped linears of a model, and which adapter version sits in which slot."""

    def __init__(self, model: nn.Module, targets: list[str], slots: int, rank: int, dtype: torch.dtype) -> None:
        self.runs = LoraRuns()
        self.linears: dict[str, LoraLinear] = {}
        self.slots, self.rank, self.dtype = slots, rank, dtype
        self.device = next(model.parameters()).device
        bases = {name: model.get_submodule(name) for name in targets}
        self._downs, self._ups = self._down_banks(bases), self._up_banks(bases)
        downs = dict(itertools.chain.from_iterable(bank.parts() for bank in self._downs))
        ups = dict(itertools.chain.from_iterable(bank.parts() for bank in self._ups))
        for name, base in bases.items():
            parent_name, _, attribute = name.rpartition(".")
            wrapped = LoraLinear(base, name, self.runs, downs[name], ups[name])
            setattr(model.get_submodule(parent_name), attribute, wrapped)
            self.linears[name] = wrapped

    def _down_banks(self, bases: Mapping[str, nn.Module]) -> list[_Downs]:
        """Empty slots of A, those of one size on one device together."""
        alike: dict[tuple[int, int, torch.device], list[list[str]]] = {}
        for names in siblings(bases):
            sizes = {(int(bases[name].in_features), _device(bases[name])) for name in names}  # type: ignore[arg-type]
            # On CUDA the kernels multiply each linear's own.
            together = len(sizes) == 1 and self.device.type == "cpu"
            for group in [names] if together else [[name] for name in names]:
                size, device = int(bases[group[0]].in_features), _device(bases[group[0]])  # type: ignore[arg-type]
                alike.setdefault((size, len(group), device), []).append(group)
        return [
            _Downs(groups, torch.zeros(len(groups), self.slots, size, count * self.rank, dtype=self.dtype, device=at))
            for (size, count, at), groups in alike.items()
        ]

    def _up_banks(self, bases: Mapping[str, nn.Module]) -> list[_Ups]:
        """Empty slots of B, those of one size on one device together."""
        alike: dict[tuple[int, torch.device], list[str]] = {}
        for name, base in bases.items():
            alike.setdefault((int(base.out_features), _device(base)), []).append(name)  # type: ignore[arg-type]
        return [
            _Ups(names, torch.zeros(len(names), self.slots, self.rank, size, dtype=self.dtype, device=at))
            for (size, at), names in alike.items()
        ]

    @property
    def size_bytes(self) -> int:
        """What the slots hold."""
        weights = sum(x.in_features + x.out_features for x in self.linears.values()) * self.rank * self.slots
        return weights * self.dtype.itemsize

    @torch.no_grad()
    def load(self, slot: int, weights: LoraWeights, scaling: float) -> None:
        """Put an adapter's weights into `slot`."""
        for downs in self._downs:
            downs.load(slot, weights)
        for ups in self._ups:
            ups.load(slot, weights, scaling)

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


def _device(module: nn.Module) -> torch.device:
    """Where its weights are."""
    return next(itertools.chain(module.parameters(), module.buffers())).device
