"""The results of a layer's forward that are kept for its backward by FlexLLM's Algorithm 1: of its products with
weights and of its attention. All else is recomputed: it is less than the whole graph and more than the inputs alone."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

aten = torch.ops.aten
_ATTENTION = "_scaled_dot_product"
_REARRANGING = {
    *(aten.add.Tensor, aten.add_.Tensor, aten.addmm.default, aten.cat.default, aten.clone.default),
    *(aten.view.default, aten._unsafe_view.default, aten.transpose.int, aten.permute.default, aten.detach.default),
    *(aten.squeeze.dim, aten.unsqueeze.default, aten.split.Tensor, aten.split_with_sizes.default, aten.slice.Tensor),
}
"""Operators whose backward does not read their (first) input: views, copies and sums."""


def _is_kept(func: Any, args: Sequence[Any], rank: int) -> bool:
    """Whether an operator is attention, or a product with a weight that is not a LoRA matrix."""
    if func in (aten.mm.default, aten.addmm.default):
        return min(args[-1].shape) > rank
    return func is aten._grouped_mm.default or func.name().startswith(f"aten::{_ATTENTION}")


class KeptResults:
    """The kept results of one layer's forward, in order: `keep` fills them, `recall` takes them instead of computing.

    Both passes must run the same operators, with gradients enabled. A result that no operator's backward can depend on,
    such as the last product of a layer that ends in a sum, is not kept, and anything stands in its place.
    """

    def __init__(self, rank: int) -> None:
        """`rank` is the highest of the LoRA matrices."""
        self.rank = rank
        self.results: list[tuple[str, Any]] = []
        """Operators, with the shapes and dtypes that they were called with, and what they returned."""

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All kept tensors that take memory."""
        return [tensor for _, result in self.results for tensor in _tensors([result]) if tensor.device.type != "meta"]


class Keep(TorchDispatchMode):
    """The pass that fills `kept` with the results that a backward can depend on."""

    def __init__(self, kept: KeptResults) -> None:
        super().__init__()
        self._kept = kept
        self.only_moved: dict[int, frozenset[int]] = {}
        """Numbers of the results that a storage has copies or sums of, by the storage."""
        self._read: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, _types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Compute an operator, and keep what it returns if it is to be kept."""
        if func._schema.is_mutable:
            self._copy({tensor.untyped_storage()._cdata for tensor in _tensors([*args[:1], *(kwargs or {}).values()])})
        out, found = func(*args, **(kwargs or {})), frozenset[int]()
        if _is_kept(func, args, self._kept.rank):
            self._read.update(*map(self.origins, _tensors(args)))
            found = frozenset((len(self._kept.results),))
            # Autograd gives what is returned here a graph, which must not be kept.
            self._kept.results.append((_called(func, args), tree_map_only(torch.Tensor, torch.Tensor.detach, out)))
        elif func in _REARRANGING:
            moved, read = (args[:1], args[1:]) if func is aten.addmm.default else (args, ())
            found = found.union(*map(self.origins, _tensors(moved)))
            self._read.update(*map(self.origins, _tensors(read)))
        elif func.namespace != "prim":
            # Those of "prim" are questions of where a tensor is, which tensors without memory ask.
            self._read.update(*map(self.origins, _tensors(args)))
        for tensor in _tensors([out]):
            self.only_moved[tensor.untyped_storage()._cdata] = found
        return out

    def _copy(self, written: set[int]) -> None:
        """Copy kept results in storages that are about to be `written`, since the backward writes into them again."""

        def apart(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.clone() if tensor.untyped_storage()._cdata in written else tensor

        results = self._kept.results
        results[:] = [(called, tree_map_only(torch.Tensor, apart, out)) for called, out in results]

    def origins(self, tensor: torch.Tensor) -> frozenset[int]:
        """Return the numbers of the results that `tensor` has copies or sums of."""
        return self.only_moved.get(tensor.untyped_storage()._cdata, frozenset())

    def __exit__(self, *error: Any) -> None:
        """Drop what no operator has read."""
        super().__exit__(*error)
        if error[0] is not None:
            return
        results = self._kept.results
        for index in set(range(len(results))) - self._read:
            called, out = results[index]
            if isinstance(out, torch.Tensor):
                results[index] = called, out.to("meta")


class Recall(TorchDispatchMode):
    """The pass that takes the results of `kept`, in order, and computes everything else."""

    def __init__(self, kept: KeptResults) -> None:
        super().__init__()
        self._rank, self._results = kept.rank, iter(kept.results)

    def __torch_dispatch__(
        self, func: Any, _types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Return an operator's kept result, or compute it. Raises RuntimeError where the passes differ."""
        if not _is_kept(func, args, self._rank):
            return func(*args, **(kwargs or {}))
        called, (kept, out) = _called(func, args), next(self._results, (None, None))
        if kept != called:
            raise RuntimeError(f"a layer ran {called} in its backward where its forward had run {kept}")
        if isinstance(out, torch.Tensor) and out.device.type == "meta":
            return torch.empty_like(out, device=args[0].device)
        return out

    def __exit__(self, *error: Any) -> None:
        """Raises RuntimeError where the forward had run more."""
        super().__exit__(*error)
        if error[0] is None and (left := next(self._results, None)):
            raise RuntimeError(f"a layer did not run {left[0]} in its backward, as its forward had")


def _called(func: Any, args: Sequence[Any]) -> str:
    """Return an operator's name with the shapes and dtypes of its arguments."""
    return f"{func} of {', '.join(f'{[*tensor.shape]} {tensor.dtype}' for tensor in _tensors(args))}"


def _tensors(values: Sequence[Any]) -> Iterator[torch.Tensor]:
    nested = chain.from_iterable(value if isinstance(value, (list, tuple)) else (value,) for value in values)
    return (value for value in nested if isinstance(value, torch.Tensor))
