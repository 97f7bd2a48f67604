"""How long a device takes for a packed forward or a fine-tune unit, from its file and a model's shape (a roofline).

A part of the work takes the longer of its bytes at the device's bandwidth and its operations at its rate (Williams,
Waterman and Patterson 2009); parts follow one another. On a GPU the CPU launches ahead: what counts is the longer of
the device's time and the launches'.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from edged.engine.model.loading import ModelRefused, pick_dtype
from edged.engine.model.memory_model import (
    CACHE_SHARES,
    BaseShape,
    Needs,
    adapter_weights,
    graph_bytes,
    needs,
    refuse_longer_context,
)
from edged.engine.model.quantization import WeightForm, form_of_setting
from edged.scheduler.cost.model import CostModel, Load, roofline
from edged.scheduler.task import Unit
from edged.settings.load import Settings
from edged.simulator.device_file import DeviceFile

LAYER_KERNELS = {"forward": 45, "layer": 150, "graph": 60, "grad": 90}
"""Kernels of one layer by what is done with it, as transformers' modules launch them one by one: an estimate."""
_HEAD_KERNELS = 30
_HEAD_PASSES = {"score": 1, "head": 2}
"""Products with the head: its derivative is a second one."""
_STEP_KERNELS_PER_MATRIX = 2
_STEP_BYTES = 28
"""Moved per adapter weight by an optimizer step: gradient, moments and master read, all but the gradient written."""
_LOGIT_PASSES = 3
"""Times that fp32 logits are read or written for a product with the head."""
_ATTENTION_BACKWARD = 2.5
"""Operations of attention's derivative over those of its forward (Dao et al. 2022)."""


@dataclass(slots=True)
class Pass(Load):
    """A packed forward: the scheduler's view of it, and what else its time depends on."""

    chunk_context: int = 0
    """Keys that chunks read of what was computed before, summed over them."""
    tuned_pairs: float = 0.0
    """Query-key pairs of preference pairs' chunks."""
    sampled: int = 0
    """Tokens that are drawn."""
    adapted: int = 0
    """Tokens that see a LoRA adapter."""

    def add_chunk(self, tokens: int, context: int, finetune: bool) -> None:
        """Count a chunk that follows `context` tokens of its own."""
        Load.add_chunk(self, tokens, context, finetune)
        self.chunk_context += context
        if finetune:
            self.tuned_pairs += tokens * (context + 0.5 * tokens)


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """A model's sizes, in the form in which the device holds it."""

    name: str
    path: str
    architecture: str
    shape: BaseShape
    heads: int
    form: WeightForm
    dtype: torch.dtype
    quantization: str

    @classmethod
    def read(cls, path: Path, settings: Settings, cuda: bool) -> ModelSizes:
        """From a directory or a config.json. Raises ModelRefused."""
        try:
            config = AutoConfig.from_pretrained(str(path), trust_remote_code=False)
            shape = BaseShape.of_config(config, settings.align.target_modules)
        except Exception as error:
            raise ModelRefused(f'model "{path}" has no configuration that can be read: {error}') from error
        dtype = pick_dtype(settings.model.dtype, torch.device("cuda" if cuda else "cpu"))
        return cls(
            name=path.stem if path.is_file() else path.name,
            path=str(path),
            architecture=str((config.architectures or [config.model_type])[0]),
            shape=shape,
            heads=int(config.get_text_config().num_attention_heads),
            form=form_of_setting(settings.model.quantize, dtype, cuda),
            dtype=dtype,
            quantization=settings.model.quantize,
        )

    @property
    def linear_weights(self) -> int:
        """Weights of the decoder's linears, in all layers."""
        return sum(fan_in * fan_out for fan_in, fan_out in self.shape.linears)

    @property
    def linear_bytes(self) -> int:
        """Bytes of them."""
        return sum(self.form.bytes_of(*linear) for linear in self.shape.linears)

    def report(self, device: str, context: int) -> dict[str, Any]:
        """As a status shows a model."""
        weights = self.shape.plain_weights * self.dtype.itemsize + self.linear_bytes
        return {
            "name": self.name,
            "path": self.path,
            "architecture": self.architecture,
            "parameters": self.shape.parameters,
            "weight_bytes": weights,
            "quantization": self.quantization,
            "dtype": str(self.dtype).removeprefix("torch."),
            "device": device,
            "max_context_tokens": context,
            "vocab_size": self.shape.vocab_size,
        }


