"""A roofline model of a device: times of packed forwards and fine-tune units, from its file and a model's shape.

A part of the work takes the longer of its bytes at the device's bandwidth and its operations at its rate (Williams,
Waterman and Patterson 2009); parts follow one another. On a GPU the CPU launches ahead: what counts is the longer of
the device's time and the launches'.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from edged.engine.model.memory_model import adapter_weights
from edged.lab.simulator.device_file import DeviceFile
from edged.profiler.memory import ModelSizes
from edged.scheduler.cost.model import CostModel, roofline
from edged.scheduler.cost.prices import Load
from edged.scheduler.cost.profile import Noise
from edged.scheduler.task import Unit
from edged.settings.load import Settings

LAYER_KERNELS = {"forward": 45, "layer": 150, "graph": 60, "grad": 90}
"""Kernels of one layer by what is done with it, as transformers' modules launch them one by one: an estimate."""
_HEAD_KERNELS = 30
_HEAD_PASSES = {"score": 1, "head": 2}
"""Products with the LM head by unit kind: its derivative is a second one."""
_STEP_KERNELS_PER_MATRIX = 2
_STEP_BYTES = 28
"""Bytes moved per adapter weight by an optimizer step: gradient, moments and master read, all but the gradient
written."""
_LOGIT_PASSES = 3
"""Times that fp32 logits are read or written for a product with the head."""
_ATTENTION_BACKWARD = 2.5
"""Operations of attention's derivative over those of its forward (Dao et al. 2022)."""


@dataclass(slots=True)
class Pass(Load):
    """A packed forward: the scheduler's load, and what else its time depends on."""

    chunk_context: int = 0
    """Cached keys that chunks attend to, summed over the chunks."""
    tuned_pairs: float = 0.0
    """Query-key pairs in the chunks of preference pairs."""
    sampled: int = 0
    """Tokens that are sampled."""
    adapted: int = 0
    """Tokens that a LoRA adapter is applied to."""

    def add_chunk(self, num_tokens: int, context: int, finetune: bool) -> None:
        """Count a chunk that follows `context` tokens of its own sequence."""
        Load.add_chunk(self, num_tokens, context, finetune)
        self.chunk_context += context
        if finetune:
            self.tuned_pairs += num_tokens * (context + 0.5 * num_tokens)


@dataclass(slots=True)
class Device:
    """A simulated device with a model on it; all times are seconds."""

    name: str
    kind: Literal["integrated", "discrete", "cpu"]
    """Kind of device, as in a device's file."""
    available_bytes: int
    overhead_s: float
    """Time of an iteration outside its forward and units."""
    rest_s: float
    """Additional time of an iteration that finds the engine at rest."""
    guess: Callable[[], CostModel]
    """Makes the cost model that the scheduler starts from."""
    forward_s: Callable[[Pass], float]
    """Time of one packed forward with sampling; 0 when it is empty."""
    unit_s: Callable[[Unit], float]
    """Time of one fine-tune unit."""
    noise: Noise
    """Scatter of times around the ones above."""
    overlap: Callable[[Pass, Pass, Sequence[Unit]], float] = lambda *_work: 1.0
    """Time of a forward with a fine-tune forward and units beside it, over that of all one after the other; 1 where
    only their times are known."""

    @property
    def cuda(self) -> bool:
        """Whether the device runs CUDA."""
        return self.kind != "cpu"


def roofline_device(file: DeviceFile, model: ModelSizes, settings: Settings) -> Device:
    """Return the device that a file describes, with its times for one model."""
    times, shape, item = _Roofline(file, model, settings), model.shape, model.dtype.itemsize
    speed = file.compute.flops_per_s(item), file.bandwidth.bytes_per_s
    # The cost model as the data sheet alone gives it.
    prices = roofline(shape.parameters, *speed, shape.layers, item)
    return Device(
        name=f"{file.name} ({file.power_mode})",
        kind=file.kind,
        available_bytes=int(file.available_gib * 2**30),
        overhead_s=file.overhead.iteration_ms / 1e3,
        rest_s=0.0,
        guess=partial(CostModel, prices),
        forward_s=times.forward_s,
        unit_s=times.unit_s,
        noise=file.noise,
        overlap=times.overlap,
    )


