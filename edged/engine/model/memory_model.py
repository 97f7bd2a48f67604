"""The memory model: bytes of a base model, its adapters and their training by part, from shapes and settings alone; and
the number of K/V pages and adapters that fit the free memory at start.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import psutil
import torch
from transformers import AutoModelForCausalLM

from edged.align.dpo.step_plan import Recompute, head_window_size
from edged.engine.attention.paged import IMPLEMENTATION
from edged.engine.kv.state import StateSize, copies_for, slots_for, state_bytes
from edged.engine.kv.store import LayerHeads, kv_per_token
from edged.engine.model.inspection import max_positions, sizes_of
from edged.engine.model.loading import ModelRefused, target_linears
from edged.engine.model.packed_experts import sizes_of_experts
from edged.engine.model.packed_linear import BOTH_COPIES, COPIES_SHARE
from edged.engine.model.quantization import WeightForm, weight_count
from edged.settings.kernels import kernels_of
from edged.settings.load import Settings
from edged.tensors.device_copy import has_own_memory

log = logging.getLogger("edged.engine")
CACHE_SHARES = {"cpu": 0.25, "discrete": 0.85, "integrated": 0.5}
"""Shares of the free memory that K/V pages may take: of a CPU's, of a GPU's own, of memory that both share."""
Linears = tuple[tuple[int, int], ...]
"""(in_features, out_features) of some linears."""

STATE_BYTES = 24
"""Bytes of an adapter's weight in memory: the fp32 master and AdamW's two moments, and those of the rollback version.

