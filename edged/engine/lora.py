"""LoRA in the packed batch: every target linear is wrapped once and holds slots for several adapters.

Owns which weights a packed token sees. What the weights are, and their files, is `edged.align.adapter`'s.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

LoraWeights = Mapping[str, tuple[torch.Tensor, torch.Tensor]]
"""Module name -> (A of shape [rank, in_features], B of shape [out_features, rank])."""


class LoraRuns:
    """What the wrapped linears of one model do at present; shared by all of them."""

    def __init__(self) -> None:
        self.runs: list[tuple[int, int, int]] = []
        """(start, stop, slot) of packed rows that an adapter answers; others see the base model."""
        self.training: LoraWeights | None = None
        """Weights that all rows see, with autograd, while a fine-tune unit runs."""
        self.scaling = 1.0
        """alpha / rank, applied to `training` weights (slots hold it already)."""


class LoraLinear(nn.Module):
    """A linear (of any kind, quantized too) plus one low-rank update per slot: y = base(x) + x A^T B^T alpha/rank."""

    def __init__(self, base: nn.Module, name: str, slots: int, rank: int, runs: LoraRuns, dtype: torch.dtype) -> None:
        super().__init__()
        self.base, self.name, self._runs = base, name, runs
        device = next(base.parameters()).device
        self.in_features, self.out_features = int(base.in_features), int(base.out_features)  # type: ignore[arg-type]
        self.register_buffer("down", torch.zeros(slots, self.in_features, rank, dtype=dtype, device=device), False)
        self.register_buffer("up", torch.zeros(slots, rank, self.out_features, dtype=dtype, device=device), False)

    def load(self, slot: int, a: torch.Tensor, b: torch.Tensor, scaling: float) -> None:
        """Copy an adapter's A and B into `slot`, transposed, with the scaling folded into B."""
        self.down[slot].copy_(a.t())  # type: ignore[index]
        self.up[slot].copy_(b.t() * scaling)  # type: ignore[index]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` is [1, tokens, in_features]."""
        y = self.base(x)
        state = self._runs
        if state.training is not None:
            a, b = state.training[self.name]
            return y + (x @ a.t().to(x.dtype)) @ (b.t() * state.scaling).to(x.dtype)
        if state.runs:
            rows_in, rows_out = x.view(-1, self.in_features), y.view(-1, self.out_features)
            for start, stop, slot in state.runs:
                low = rows_in[start:stop] @ self.down[slot]  # type: ignore[index]
                rows_out[start:stop].addmm_(low, self.up[slot])  # type: ignore[index]
        return y


def target_linears(model: nn.Module, targets: str | list[str]) -> list[str]:
    """Names of the linears that LoRA is applied to, as PEFT resolves `target_modules`.

    "all-linear" is every linear of the decoder but the language-model head. Raises ValueError when nothing matches.
    """
    from peft import LoraConfig
    from peft.tuners.tuners_utils import check_target_module_exists

    head = model.get_output_embeddings()  # type: ignore[operator]
    linears = [
        name
        for name, module in model.named_modules()
        if module is not head and hasattr(module, "in_features") and hasattr(module, "out_features")
    ]
    if targets == "all-linear":
        return linears
    config = LoraConfig(target_modules=targets)
    found = [name for name in linears if check_target_module_exists(config, name)]
    if not found:
        raise ValueError(f'align.target_modules = {targets!r} matches no linear of the model; try "all-linear"')
    return found


class LoraSlots:
    """All wrapped linears of a model, and which adapter version sits in which slot."""

    def __init__(self, model: nn.Module, targets: list[str], slots: int, rank: int, dtype: torch.dtype) -> None:
        self.runs = LoraRuns()
        self.linears: dict[str, LoraLinear] = {}
        self.slots = slots
        for name in targets:
            parent_name, _, attribute = name.rpartition(".")
            parent = model.get_submodule(parent_name)
            wrapped = LoraLinear(getattr(parent, attribute), name, slots, rank, self.runs, dtype)
            setattr(parent, attribute, wrapped)
            self.linears[name] = wrapped

    @torch.no_grad()
    def load(self, slot: int, weights: LoraWeights, scaling: float) -> None:
        """Put an adapter's weights into `slot`."""
        for name, linear in self.linears.items():
            a, b = weights[name]
            linear.load(slot, a, b, scaling)

    @contextmanager
    def packed(self, runs: list[tuple[int, int, int]]) -> Iterator[None]:
        """Rows of the packed batch see their own slot."""
        self.runs.runs = runs
        try:
            yield
        finally:
            self.runs.runs = []

    @contextmanager
    def training(self, weights: LoraWeights, scaling: float) -> Iterator[None]:
        """All rows see `weights`, with autograd."""
        self.runs.training, self.runs.scaling = weights, scaling
        try:
            yield
        finally:
            self.runs.training = None
