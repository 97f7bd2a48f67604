"""Frozen fp32 linears on the CPU, with a second copy of the weight in oneDNN's packed layout.

Owns that layout's use. Must not know LoRA or batches. Decoding multiplies few rows by every weight: on the packed
layout that is up to twice as fast as torch's own product, for the price of the weights' memory again.
"""

from __future__ import annotations

import psutil
import torch
from torch import nn

from edged.engine.quantized import is_quantized

_ROWS = 16
"""Rows that the layout is chosen for; other numbers work as well."""
_SHARE_OF_FREE_MEMORY = 0.25


class PackedLinear(nn.Module):
    """`base`, computed from the packed copy wherever no gradient is asked for."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.in_features, self.out_features = base.in_features, base.out_features
        self._packed = torch.ops.mkldnn._reorder_linear_weight(base.weight.detach(), _ROWS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., out_features]."""
        if torch.is_grad_enabled():
            out: torch.Tensor = self.base(x)
            return out
        packed: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.base.bias, "none", [], "")
        return packed


def why_not_packed(model: nn.Module, device: torch.device, dtype: torch.dtype) -> str:
    """Why the weights of a model are not packed; "" when they can be."""
    if device.type != "cpu" or dtype != torch.float32:
        return f"{dtype} on {device} has no packed product"
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return "this torch has no oneDNN"
    needed = sum(linear.weight.nbytes for _, _, linear in _linears(model))
    free = psutil.virtual_memory().available
    if needed > _SHARE_OF_FREE_MEMORY * free:
        return f"the copy takes {needed >> 20} MiB, more than a quarter of the {free >> 20} MiB that are free"
    return ""


def pack_linears(model: nn.Module) -> None:
    """Replace every plain linear by its packed form."""
    for parent, name, linear in _linears(model):
        setattr(parent, name, PackedLinear(linear))


def _linears(model: nn.Module) -> list[tuple[nn.Module, str, nn.Linear]]:
    return [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear and not isinstance(parent, PackedLinear) and not is_quantized(child)
    ]