The second half lies on the host: a Jetson has one memory for both, a box with a discrete GPU has some to spare.
"""
_GRADIENT_BYTES = 4
_OPTIMIZER_BYTES = 4
"""Bytes of an adapter's weight in an optimizer step: the mean gradient."""
_ADAPTER_SHARE = 0.25
"""Share of the memory beside the base that loaded adapters and their slots may take."""
_FEWEST_ADAPTERS = 2
FEWEST_PAGES = 4
"""Pages that a short sequence needs, with the one that is set aside."""
_MASK_BYTES = 9
"""Bytes of a query and a key while a chunk's mask is made, beside the mask: distance, and whether it is hidden."""
_BETWEEN_BYTES = 1.2
"""Bytes of a graph beside each number of a linear's input or output: norms and rotary embeddings keep no more in
the architectures that were counted, in 32 bits whatever the weights have."""
_RECURRENCE_BYTES = 24
"""Bytes of a graph, or of a chunk's forward, for each number of `StateSize.width`: gated delta rules and Mamba-2 kept
17 to 23, in fp32 whatever the weights have, in transformers' own code."""
_STATE_COPIES = 4
"""Tensors of the size of a layer's states, at the peak of a mixer that computes decodes."""
_LOGIT_COPIES = 4
"""Tensors of the size of a head unit's or a sampler's fp32 logits, at the peak."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseShape:
    """A base model's sizes that memory depends on, from its configuration or its first forward."""

    layers: int
    states: tuple[StateSize, ...] = ()
    """Sizes of the states that layers keep of each sequence."""
    hidden_size: int
    vocab_size: int
    layer_heads: tuple[LayerHeads | None, ...]
    """The heads of each layer's attention; None for one that keeps a state, or nothing."""
    max_positions: int
    linears: Linears
    """Linears of the decoder, which a quantization packs. The head and the embeddings stay plain."""
    targets: Linears
    """Linears that LoRA is applied to."""
    plain_weights: int
    """Number of other weights: embeddings, norms, biases, and the head if it is not tied."""
    in_16_bits: bool = False
    """Whether the checkpoint's numbers have 16 bits, by its configuration."""
    experts: Linears = ()
    """Sizes of the experts' matrices that a token passes, which are no linears."""
    banks: tuple[tuple[int, int, int], ...] = ()
    """(experts, out, in) of the experts' tensors that the base's quantization packs."""
    layer_input_size: int = 0
    """Numbers of a token that each layer is given beside the hidden states."""
    keeps_lean: bool = True
    """Whether steps may keep Algorithm 1's results: the self-test at start finds where they would fail."""

    @property
    def parameters(self) -> int:
        """Number of all weights; packed ones count unpacked."""
        return self.plain_weights + sum(map(prod, self.linears))

    def bytes_in(self, form: WeightForm, dtype: torch.dtype) -> int:
        """Return the bytes of all weights, with linears and `banks` in `form`."""
        plain = self.plain_weights - sum(map(prod, self.banks))
        packed = sum(count * form.bytes_of(fan_in, out) for count, out, fan_in in self.banks)
        return plain * dtype.itemsize + packed + sum(form.bytes_of(*linear) for linear in self.linears)

    def kv_per_token(self, dtype: torch.dtype) -> int:
        """Return the bytes of one token's keys and values in all layers."""
        return kv_per_token(self.layer_heads, dtype)

    @property
    def attention(self) -> list[LayerHeads]:
        """The heads of the layers that attend."""
        return [each for each in self.layer_heads if each is not None]

    @property
    def kv_sources(self) -> tuple[int, ...]:
        """The layer whose keys and values each layer reads: its own number, or an earlier one's."""
        return tuple(layer if each is None else each.source for layer, each in enumerate(self.layer_heads))

    @property
    def reads_kv(self) -> bool:
        """Whether a layer reads an earlier one's keys and values."""
        return self.kv_sources != tuple(range(self.layers))

    def state_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of one sequence's states in all layers, 0 where layers keep none."""
        return state_bytes(self.states, dtype)

    def state_slots(self, settings: Settings, loaded: int) -> int:
        """Return the number of slots for states, of running sequences, open steps and copies, with `loaded`
        adapters."""
        sequences = settings.serving.max_sequences
        copies = copies_for(sequences, settings.cache.share_across != "none")
        return slots_for(sequences, max_open_steps(loaded), copies) if self.states else 0

    @classmethod
    def of_config(cls, config: Any, target_modules: str | list[str]) -> BaseShape:
        """Read the shape from a transformers configuration; the model is built without memory.

        Raises ModelRefused as a start does, and whatever transformers raises.
        """
        text = config.get_text_config()
        in_16_bits = (text.dtype or config.dtype) in (torch.bfloat16, torch.float16)
        with torch.device("meta"):
            # Without memory the products of fused experts know this type alone.
            how = {"dtype": torch.bfloat16, "attn_implementation": IMPLEMENTATION}
            model = AutoModelForCausalLM.from_config(config, **how).eval()
        model.tie_weights()
        try:
            layer_heads, states = sizes_of(model)
        except ModelRefused as error:
            if "meta tensor" not in str(error):
                raise
            # Its forward decides by numbers, which are not there: its configuration says its heads.
            heads = int(text.num_attention_heads)
            sizes = heads, getattr(text, "num_key_value_heads", heads), text.hidden_size // heads
            states = ()
            layer_heads = tuple(LayerHeads(*sizes, layer) for layer in range(int(text.num_hidden_layers)))
        linears = linear_sizes(model, target_linears(model, "all-linear"))
        return cls(
            layers=int(text.num_hidden_layers),
            states=states,
            hidden_size=int(text.hidden_size),
            vocab_size=int(text.vocab_size),
            layer_heads=layer_heads,
            max_positions=max_positions(text),
            linears=linears,
            targets=linear_sizes(model, target_linears(model, target_modules)),
            plain_weights=weight_count(model) - sum(map(prod, linears)),
            in_16_bits=in_16_bits,
            experts=expert_sizes(model, text),
            layer_input_size=layer_input_size(text),
        )


def linear_sizes(model: Any, names: Sequence[str]) -> Linears:
    """Return the sizes of linears in a model without wrappers."""
    linears = [model.get_submodule(name) for name in names]
    return tuple((int(linear.in_features), int(linear.out_features)) for linear in linears)


def layer_input_size(text: Any) -> int:
    """Return the numbers of a token that each layer is given beside the hidden states (Gemma 4 E2B)."""
    return int(getattr(text, "hidden_size_per_layer_input", None) or 0)


def expert_sizes(model: Any, text: Any) -> Linears:
    """Return the sizes of the matrices [experts, out, in] that a token passes, of a model with its text configuration.

    Every one counts as often as a token has experts.
    """
    chosen = getattr(text, "num_experts_per_tok", None) or getattr(text, "top_k_experts", None)
    return tuple((fan_in, out) for _, out, fan_in in sizes_of_experts(model)) * int(chosen or 0)