class _Roofline:
    """The roofline times of one model on one device."""

    def __init__(self, file: DeviceFile, model: ModelSizes, settings: Settings) -> None:
        shape, item = model.shape, model.dtype.itemsize
        self._bytes_per_s = file.bandwidth.bytes_per_s
        self._flops_per_s = file.compute.flops_per_s(item)
        self._launch_s, self._gap_s = file.overhead.launch_us / 1e6, file.overhead.gap_us / 1e6
        self._layers, self._item = shape.layers, item
        self._weights, self._weight_bytes = model.linear_weights, model.linear_bytes
        # bitsandbytes multiplies several rows by weights that it has first dequantized to memory.
        self._unpacked_bytes = 2 * item * self._weights if model.quantization == "nf4" else 0
        self._head_weights = shape.vocab_size * shape.hidden_size
        self._vocab = shape.vocab_size
        self._kv_bytes = shape.kv_per_token(model.dtype)
        self._pair_flops = 4 * sum(each.heads * each.head_dim for each in shape.attention)
        self._lora_weights = adapter_weights(shape.targets, settings.align.rank)
        self._matrices = 2 * len(shape.targets)
        self._captures = file.cuda and settings.model.graph_memory_mb > 0

    def overlap(self, forward: Pass, finetune: Pass, units: Sequence[Unit]) -> float:
        """Return the time of two streams at once over that of one after the other.

        Bytes and operations of both add up on the device, each at its rate; neither ends sooner than it would alone.
        """
        alone_s = self.forward_s(forward), self.forward_s(finetune) + sum(map(self.unit_s, units))
        passes = (self._forward_parts(load) for load in (forward, finetune) if load.num_tokens)
        parts = [part for work in (*passes, *map(self._unit_parts, units)) for part in work]
        moved, flops = map(sum, zip(*parts, strict=True))
        return max(*alone_s, self._part_s(moved, flops)) / sum(alone_s)

    def forward_s(self, load: Pass) -> float:
        """Return the seconds of one packed forward with sampling; 0 when it is empty."""
        if not load.num_tokens:
            return 0.0
        device_s = sum(self._part_s(*part) for part in self._forward_parts(load))
        kernels = self._layers * LAYER_KERNELS["forward"]
        launched = 0 if self._captures and not load.prefill_tokens + load.finetune_tokens else kernels
        return max(device_s + kernels * self._gap_s, launched * self._launch_s)

    def unit_s(self, unit: Unit) -> float:
        """Return the seconds of one fine-tune unit."""
        if unit.kind in _HEAD_PASSES:
            kernels = _HEAD_KERNELS
        elif unit.kind == "step":
            kernels = _STEP_KERNELS_PER_MATRIX * self._matrices
        else:
            kernels = LAYER_KERNELS.get(unit.kind, LAYER_KERNELS["layer"])
        device_s = sum(self._part_s(*part) for part in self._unit_parts(unit))
        return max(device_s + kernels * self._gap_s, kernels * self._launch_s)

    def _forward_parts(self, load: Pass) -> list[tuple[float, float]]:
        """Return (bytes, operations) of a forward's parts, which follow one another."""
        num_tokens, chunks = load.num_tokens, load.prefill_tokens + load.finetune_tokens
        unpacked = self._unpacked_bytes if num_tokens > 1 else 0
        pairs = load.pairs + load.tuned_pairs
        parts: list[tuple[float, float]] = [
            (self._weight_bytes + unpacked, 2.0 * self._weights * num_tokens),
            (self._kv_bytes * load.context, self._pair_flops * load.context),
            (self._kv_bytes * (load.chunk_context + chunks), self._pair_flops * pairs),
        ]
        if load.adapted:
            parts.append((self._item * self._lora_weights, 2.0 * self._lora_weights * load.adapted))
        if load.sampled:
            logits = 4 * self._vocab * load.sampled
            parts.append((self._item * self._head_weights + 4 * logits, 2.0 * self._head_weights * load.sampled))
        return parts

    def _unit_parts(self, unit: Unit) -> list[tuple[float, float]]:
        """Return (bytes, operations) of a fine-tune unit's parts, which follow one another."""
        n = unit.num_tokens
        if unit.kind in _HEAD_PASSES:
            passes = _HEAD_PASSES[unit.kind]
            moved = passes * (self._item * self._head_weights + _LOGIT_PASSES * 4 * self._vocab * n)
            return [(moved, 2.0 * passes * self._head_weights * n)]
        if unit.kind == "step":
            return [(_STEP_BYTES * self._lora_weights * n, 0.0)]
        forwards, backwards = {"graph": (1, 0), "grad": (0, 1)}.get(unit.kind, (1, 1))
        passes = forwards + backwards
        weights, lora = self._weights / self._layers, self._lora_weights / self._layers
        read = passes * (self._weight_bytes + self._unpacked_bytes) / self._layers
        # A low-rank update takes two products, its derivative four.
        flops = 2.0 * n * (passes * weights + (forwards + 2 * backwards) * lora)
        pairs = 0.5 * n * n * (forwards + _ATTENTION_BACKWARD * backwards)
        return [(read, flops), (0.0, self._pair_flops / self._layers * pairs)]

    def _part_s(self, moved_bytes: float, flops: float) -> float:
        return max(moved_bytes / self._bytes_per_s, flops / self._flops_per_s)
