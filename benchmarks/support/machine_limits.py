"""The floor of a piece of work on this machine: the least time for its reads and its computation.

A floor leaves out what is small beside the matrices (norms, activations, optimizer state), so nothing that computes the
same can be faster.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

_READ_BYTES = {"cpu": 512 << 20, "cuda": 2 << 30}
"""Bytes of the tensor that measures bandwidth, much larger than any cache."""
_SQUARE = {"cpu": 2048, "cuda": 8192}
_MEASURED_S = 0.4


def report_header(device: str | None = None) -> dict[str, Any]:
    """Return the device (None: the GPU if there is one), versions, the time, and the load of the machine before."""
    on_gpu = torch.cuda.is_available() if device is None else device.startswith("cuda")
    return {
        "device": torch.cuda.get_device_name() if on_gpu else f"CPU, {os.cpu_count()} cores",
        "versions": {name: version(name) for name in ("edged", "torch", "transformers")},
        "measured_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "load_average_before": os.getloadavg()[0],
    }


@dataclass(frozen=True, slots=True)
class Machine:
    """Rates of a device with all its threads: bytes read in a second, operations of a matrix product in a second."""

    bytes_per_s: float
    operations_per_s: float

    def text(self) -> str:
        """Format as `38 GB/s, 170 GFLOP/s`."""
        return f"{self.bytes_per_s / 1e9:.0f} GB/s, {self.operations_per_s / 1e9:.0f} GFLOP/s"


@dataclass(frozen=True, slots=True)
class Work:
    """Bytes that must be read or written and operations (a multiplication and an addition are two) of one pass."""

    bytes: float
    operations: float

    def floor_s(self, machine: Machine) -> float:
        """Return the longer of the times for reading and for computing, which overlap."""
        return max(self.bytes / machine.bytes_per_s, self.operations / machine.operations_per_s)


@dataclass(frozen=True, slots=True)
class Sizes:
    """A Llama's sizes, with the bytes of one number and the rank of its adapters (0: no adapters)."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    itemsize: int
    rank: int = 0
    stored: int | None = None
    """Bytes of one number of the checkpoint's matrices; None: the same as in computation."""

    @classmethod
    def of(cls, model_dir: Path, dtype: str, rank: int = 0) -> Sizes:
        """Read the sizes from a model's config.json, including the dtype of the weights."""
        config = json.loads((model_dir / "config.json").read_text())
        heads, itemsize = config["num_attention_heads"], getattr(torch, dtype).itemsize
        stored = getattr(torch, config.get("dtype") or config.get("torch_dtype") or dtype).itemsize
        return cls(
            hidden=config["hidden_size"],
            layers=config["num_hidden_layers"],
            heads=heads,
            kv_heads=config["num_key_value_heads"],
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            intermediate=config["intermediate_size"],
            vocab=config["vocab_size"],
            itemsize=itemsize,
            rank=rank,
            stored=min(stored, itemsize),
        )

    @property
    def _linears(self) -> list[tuple[int, int]]:
        """(in, out) of one layer's linears."""
        wide, narrow = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = [(self.hidden, wide), (self.hidden, narrow), (self.hidden, narrow), (wide, self.hidden)]
        return attention + [(self.hidden, self.intermediate)] * 2 + [(self.intermediate, self.hidden)]

    @property
    def layer_numbers(self) -> int:
        """Numbers in the matrices of all layers."""
        return self.layers * sum(fan_in * fan_out for fan_in, fan_out in self._linears)

    @property
    def head_numbers(self) -> int:
        """Numbers in the output matrix."""
        return self.vocab * self.hidden

    @property
    def adapter_numbers(self) -> int:
        """Numbers in one adapter on all linears."""
        return self.layers * self.rank * sum(fan_in + fan_out for fan_in, fan_out in self._linears)

    @property
    def weight_itemsize(self) -> int:
        """Bytes of one number of the stored matrices."""
        return self.stored or self.itemsize

    @property
    def matrix_bytes(self) -> int:
        """Bytes of all matrices, including the output's."""
        return (self.layer_numbers + self.head_numbers) * self.weight_itemsize

    @property
    def adapter_bytes(self) -> int:
        """Bytes of one adapter."""
        return self.adapter_numbers * self.itemsize

    @property
    def kv_bytes(self) -> int:
        """Bytes of one token's keys and values."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.itemsize

    @property
    def _pair_operations(self) -> int:
        """Operations of one query with one key, in all layers: the score, and the value's share."""
        return 4 * self.layers * self.heads * self.head_dim


def decode(sizes: Sizes, batch: int, context: int, adapters: int = 0) -> Work:
    """Return the work of one token for each of `batch` sequences over `context` keys, with `adapters` different
    adapters."""
    numbers = sizes.layer_numbers + sizes.head_numbers
    own = sizes.adapter_numbers if adapters else 0
    return Work(
        sizes.matrix_bytes + adapters * sizes.adapter_bytes + batch * context * sizes.kv_bytes,
        2 * batch * (numbers + own) + batch * context * sizes._pair_operations,
    )


