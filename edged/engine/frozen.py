"""Quantized linears whose kernels have no derivative, or one that keeps dequantized weights, with a gradient of ours.

Owns the derivative of a frozen linear with respect to its input. Must not know which method packed the weight.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from edged.engine.quantized import differentiates, is_linear, is_quantized

_COLUMNS = 512
"""Of a weight that is only known by its products: how many are recovered at once."""


class FrozenLinear(nn.Module):
    """`base`, whose input gets the gradient upstream @ weight; the graph keeps no weight.

    The weight is dequantized for each backward product and let go again.
    """

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.in_features, self.out_features = int(base.in_features), int(base.out_features)  # type: ignore[arg-type]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., out_features]."""
        if torch.is_grad_enabled() and x.requires_grad:
            out: torch.Tensor = _Product.apply(x, self)
            return out
        plain: torch.Tensor = self.base(x)
        return plain

    def input_gradient(self, upstream: torch.Tensor) -> torch.Tensor:
        """[..., out_features] -> [..., in_features]."""
        weight: Any = getattr(self.base, "weight", None)
        known = type(weight).dequantize is not torch.Tensor.dequantize if isinstance(weight, torch.Tensor) else False
        # A scale of the inputs is not in the weight.
        if known and getattr(weight, "act_pre_scale", None) is None:
            return upstream @ weight.dequantize().to(upstream.dtype)
        return torch.cat([self._columns(upstream, start) for start in range(0, self.in_features, _COLUMNS)], dim=-1)

    def _columns(self, upstream: torch.Tensor, start: int) -> torch.Tensor:
        """The gradient of inputs from `start` on, by the products of unit vectors: rows of the transposed weight."""
        count = min(_COLUMNS, self.in_features - start)
        units = upstream.new_zeros(count, self.in_features)
        units[:, start : start + count].fill_diagonal_(1.0)
        rows = self.base(units[None])[0]
        bias = getattr(self.base, "bias", None)
        if bias is not None:
            rows = rows - bias
        return upstream @ rows.t().to(upstream.dtype)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, linear: FrozenLinear) -> torch.Tensor:
        ctx.linear = linear
        out: torch.Tensor = linear.base(x)
        return out

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.linear.input_gradient(upstream[0]), None


def give_gradients(model: nn.Module) -> None:
    """Wrap every quantized linear that has no derivative of its own."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if not isinstance(parent, FrozenLinear) and is_linear(child) and is_frozen_alone(child):
                setattr(parent, name, FrozenLinear(child))


def is_frozen_alone(linear: nn.Module) -> bool:
    """Whether a linear is quantized and leaves its derivative to us; not so wrappers, which have no weight."""
    return not list(linear.children()) and is_quantized(linear) and not differentiates(linear)