class RooflineDevice:
    """A device file's times for one model."""

    def __init__(self, file: DeviceFile, model: ModelSizes, settings: Settings) -> None:
        self.name, self.cuda = f"{file.name} ({file.power_mode})", file.cuda
        self.overhead_s, self.rest_s = file.overhead.iteration_ms / 1e3, 0.0
        shape, item = model.shape, model.dtype.itemsize
        self._bytes_per_s = file.bandwidth.bytes_per_s
        self._flops_per_s = file.compute.flops_per_s(item)
        self._launch_s, self._gap_s = file.overhead.launch_us / 1e6, file.overhead.gap_us / 1e6
        self._layers, self._item = shape.layers, item
        self._weights, self._weight_bytes = model.linear_weights, model.linear_bytes
        # bitsandbytes multiplies more than one row by weights that it has written out before.
        self._unpacked_bytes = 2 * item * self._weights if model.quantization == "nf4" else 0
        self._head_weights = shape.vocab_size * shape.hidden_size
        self._vocab = shape.vocab_size
        self._kv_bytes = shape.kv_per_token(model.dtype)
        self._pair_flops = 4 * shape.layers * model.heads * shape.head_dim
        self._lora_weights = adapter_weights(shape.targets, settings.align.rank)
        self._matrices = 2 * len(shape.targets)
        self._captures = file.cuda and settings.model.graph_memory_mb > 0
        self._parameters = shape.parameters

    def guess(self) -> CostModel:
        """The cost model that knows the data sheet alone."""
        prices = roofline(self._parameters, self._flops_per_s, self._bytes_per_s, self._layers, self._item)
        return CostModel(prices)

    def forward_s(self, load: Pass) -> float:
        """Seconds of one packed forward with sampling; 0 when there is nothing in it."""
        tokens = load.prefill_tokens + load.decodes + load.finetune_tokens
        if not tokens:
            return 0.0
        chunks = load.prefill_tokens + load.finetune_tokens
        unpacked = self._unpacked_bytes if tokens > 1 else 0
        device_s = (
            self._part_s(self._weight_bytes + unpacked, 2.0 * self._weights * tokens)
            + self._part_s(self._kv_bytes * load.context, self._pair_flops * load.context)
            + self._part_s(
                self._kv_bytes * (load.chunk_context + chunks), self._pair_flops * (load.pairs + load.tuned_pairs)
            )
        )
        if load.adapted:
            device_s += self._part_s(self._item * self._lora_weights, 2.0 * self._lora_weights * load.adapted)
        if load.sampled:
            logits = 4 * self._vocab * load.sampled
            device_s += self._part_s(
                self._item * self._head_weights + 4 * logits, 2.0 * self._head_weights * load.sampled
            )
        kernels = self._layers * LAYER_KERNELS["forward"]
        launched = 0 if self._captures and not chunks else kernels
        return max(device_s + kernels * self._gap_s, launched * self._launch_s)

    def unit_s(self, unit: Unit) -> float:
        """Seconds of one fine-tune unit."""
        n = unit.tokens
        if unit.kind in _HEAD_PASSES:
            passes = _HEAD_PASSES[unit.kind]
            moved = passes * (self._item * self._head_weights + _LOGIT_PASSES * 4 * self._vocab * n)
            return self._launched_s(self._part_s(moved, 2.0 * passes * self._head_weights * n), _HEAD_KERNELS)
        if unit.kind == "step":
            kernels = _STEP_KERNELS_PER_MATRIX * self._matrices
            return self._launched_s(self._part_s(_STEP_BYTES * self._lora_weights * n, 0.0), kernels)
        forwards, backwards = {"graph": (1, 0), "grad": (0, 1)}.get(unit.kind, (1, 1))
        passes = forwards + backwards
        weights, lora = self._weights / self._layers, self._lora_weights / self._layers
        read = passes * (self._weight_bytes + self._unpacked_bytes) / self._layers
        # A low-rank update takes two products, its derivative four.
        flops = 2.0 * n * (passes * weights + (forwards + 2 * backwards) * lora)
        pairs = 0.5 * n * n * (forwards + _ATTENTION_BACKWARD * backwards)
        device_s = self._part_s(read, flops) + self._part_s(0.0, self._pair_flops / self._layers * pairs)
        return self._launched_s(device_s, LAYER_KERNELS.get(unit.kind, LAYER_KERNELS["layer"]))

    def _part_s(self, moved_bytes: float, flops: float) -> float:
        return max(moved_bytes / self._bytes_per_s, flops / self._flops_per_s)

    def _launched_s(self, device_s: float, kernels: int) -> float:
        return max(device_s + kernels * self._gap_s, kernels * self._launch_s)


@dataclass(frozen=True, slots=True)
class Memory:
    """What there is of it: `kind` as in a device's file."""

    name: str
    kind: str
    available_bytes: int

    @classmethod
    def of(cls, file: DeviceFile) -> Memory:
        """A device file's."""
        return cls(file.name, file.kind, int(file.available_gib * 2**30))


@dataclass(frozen=True, slots=True)
class Room:
    """What the device's memory has room for beside the weights and the work."""

    pages: int
    keeps_graph: bool
    """Whether a fine-tune step may keep its graph."""
    parts: Needs


def room_for(device: Memory, model: ModelSizes, settings: Settings) -> Room:
    """The engine's own arithmetic (`edged.engine.model.memory_model`) for memory that is not here.

    Raises ModelRefused, with the numbers, when not even a short sequence fits, or the context that was asked for.
    """
    shape, size = model.shape, settings.cache.page_size
    parts = needs(shape, settings, model.form, model.dtype, device.kind != "cpu", device.available_bytes)
    free = device.available_bytes - (parts.total - parts.kept_graph)
    budget = settings.cache.memory_mb << 20 or int(free * CACHE_SHARES[device.kind])
    wanted = settings.model.max_context_tokens or shape.max_positions
    useful = settings.serving.max_sequences * -(-wanted // size) + 1
    page_bytes = size * parts.kv_per_token
    pages = min(useful, budget // page_bytes)
    if pages < 4:
        raise ModelRefused(
            f'model "{model.name}" needs {(parts.total - parts.kept_graph) / 2**30:.1f} GiB without K/V pages, and '
            f"{device.name} has {device.available_bytes / 2**30:.1f} GiB for edged: quantize it or take a larger device"
        )
    refuse_longer_context(settings, shape.max_positions, page_bytes, pages, budget)
    left = free - pages * page_bytes
    return Room(pages, 4 * graph_bytes(shape.linears, settings, model.dtype) <= left, parts)