def prefill(sizes: Sizes, tokens: int, prompts: int = 1, context: int = 0, adapters: int = 0) -> Work:
    """Return the work of `prompts` packed prompts of `tokens` tokens each, after `context` cached ones; each samples a
    token."""
    numbers = sizes.layer_numbers + (sizes.adapter_numbers if adapters else 0)
    return Work(
        sizes.matrix_bytes + adapters * sizes.adapter_bytes + prompts * (context + tokens) * sizes.kv_bytes,
        2 * prompts * (tokens * numbers + sizes.head_numbers)
        + prompts * tokens * (context + (tokens + 1) / 2) * sizes._pair_operations,
    )


def dpo_step(sizes: Sizes, pairs: Iterable[tuple[int, int, int]]) -> Work:
    """Return the work of one step over pairs of (prompt, chosen, rejected) tokens, the prompt computed once for both
    answers.

    The matrices are frozen: their backward pass computes the gradient of their inputs alone, the adapters' also that of
    the weights. The first layer's inputs need none.
    """
    tokens, scored, attended = 0, 0, 0.0
    for prompt, *answers in pairs:
        tokens += prompt + sum(answers)
        scored += sum(answers)
        attended += prompt * (prompt + 1) / 2 + sum(answer * (prompt + (answer + 1) / 2) for answer in answers)
    first = sum(fan_in * fan_out for fan_in, fan_out in sizes._linears[:3])
    return Work(
        2 * sizes.matrix_bytes,
        2 * tokens * (2 * sizes.layer_numbers - first)
        + 4 * scored * sizes.head_numbers
        + 6 * tokens * sizes.adapter_numbers
        + 3 * attended * sizes._pair_operations,
    )


def unit(sizes: Sizes, kind: str, tokens: int) -> Work:
    """Return the work of a packed forward ("forward") or a unit of fine-tuning (`edged.scheduler.task.Unit`) over
    `tokens`.

    Attention is left out, since a unit's number of query-key pairs is unknown.
    """
    layer, adapter = sizes.layer_numbers / sizes.layers, sizes.adapter_numbers / sizes.layers
    if kind == "forward":
        return Work(sizes.layer_numbers * sizes.weight_itemsize, 2 * tokens * sizes.layer_numbers)
    if kind == "step":
        # AdamW: weight, gradient, two moments in float32, read and (but the gradient) written; tokens are adapters.
        return Work(tokens * sizes.adapter_numbers * 7 * 4, 0)
    if kind in ("head", "score", "test"):
        operations = (4 if kind == "head" else 2) * tokens * sizes.head_numbers
        return Work(sizes.head_numbers * sizes.weight_itemsize, operations)
    # A forward, its backward (frozen matrices: the gradient of their inputs alone), or both.
    frozen, trained = {"graph": (2, 2), "grad": (2, 4), "layer": (4, 6)}[kind]
    return Work(layer * sizes.weight_itemsize, tokens * (frozen * layer + trained * adapter))


def measure_machine(device: torch.device, dtype: str) -> Machine:
    """Read a large tensor and multiply two large matrices for about a second in all; the fastest of each counts."""
    machine = Machine(_bytes_per_s(device), _operations_per_s(device, getattr(torch, dtype)))
    _give_back(device)
    return machine


def copy_bytes_per_s(device: torch.device) -> float:
    """Return the bytes that a copy of a large tensor reads and writes in a second: a GPU's copy bandwidth."""
    rate = _copied_bytes_per_s(device)
    _give_back(device)
    return rate


def _give_back(device: torch.device) -> None:
    """Return unused memory to the device, so that others see it as free."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _copied_bytes_per_s(device: torch.device) -> float:
    numbers = torch.ones(_READ_BYTES[device.type] // 4, dtype=torch.float32, device=device)
    copied = torch.empty_like(numbers)
    return 2 * numbers.nbytes / _fastest_s(lambda: copied.copy_(numbers), device)


def _bytes_per_s(device: torch.device) -> float:
    numbers = torch.ones(_READ_BYTES[device.type] // 4, dtype=torch.float32, device=device)
    return numbers.nbytes / _fastest_s(lambda: numbers.sum(), device)


def _operations_per_s(device: torch.device, dtype: torch.dtype) -> float:
    side = _SQUARE[device.type]
    square = torch.rand(side, side, dtype=dtype, device=device)
    return 2 * side**3 / _fastest_s(lambda: square @ square, device)


def _fastest_s(work: Callable[[], torch.Tensor], device: torch.device) -> float:
    """Return the seconds of the fastest call, after one to warm up; on CUDA by events."""
    work()
    fastest, end_s = float("inf"), time.perf_counter() + _MEASURED_S
    while time.perf_counter() < end_s or fastest == float("inf"):
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            work()
            end.record()
            end.synchronize()
            fastest = min(fastest, begin.elapsed_time(end) / 1e3)
        else:
            started = time.perf_counter()
            work()
            fastest = min(fastest, time.perf_counter() - started)
    return fastest