@dataclass(frozen=True, slots=True)
class Needs:
    """The bytes that a model needs, by part."""

    weights: int
    weight_copies: int
    """Copies that the CPU's products read instead: oneDNN's, and that in 16 bits."""
    lora_slots: int
    adapters: int
    """Masters and optimizer states of the loaded adapters."""
    step: int
    """The open DPO steps, one of them in a unit that recomputes a layer."""
    kept_graph: int
    """The graph that a step keeps instead of a second forward, if it fits."""
    iteration: int
    """Activations, attention and logits of one packed forward."""
    dequantized: int
    """The largest weight of a quantized base, since one is dequantized at a time."""
    decode_graphs: int
    """Captured decode iterations, on CUDA."""
    states: int
    """States that layers keep beside K/V, of all running sequences and open steps."""
    kv_per_token: int
    loaded_adapters: int
    """Number of adapters in memory."""
    active_adapters: int
    """Number of adapters with a slot."""

    @property
    def total(self) -> int:
        """Bytes of everything but K/V pages."""
        fixed = self.weights + self.weight_copies + self.lora_slots + self.kept_graph + self.states
        return fixed + self.adapters + self.step + self.iteration + self.dequantized + self.decode_graphs


def needs(shape: BaseShape, settings: Settings, form: WeightForm, dtype: torch.dtype, cuda: bool, free: int) -> Needs:
    """Return the bytes to serve and train `shape`; adapters take no more than a share of `free` bytes."""
    align = settings.align
    plain = form.bits == 8 * dtype.itemsize
    weights = shape.bytes_in(form, dtype)
    copied = plain and not cuda and dtype == torch.float32 and kernels_of(settings.model).pack_weights
    one = adapter_weights(shape.targets, align.rank)
    left = max(0, free - weights)
    loaded, active = adapters_that_fit(one, settings, dtype, left)
    slots = active * one * dtype.itemsize
    return Needs(
        weights=weights,
        weight_copies=copies_bytes(shape, settings, dtype, left - slots) if copied else 0,
        lora_slots=slots,
        kept_graph=max(
            (kept_bytes(shape, settings, dtype, kind) for kind in kept_kinds(shape, align.recompute, cuda)), default=0
        ),
        **work_of(shape, settings, dtype, loaded, left, quantized=not plain, cuda=cuda),
        states=shape.state_slots(settings, loaded) * shape.state_bytes(dtype),
        kv_per_token=shape.kv_per_token(dtype),
        loaded_adapters=loaded,
        active_adapters=active,
    )


def copies_bytes(shape: BaseShape, settings: Settings, dtype: torch.dtype, left: int) -> int:
    """Return the bytes of the second and third copy of the linears' and the head's weights, if they fit `left`."""
    linears = shape.hidden_size * shape.vocab_size + sum(map(prod, shape.linears))
    copy, most = linears * dtype.itemsize, int(COPIES_SHARE * left)
    kernels = kernels_of(settings.model)
    narrow = shape.in_16_bits and kernels.cpu_kernels and kernels.fp16_weights
    both = round(BOTH_COPIES * copy) if narrow else copy
    return next((size for size in (both, copy) if size <= most), 0)


def work_of(
    shape: BaseShape, settings: Settings, dtype: torch.dtype, loaded: int, left: int, quantized: bool, cuda: bool
) -> dict[str, int]:
    """Return the bytes that running takes beside weights, slots, pages and a kept graph, by their names in `Needs`,
    with `loaded` adapters in memory, if K/V may take up to `left` bytes."""
    graphs = (settings.model.graph_memory_mb << 20) + 4 * shape.vocab_size * settings.serving.max_sequences
    return {
        "adapters": loaded * STATE_BYTES * adapter_weights(shape.targets, settings.align.rank),
        "step": step_bytes(shape, settings, dtype, loaded),
        "iteration": iteration_bytes(shape, settings, dtype, left),
        "dequantized": dtype.itemsize * max(map(prod, (*shape.linears, *shape.experts)), default=0) if quantized else 0,
        "decode_graphs": graphs if cuda and settings.model.graph_memory_mb else 0,
    }


