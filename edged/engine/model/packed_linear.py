"""Frozen fp32 linears on the CPU, with a second copy of the weight in oneDNN's packed layout.

Products on the packed layout are up to twice as fast as torch's own, for the weights' memory again; few rows are
multiplied by the compiled kernels, if there are any, for half of it more if the weights are numbers of 16 bits. Linears
with the same input are one product, since every product synchronizes all threads.
"""

import ctypes
import logging
from collections.abc import Sequence

import psutil
import torch
from torch import nn

from edged.engine.lora.linear import LinearWrapper, SharedInput, siblings
from edged.engine.model.quantization import is_quantized
from edged.engine.native.fp16_weights import narrow
from edged.engine.native.library import FEW_ROWS, LinearParts, group_of, kernels, readable

log = logging.getLogger("edged.engine")
_ROWS = 16
"""Number of rows that the layout is chosen for; other numbers work as well."""
_TILES = (1024, 512, 256, 128, 64, 32, 16)
"""Numbers of rows that are multiplied at once; the remainder is smaller than the last.

oneDNN makes and keeps a kernel of up to 3 MB for every number of rows that it meets: prompts of all lengths would cost
gigabytes, and milliseconds for each new length.
"""
COPIES_SHARE = 0.25
"""Share of the free memory that copies of the weights may take."""
BOTH_COPIES = 1.5
"""Bytes of oneDNN's copy and that in 16 bits, relative to the weights."""
_TOLERANCE = 1e-4
"""Largest difference between products of another summation order, relative to the largest output."""

Place = tuple[nn.Module, str, nn.Linear]
"""A linear, with the module and the attribute that hold it."""


class Product:
    """Linears with the same input that are multiplied at once."""

    def __init__(self, linears: Sequence[nn.Linear], native: bool, in_16_bits: bool) -> None:
        """With `native` few rows are multiplied by the compiled kernels, which read the linears' own weights, or
        `in_16_bits` copies of those that lose nothing by it."""
        # The kernels' structure holds addresses.
        self.parts = [LinearParts.of(linear) for linear in linears]
        weights, biases, _ = zip(*self.parts, strict=True)
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS)
        given = [bias for bias in biases if bias is not None]
        self._bias = torch.cat(given) if given else None
        self.sizes = [linear.out_features for linear in linears]
        self._width = sum(self.sizes)
        self._library = kernels() if native and readable(*weights, *biases) else None
        if in_16_bits and self._library is not None:
            self.parts = [part._replace(narrow=narrow(part.weight)) for part in self.parts]
        self._group = group_of(self.parts)
        if self._library is not None and not self._agrees():
            self._library = None
            self.parts = [part._replace(narrow=None) for part in self.parts]
        self.shared = SharedInput()

    def whole(self, x: torch.Tensor) -> torch.Tensor:
        """Compute all linears' outputs, concatenated: [..., in] -> [..., sum of `sizes`]."""
        rows = x.reshape(-1, x.shape[-1])
        if self._library is not None and len(rows) <= FEW_ROWS:
            return self._natively(rows.contiguous()).view(*x.shape[:-1], self._width)
        outs = [
            torch.ops.mkldnn._linear_pointwise(tile, self._packed, self._bias, "none", [], "")
            for tile in rows.split(tiles(len(rows)))
        ]
        whole = outs[0] if len(outs) == 1 else torch.cat(outs)
        return whole.view(*x.shape[:-1], whole.shape[-1])

    def _agrees(self) -> bool:
        """Whether the kernels and the packed product give the same."""
        x = torch.linspace(-1.0, 1.0, 2 * self._group.input).view(2, -1)
        wanted = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        # Not "above": a NaN is above nothing.
        return bool((self._natively(x) - wanted).abs().max() <= _TOLERANCE * wanted.abs().max())

    def _natively(self, rows: torch.Tensor) -> torch.Tensor:
        assert self._library is not None
        out = rows.new_empty(len(rows), self._width)
        group, threads = ctypes.byref(self._group), torch.get_num_threads()
        self._library.edged_product(group, rows.data_ptr(), len(rows), out.data_ptr(), self._width, threads)
        return out


def tiles(rows: int) -> list[int]:
    """Split `rows` into a few of the sizes `_TILES` and a remainder."""
    found = []
    for size in _TILES:
        found += [size] * (rows // size)
        rows %= size
    return [*found, rows] if rows or not found else found


class PackedLinear(LinearWrapper):
    """A linear that is computed from the packed copy, or from `base` if gradients are enabled."""

    def __init__(self, base: nn.Linear, product: Product, index: int) -> None:
        super().__init__()
        self.base = base
        self.in_features, self.out_features = base.in_features, base.out_features
        self.product, self._index = product, index
        self.parts = product.parts[index]
        """The weight and bias that the kernels read."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute [..., in_features] -> [..., out_features]."""
        if torch.is_grad_enabled():
            out: torch.Tensor = self.base(x)
            return out
        product = self.product
        return product.shared.take(x, self._index, lambda: product.whole(x).split(product.sizes, -1))


def why_not_packed(model: nn.Module, device: torch.device, dtype: torch.dtype, copies: float = 1.0) -> str:
    """Return why a model's weights cannot be packed, or ""; the copies take `copies` times the weights' bytes."""
    if device.type != "cpu" or dtype != torch.float32:
        return f"{dtype} on {device} has no packed product"
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return "this torch has no oneDNN"
    needed = round(copies * sum(linear.weight.nbytes for _, _, linear in _linears(model).values()))
    free = psutil.virtual_memory().available
    if needed > COPIES_SHARE * free:
        return f"copies take {needed >> 20} MiB, more than a quarter of the {free >> 20} MiB that are free"
    return ""


def pack_linears(model: nn.Module, native: bool, in_16_bits: bool) -> None:
    """Replace every plain linear by its packed form; `native` and `in_16_bits`: see `Product`."""
    halved, places = 0, _linears(model)
    for names in siblings(places):
        group = [places[name] for name in names]
        alike = len({(linear.in_features, linear.bias is None) for _, _, linear in group}) == 1
        for linears in [group] if alike else [[place] for place in group]:
            product = Product([linear for _, _, linear in linears], native, in_16_bits)
            for index, (parent, name, linear) in enumerate(linears):
                setattr(parent, name, PackedLinear(linear, product, index))
            halved += sum(part.narrow is not None for part in product.parts)
    if halved:
        log.info(
            "%d of %d weights are numbers of 16 bits: steps of few tokens read no more of them", halved, len(places)
        )


def _linears(model: nn.Module) -> dict[str, Place]:
    """Return all plain linears by the model's own names (without a wrapper's "base")."""
    return {
        f"{path}.{name}".removesuffix(".base"): (parent, name, child)
        for path, parent in model.named_modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear and not isinstance(parent, PackedLinear) and not is_quantized(child)
    }
