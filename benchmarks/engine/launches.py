"""The kernels that a decode iteration launches on CUDA, counted on any machine.

The forward that decode graphs capture runs on the CPU, in 16 bits and with Triton's kernels in its interpreter, under a
dispatch mode. The difference of two depths is what a layer launches. A GPU's libraries may split a product into two
kernels: an operation counts as one. `TRITON_INTERPRET=1` must be set before the process begins.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

from edged.engine.attention.paged import IMPLEMENTATION
from edged.engine.attention.selection import Backends
from edged.engine.model.norms import fuse_norms
from edged.engine.model.served_model import ServedModel
from edged.settings.load import AlignSettings

FAMILIES = {"Llama": "llama", "Qwen3": "qwen3", "Gemma 3": "gemma3_text"}
"""Model types by the name that tables show."""
_SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
}
_DEPTHS = (1, 2)
_ROWS, _PAGE = 2, 16
_ONE_KERNEL = {torch.ops.aten.linear.default, torch.ops.aten.rms_norm.default}
"""Composed operations that CUDA has a kernel for; others count as what they are composed of."""


class LaunchCount(TorchDispatchMode):
    """Counts, by name, the operations under it that compute or copy, and the launches of Triton's kernels.

    Views and allocations launch nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and count it, or those that it is composed of."""
        kwargs = kwargs or {}
        if func not in _ONE_KERNEL:
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        result = func(*args, **kwargs)
        if not _launches_nothing(func, (args, kwargs), result):
            self.names[func.name().removeprefix("aten::")] += 1
        return result

    @contextmanager
    def with_triton(self) -> Iterator[LaunchCount]:
        """Count until the context ends; what the interpreter does for a launch is not counted."""
        from triton.runtime.interpreter import InterpretedFunction

        run = InterpretedFunction.run

        def counted(kernel: Any, *args: Any, **options: Any) -> Any:
            self.names[kernel.__name__] += 1
            self.__exit__(None, None, None)
            try:
                return run(kernel, *args, **options)
            finally:
                self.__enter__()

        # Methods of a class are replaced.
        setattr(InterpretedFunction, "run", counted)  # noqa: B010
        try:
            with self:
                yield self
        finally:
            setattr(InterpretedFunction, "run", run)  # noqa: B010


def _launches_nothing(func: Any, given: Any, result: Any) -> bool:
    if func._schema.is_mutable:
        return False
    if func.name().startswith(("aten::empty", "aten::new_empty")):
        return True
    read = {each.untyped_storage().data_ptr() for each in tree_leaves(given) if isinstance(each, torch.Tensor)}
    made = [each for each in tree_leaves(result) if isinstance(each, torch.Tensor)]
    return all(each.untyped_storage().data_ptr() in read for each in made)


class CountingRecorder:
    """Counts the launches of what it is given to record, in the place of `CudaGraphRecorder`."""

    memory_bytes = 0

    def __init__(self) -> None:
        self.counts: list[Counter[str]] = []

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """Run and count."""
        with LaunchCount().with_triton() as count:
            run()
        self.counts.append(count.names)
        return run


def iteration_launches(model_type: str, layers: int, fused: bool) -> dict[str, Counter[str]]:
    """Return the launches of a decode iteration of a small random model by name: "base" and, with LoRA, "adapted".

    Layers are the model's own, or `fused`.
    """
    from edged.engine.cuda_graphs import DecodeGraphs
    from edged.engine.model.gpu_layers import fuse_layers

    config = AutoConfig.for_model(model_type, num_hidden_layers=layers, **_SIZES)
    base = AutoModelForCausalLM.from_config(config, dtype=torch.float16).eval().requires_grad_(False)
    base.set_attn_implementation(IMPLEMENTATION)
    model = ServedModel(base)
    # As `build_runner` does on a GPU.
    fuse_norms(model.model, model.dtype)
    model.attach_lora(AlignSettings(), _ROWS)
    model.lora.runs.kernel = "triton"
    if fused and (reason := fuse_layers(model, _PAGE)):
        raise RuntimeError(reason)
    recorder: Any = CountingRecorder()
    DecodeGraphs(model, model.new_kv(2, _PAGE), Backends("triton"), recorder, _ROWS, 1)
    adapted, plain, *_ = recorder.counts
    return {"base": plain, "adapted": adapted}


def layer_launches(model_type: str, fused: bool) -> dict[str, Counter[str]]:
    """Return the launches of one layer of a model type by name: "base" and, with LoRA, "adapted"."""
    shallow, deep = (iteration_launches(model_type, layers, fused) for layers in _DEPTHS)
    return {kind: deep[kind] - shallow[kind] for kind in deep}


def main() -> None:
    """Print the launches of a layer of each family as JSON."""
    ways = {"own": False, "fused": True}
    found = {name: {way: layer_launches(kind, fused) for way, fused in ways.items()} for name, kind in FAMILIES.items()}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