def adapter_weights(targets: Linears, rank: int) -> int:
    """Return the number of weights of one adapter: A [rank, in] and B [out, rank] of every target."""
    return rank * sum(fan_in + fan_out for fan_in, fan_out in targets)


def adapters_that_fit(weights: int, settings: Settings, dtype: torch.dtype, left: int) -> tuple[int, int]:
    """Return (loaded adapters, adapters with a slot): as set, but no more than a share of `left` bytes holds."""
    align = settings.align
    each = weights * (STATE_BYTES + dtype.itemsize)
    fitting = max(_FEWEST_ADAPTERS, int(_ADAPTER_SHARE * left) // each) if each else align.max_loaded_adapters
    return min(align.max_loaded_adapters, fitting), min(align.max_active_adapters, fitting)


def kept_kinds(shape: BaseShape, setting: str, cuda: bool) -> tuple[Recompute, ...]:
    """Return what `align.recompute` lets a step keep beside its inputs, the most first."""
    lean = shape.keeps_lean and not (cuda and setting == "auto")
    kinds: tuple[Recompute, ...] = ("none", "selective") if lean else ("none",)
    return tuple(kind for kind in kinds if setting in ("auto", kind))


def kept_bytes(shape: BaseShape, settings: Settings, dtype: torch.dtype, kind: Recompute, factors: bool = False) -> int:
    """Return the bytes that a step of one window keeps beside its inputs and K/V: a graph, or Algorithm 1's results.

    With `factors` of outputs (IA3, DoRA) a graph also has the adapted linears' outputs from before these.
    """
    passed = settings.align.window_tokens * _passed_bytes(shape, dtype)
    if kind == "none":
        before = sum(fan_out for _, fan_out in shape.targets) if factors else 0
        return graph_bytes(shape, settings, dtype) + before * dtype.itemsize * settings.align.window_tokens + passed
    # Of each layer the linears' outputs (not every model keeps the last one's), attention's with its sums in fp32, and
    # the input.
    width = sum(fan_out for _, fan_out in (*shape.linears, *shape.experts))
    width += shape.layers * shape.hidden_size + sum(each.heads * each.head_dim for each in shape.attention)
    each = width * dtype.itemsize + 4 * sum(each.heads for each in shape.attention)
    return each * settings.align.window_tokens + passed if kind == "selective" else 0


def kept_that_fits(
    shape: BaseShape, settings: Settings, dtype: torch.dtype, cuda: bool, most: float, factors: bool = False
) -> Recompute:
    """Return the most that a step may keep in `most` bytes; `factors` as for `kept_bytes`."""
    kinds = kept_kinds(shape, settings.align.recompute, cuda)
    return next((kind for kind in kinds if kept_bytes(shape, settings, dtype, kind, factors) <= most), "full")


def graph_bytes(shape: BaseShape, settings: Settings, dtype: torch.dtype) -> int:
    """Estimate the bytes of a window's graph: each linear's and expert's input and output, what is between them, and
    that of recurrences."""
    linears, experts = (sum(map(sum, sizes)) for sizes in (shape.linears, shape.experts))
    each = linears * (dtype.itemsize + _BETWEEN_BYTES) + experts * dtype.itemsize
    each += _RECURRENCE_BYTES * sum(size.width for size in shape.states)
    return int(settings.align.window_tokens * each)


def max_open_steps(loaded: int) -> int:
    """Return the most open steps: one that runs, and one that follows without a gap unless few adapters fit."""
    return 2 if loaded > _FEWEST_ADAPTERS else 1


def step_bytes(shape: BaseShape, settings: Settings, dtype: torch.dtype, loaded: int) -> int:
    """Return the bytes of the open DPO steps beside their pages, with `loaded` adapters in memory.

    Each has the layers' inputs of a micro-batch and its adapters' gradients and matrices as they are computed with. One
    unit runs at a time: a layer's graph and a head unit at most, or one adapter's optimizer, whose step has no inputs
    then.
    """
    align, steps = settings.align, max_open_steps(loaded)
    one = adapter_weights(shape.targets, align.rank)
    # A lone adapter may have several micro-batches, and keeps the gradient from before the last one; adapters that
    # share a window have one micro-batch, and none is in two steps.
    members = min(steps * align.joint_adapters, loaded)
    adapters = one * (_GRADIENT_BYTES * max(2 * steps, members) + dtype.itemsize * max(steps, members))
    return adapters + (steps - 1) * _kept_inputs(shape, settings, dtype) + _units_peak(shape, settings, dtype)


def lone_step_bytes(shape: BaseShape, settings: Settings, dtype: torch.dtype, recompute: Recompute) -> int:
    """Return the bytes of one adapter's step of one micro-batch, beside its pages: of two windows that keep their
    inputs, or of one that keeps more."""
    one = adapter_weights(shape.targets, settings.align.rank)
    kept = (_GRADIENT_BYTES + dtype.itemsize) * one
    if recompute == "full":
        return kept + _units_peak(shape, settings, dtype)
    graph = kept_bytes(shape, settings, dtype, recompute) + _head_unit(shape, settings)
    if recompute == "selective":
        graph += graph_bytes(shape, settings, dtype) // max(1, shape.layers)
    return kept + max(graph, _OPTIMIZER_BYTES * one)


def _units_peak(shape: BaseShape, settings: Settings, dtype: torch.dtype) -> int:
    """Return the peak of a step's units: layers' inputs, a layer's graph and a head unit, or the optimizer alone."""
    layer = 14 * _row(shape, settings, dtype) + graph_bytes(shape, settings, dtype) // max(1, shape.layers)
    if shape.states:
        # Such units have no windows: they cover whole pairs.
        layer = (
            layer * max(settings.align.window_tokens, settings.align.max_pair_tokens) // settings.align.window_tokens
        )
    optimizer = _OPTIMIZER_BYTES * adapter_weights(shape.targets, settings.align.rank)
    return max(_kept_inputs(shape, settings, dtype) + layer + _head_unit(shape, settings), optimizer)


def _row(shape: BaseShape, settings: Settings, dtype: torch.dtype) -> int:
    """Return the bytes of the hidden states of a micro-batch's tokens by both policies."""
    return _tokens(settings) * shape.hidden_size * dtype.itemsize


def _tokens(settings: Settings) -> int:
    return 2 * max(settings.align.window_tokens, settings.align.max_pair_tokens)


def _kept_inputs(shape: BaseShape, settings: Settings, dtype: torch.dtype) -> int:
    """Return the bytes of each layer's inputs of a micro-batch, the last hidden states and their gradient."""
    return (shape.layers + 2) * _row(shape, settings, dtype) + _tokens(settings) * _passed_bytes(shape, dtype)


def _passed_bytes(shape: BaseShape, dtype: torch.dtype) -> int:
    """Return a token's bytes of what layers are given beside hidden states, and of the keys and values that later ones
    read, with their gradients in fp32."""
    own = enumerate(shape.kv_sources)
    read = [shape.layer_heads[layer] for layer in {source for layer, source in own if source != layer}]
    numbers = sum(2 * each.kv_heads * each.head_dim for each in read if each is not None)
    return shape.layers * shape.layer_input_size * dtype.itemsize + numbers * (dtype.itemsize + _GRADIENT_BYTES)


def _head_unit(shape: BaseShape, settings: Settings) -> int:
    rows = head_window_size(settings.align.window_tokens, shape.vocab_size)
    return _LOGIT_COPIES * 4 * shape.vocab_size * rows


def iteration_bytes(shape: BaseShape, settings: Settings, dtype: torch.dtype, left: int) -> int:
    """Return the bytes of one packed forward: hidden states, a linear's outputs, a chunk's attention, sampled logits.

    No context is longer than one whose K/V take all of the `left` bytes.
    """
    num_tokens = settings.serving.max_batch_tokens
    widest = max((fan_out for _, fan_out in shape.linears), default=shape.hidden_size)
    rows = num_tokens * (6 * shape.hidden_size + 3 * widest) * dtype.itemsize
    context = min(settings.model.max_context_tokens or shape.max_positions, left // shape.kv_per_token(dtype))
    mask = context * num_tokens * (dtype.itemsize + _MASK_BYTES)
    widest_kv = max(each.kv_heads * each.head_dim for each in shape.attention)
    attention = mask + context * 4 * widest_kv * dtype.itemsize
    # Decodes compute with copies of their states, one layer at a time.
    copies = max((state_bytes([size], torch.float32) for size in shape.states), default=0)
    rows += _STATE_COPIES * copies * settings.serving.max_sequences
    rows += num_tokens * _RECURRENCE_BYTES * max((size.width for size in shape.states), default=0)
    return rows + attention + _LOGIT_COPIES * 4 * shape.vocab_size * settings.serving.max_sequences


# -- of a model that is loaded, on this box ----------------------------------------------------------------------------


def total_bytes(device: torch.device) -> int:
    """Return all memory that the device's work can use; the box's if CUDA is asked for and missing."""
    if device.type == "cuda" and torch.cuda.is_available() and has_own_memory(device):
        return int(torch.cuda.mem_get_info(device)[1])
    return int(psutil.virtual_memory().total)


def free_bytes(device: torch.device) -> tuple[int, float]:
    """Return the free memory of the device and the share of it that the cache may take.

    On an integrated GPU memory is the box's own: MemAvailable counts what cudaMemGetInfo does not (page cache).
    """
    if has_own_memory(device):
        return int(torch.cuda.mem_get_info(device)[0]), CACHE_SHARES["discrete"]
    return int(psutil.virtual_memory().available), CACHE_SHARES["integrated" if device.type == "cuda" else "cpu"]


def unused_bytes(device: torch.device) -> int:
    """Return the unused memory that torch's allocator reserves on a discrete GPU; `free_bytes` does not count it."""
    if not has_own_memory(device):
        return 0
    return torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def beside_states(
    shape: BaseShape, settings: Settings, dtype: torch.dtype, loaded: int, page_bytes: int, budget: int
) -> tuple[int, int]:
    """Return what the states of layers leave of a `budget` of bytes for K/V, and how many copies of them fit.

    Raises ModelRefused, with the arithmetic, where they leave less than a few pages without any copy.
    """
    each, slots, asked = shape.state_bytes(dtype), shape.state_slots(settings, loaded), settings.serving.max_sequences
    if not slots:
        return budget, 0
    copies = copies_for(asked, settings.cache.share_across != "none")
    context = min(settings.model.max_context_tokens, shape.max_positions)
    pages = page_bytes * max(FEWEST_PAGES, -(-context // settings.cache.page_size) + 1)
    room, fewest = (budget - pages) // each, slots - copies
    if room >= fewest:
        # The rest is for K/V.
        fitting = min(copies, (room - fewest) // 2)
        return budget - (fewest + fitting) * each, fitting
    fitting = room - (fewest - asked)
    needed_mb = math.ceil((fewest * each + pages) / 2**20)
    way_out = f"set serving.max_sequences = {fitting}" if fitting > 0 else "not one sequence fits: free memory"
    raise ModelRefused(
        f"the layers' states of {asked} sequences (serving.max_sequences) and of open steps take {fewest} slots of "
        f"{each / 2**20:.3g} MiB, the cache has {max(budget, 0) >> 20} MiB: {way_out}, or set cache.memory_mb to "
        f"{needed_mb} or more"
    )


def refuse_longer_context(settings: Settings, max_positions: int, page_bytes: int, pages: int, budget: int) -> None:
    """Raises ModelRefused, with the arithmetic, when `pages` (of `budget` bytes) cannot hold the context asked for."""
    size = settings.cache.page_size
    asked = min(settings.model.max_context_tokens, max_positions)
    if (pages - 1) * size < asked:
        needed = -(-asked // size) + 1
        needed_mb = needed * page_bytes / 2**20
        raise ModelRefused(
            f"a context of {asked} tokens (model.max_context_tokens) takes {needed} pages of {size} tokens and "
            f"{page_bytes} bytes, one of them set aside: {needed_mb:.1f} MiB; the K/V cache has room for {pages} "
            f"in {budget >> 20} MiB: raise cache.memory_mb to {math.ceil(needed_mb)}, free memory, or lower "
            "model.max_context_tokens (0: what fits)"
        )
