"""Builds the runner of an engine's model and the cost model's first prices, from settings and what the device says."""

from __future__ import annotations

import logging
import os
import platform
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from edged.align.adapters.form import LoraSpec, RowNorms
from edged.cache.page_pool import PagePool
from edged.engine.attention.selection import Backends, pick_lora_kernel, pick_paths
from edged.engine.kv.offload import pick_offload
from edged.engine.kv.store import PagedKv
from edged.engine.kv_pages import KvPages
from edged.engine.lora_selftest import selftest_once
from edged.engine.model.cpu_layers import shorten_layers
from edged.engine.model.loading import ModelRefused
from edged.engine.model.memory_model import (
    FEWEST_PAGES,
    STATE_BYTES,
    adapter_weights,
    adapters_that_fit,
    beside_states,
    free_bytes,
    linear_sizes,
    max_open_steps,
    refuse_longer_context,
    work_of,
)
from edged.engine.model.norms import fuse_norms
from edged.engine.model.served_model import ServedModel
from edged.engine.model.state_steps import NATIVE, step_in_slots
from edged.engine.model_runner import ModelRunner
from edged.engine.native import library, triton_device
from edged.engine.native.library import FEW_ROWS, kernels
from edged.engine.pruner import Pruner
from edged.scheduler.cost.model import CostModel, roofline
from edged.scheduler.cost.prices import Prices
from edged.scheduler.cost.profile import ProfileError, Subject, find_profile
from edged.scheduler.policies.registry import ROWS
from edged.settings.kernels import Kernels, kernels_of
from edged.settings.load import AlignSettings, ModelSettings, Settings
from edged.tensors.cpu_threads import CpuThreads

if TYPE_CHECKING:
    from edged.engine.cuda_graphs import DecodeGraphs

log = logging.getLogger("edged.engine")

COPY_STATES_EVERY = 64
"""Tokens of an answer until what layers keep of it is copied for a next turn."""
_CPU_RATES = (4e10, 8e9)
"""Operations and bytes per second. Constants: the first eight iterations set the level of all prices whatever they
were, and measuring would cost every start what they cost once."""
_UNKNOWN_CUDA_RATES = (2e13, 2e11)
_REACHED_OPERATIONS, _REACHED_BYTES = 0.5, 0.8
"""Shares of a GPU's peak rates that large products and copies reach."""
_TENSOR_OPERATIONS = {7: 1024, 8: 2048, 9: 4096, 10: 8192, 12: 1024}
"""Operations of a multiprocessor's tensor cores in a cycle, at 16 bits (dense), by major compute capability."""
_CONSUMER_OPERATIONS = {(8, 6): 1024, (8, 9): 1024}
KEEPS_STATES = "layers keep a state from token to token"
"""Why drafts and pruning are left out: both need the state after tokens that came before."""
_PLAIN_OPERATIONS = 256
"""Operations of a multiprocessor's 128 plain cores in a cycle, at 32 bits."""


def build_runner(model: ServedModel, settings: Settings, folder: Path) -> ModelRunner:
    """Build the runner of a loaded model from settings, policy and device; `folder` is for evicted prefixes, and has
    the self-test that was passed.

    Raises ModelRefused with the reason.
    """
    if model.device.type == "cuda":
        # Triton launches on the thread's current device, whatever its tensors say.
        torch.cuda.set_device(model.device)
        # cuDNN's attention builds a plan for every new length, some 100 ms each; texts of pairs have any length.
        torch.backends.cuda.enable_cudnn_sdp(False)
        fuse_norms(model.model, model.dtype)
    kernels = kernels_of(settings.model)
    threads = CpuThreads(settings.model.threads, model.shape.parameters) if model.device.type == "cpu" else None
    model.attach_lora(settings.align, settings.align.max_active_adapters)
    selftest_once(model, settings.align, settings.align.max_active_adapters, folder, _device_name(model.device))
    if model.device.type == "cuda":
        # The K/V pages are counted from what is free.
        torch.cuda.empty_cache()
    if model.trainable_error:
        log.warning("%s", model.trainable_error)
    why_not_lora = pick_lora_kernel(model.lora, kernels)
    if kernels.pack_weights and (reason := model.pack_weights(kernels.cpu_kernels, kernels.fp16_weights)):
        log.info("weights are not packed: %s", reason)
    if why_not_layers := _shorten(model, kernels, settings.cache.page_size):
        log.info("layers are computed as the model has them: %s", why_not_layers)
    if why_not_steps := _step_in_slots(model, kernels):
        log.info("states are gathered for decodes: %s", why_not_steps)
    page_size, policy = settings.cache.page_size, ROWS[settings.scheduler.policy]
    num_pages, copies = page_count(model, settings)
    pool = PagePool(num_pages, page_size)
    steps = max_open_steps(settings.align.max_loaded_adapters)
    sequences, cache = settings.serving.max_sequences, settings.cache
    kv = model.new_kv(pool.pages, page_size, sequences, steps, copies)
    # Page tables are padded with page 0: no sequence may own it.
    pool.allocate(1)
    if kv.states is not None:
        log.info("%s: drafts are not used, and K/V is not pruned", KEEPS_STATES)
    shares = cache.share_across != "none" and policy.shares_prefixes
    offload = pick_offload(kv, cache, folder) if shares else None
    pages = KvPages(pool, shares, offload, kv.states, copies, COPY_STATES_EVERY)
    longest = min(settings.model.max_context_tokens or model.shape.max_positions, model.shape.max_positions)
    max_context = min(longest, (pool.pages - 1) * page_size)
    attention = [(layer, each) for layer, each in enumerate(model.shape.layer_heads) if each is not None]
    kinds = [(kv.store_of_layer(layer)[0], each.heads // each.kv_heads) for layer, each in attention]
    backends = pick_paths(list(dict.fromkeys(kinds)), kernels, model.has_sinks)
    graphs, why_not_graphs = _graphs(model, kv, backends, settings, -(-longest // page_size))
    reasons = {**backends.why_not, "lora": why_not_lora, "layers": why_not_layers, "graphs": why_not_graphs}
    reasons["states"] = why_not_steps
    if kv.states is not None:
        reasons |= dict.fromkeys(("pruning", "drafts"), KEEPS_STATES)
    window, pruner = model.shape.window, None
    if settings.cache.pruning != "off" and policy.prunes and kv.states is None:
        if window is not None and window < max_context:
            message = "K/V is not pruned: layers attend to the latest %d tokens, contexts have up to %d"
            log.info(message, window, max_context)
        elif len(kv.stores) > 1:
            log.info("K/V is not pruned: layers have heads of unlike shapes")
        else:
            pruner = Pruner(settings.cache, kv.stores[0], pages)
    why_not = {part: reason for part, reason in reasons.items() if reason}
    return ModelRunner(model, kv, pages, backends, max_context, threads, graphs, pruner, why_not)


def _shorten(model: ServedModel, kernels: Kernels, page_size: int) -> str:
    """Let few rows pass layers in fewer steps than the model's own, where that is set; return why not all do, or ""."""
    if model.device.type != "cuda":
        return shorten_layers(model) if kernels.cpu_kernels else ""
    if not kernels.fused_layers:
        return ""
    if kernels.decode_attention not in ("auto", "triton"):
        return f'decode_attention = "{kernels.decode_attention}"'
    if reason := triton_device.why_not(model.device, model.dtype):
        return reason
    from edged.engine.model.gpu_layers import fuse_layers  # brings Triton, which is slow to import

    reason = fuse_layers(model, page_size)
    # The memory of weights that were merged is free for K/V.
    torch.cuda.empty_cache()
    return reason


def _step_in_slots(model: ServedModel, kernels: Kernels) -> str:
    """Let decodes change states in their slots, where that is set; return why not all do, or ""."""
    cuda = model.device.type == "cuda"
    if not model.states or not (kernels.fused_layers if cuda else kernels.cpu_kernels):
        return ""
    if reason := (triton_device if cuda else library).why_not(model.device, model.dtype):
        return reason
    if not cuda:
        return step_in_slots(model, NATIVE)
    from edged.engine.model.triton_states import TRITON  # brings Triton, which is slow to import

    return step_in_slots(model, TRITON)


def _graphs(
    model: ServedModel, kv: PagedKv, paths: Backends, settings: Settings, width: int
) -> tuple[DecodeGraphs | None, str]:
    """Capture decode iterations for sequences of up to `width` pages; or return None and the reason."""
    if model.device.type != "cuda":
        return None, f"there are no graphs on {model.device.type}"
    used = {"decode": paths.decode, "lora": model.lora.runs.kernel}
    torchs_own = [part for part, kernel in used.items() if kernel != "triton"]
    if not settings.model.graph_memory_mb:
        why_not = "model.graph_memory_mb = 0"
    elif torchs_own:
        why_not = f"{' and '.join(torchs_own)} must be computed by triton"
    else:
        from edged.engine.cuda_graphs import CudaGraphRecorder, DecodeGraphs

        recorder = CudaGraphRecorder(model.device, settings.model.graph_memory_mb << 20)
        return DecodeGraphs(model, kv, paths, recorder, settings.serving.max_sequences, width), ""
    log.info("decode iterations are not captured: %s", why_not)
    return None, why_not


def lora_spec(
    shapes: dict[str, tuple[int, int]],
    base_model: str,
    base_source: str,
    fingerprint: str,
    align: AlignSettings,
    row_norms: RowNorms | None = None,
    dtype: torch.dtype = torch.float32,
    wrapper: str = "",
) -> LoraSpec:
    """Return the LoRA configuration of a base model's adapters; `shapes` are (in, out) of its target linears."""
    all_linear = align.target_modules == "all-linear"
    return LoraSpec(
        shapes=shapes,
        rank=align.rank,
        alpha=align.alpha,
        base_model=base_model,
        fingerprint=fingerprint,
        peft_targets=tuple(sorted({key.rsplit(".", 1)[-1] for key in shapes} if all_linear else shapes)),
        base_source=base_source,
        row_norms=row_norms,
        dtype=dtype,
        wrapper=wrapper,
    )


# -- the first prices --------------------------------------------------------------------------------------------------


def subject_of(model: ServedModel, name: str, settings: ModelSettings, threads: CpuThreads | None) -> Subject:
    """Return the model, device and numerics that run here: only a profile of the same subject is used."""
    stored = getattr(model.model.config, "quantization_config", None)
    method = stored.get("quant_method") if isinstance(stored, dict) else getattr(stored, "quant_method", "")
    quantization = settings.quantize or str(getattr(method, "value", method) or "")
    return Subject(
        model=name,
        fingerprint=model.fingerprint,
        device=_device_name(model.device),
        dtype=str(model.dtype).removeprefix("torch."),
        quantization=quantization,
        threads=threads.most if threads is not None else 0,
    )


def _device_name(device: torch.device) -> str:
    """Return the GPU's name, or the processor's and how many of its cores this process may use."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "Model")))
    processor = next(names, "") or platform.processor() or platform.machine()
    return f"{processor} {len(os.sched_getaffinity(0))} cores"


def guess_of(model: ServedModel) -> Prices:
    """Return the prices that a roofline of the model on its device gives."""
    operations, bandwidth = _CPU_RATES if model.device.type == "cpu" else _cuda_rates(model.device, model.dtype)
    shape = model.shape
    prices = roofline(shape.parameters, operations, bandwidth, shape.layers, model.dtype.itemsize)
    # The compiled kernels end at a number of tokens, where a step costs more at once. Where they are not used it does
    # not, and that price is learned to be small.
    return replace(prices, knee_tokens=FEW_ROWS) if model.device.type == "cpu" and kernels() else prices


def _cuda_rates(device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """Estimate operations and bytes per second from the clocks (kHz) and bus width (bits) that the driver reports."""
    properties = torch.cuda.get_device_properties(device)
    clock_khz, memory_khz = getattr(properties, "clock_rate", 0), getattr(properties, "memory_clock_rate", 0)
    width_bits = getattr(properties, "memory_bus_width", 0)
    per_cycle = _PLAIN_OPERATIONS
    if dtype.itemsize <= 2:
        known = _TENSOR_OPERATIONS.get(properties.major, _PLAIN_OPERATIONS)
        per_cycle = _CONSUMER_OPERATIONS.get((properties.major, properties.minor), known)
    operations = properties.multi_processor_count * clock_khz * 1e3 * per_cycle * _REACHED_OPERATIONS
    # Two transfers a cycle.
    bandwidth = 2 * memory_khz * 1e3 * width_bits / 8 * _REACHED_BYTES
    return operations or _UNKNOWN_CUDA_RATES[0], bandwidth or _UNKNOWN_CUDA_RATES[1]


def first_cost_model(model: ServedModel, subject: Subject, setting: str, data_dir: Path | None) -> CostModel:
    """Make the cost model from the profile that `setting` names or the data folder has for `subject`, else a roofline.

    A profile of something else, or one that cannot be read, is refused with one line in the log.
    """
    guess = guess_of(model)
    try:
        found = find_profile(setting, data_dir, subject)
    except ProfileError as error:
        log.warning("%s; latencies are guessed and learned (edged profile measures them)", error)
        found = None
    if found is None:
        return CostModel(guess)
    path, profile = found
    log.info("latencies come from the profile %s of %s", path, profile.created_at)
    return CostModel.from_profile(profile, guess, str(path))


def bounded(settings: Settings, model: ServedModel) -> Settings:
    """Return settings whose numbers of adapters fit the memory that is free beside the loaded base."""
    align = settings.align
    weights = adapter_weights(linear_sizes(model.model, model.targets(align)), align.rank)
    loaded, active = adapters_that_fit(weights, settings, model.dtype, free_bytes(model.device)[0])
    if loaded < align.max_loaded_adapters or active < align.max_active_adapters:
        log.info("memory holds %d adapters of %d MiB at once", loaded, weights * STATE_BYTES >> 20)
    update = {"max_loaded_adapters": loaded, "max_active_adapters": active}
    return settings.model_copy(update={"align": align.model_copy(update=update)})


def page_count(model: ServedModel, settings: Settings) -> tuple[int, int]:
    """Return the pages of the pool, from `cache.memory_mb` or free memory, and the copies of states that fit beside.

    Pages are never more than max_sequences can use.

    Raises ModelRefused, with the arithmetic, when not even a short sequence fits, or the context that was asked for.
    """
    size = settings.cache.page_size
    page_bytes, loaded = model.page_bytes(size), settings.align.max_loaded_adapters
    wanted = settings.model.max_context_tokens or model.shape.max_positions
    useful = settings.serving.max_sequences * -(-wanted // size) + 1
    if settings.cache.memory_mb:
        budget = settings.cache.memory_mb << 20
    else:
        free, share = free_bytes(model.device)
        cuda = model.device.type == "cuda"
        work = work_of(model.shape, settings, model.dtype, loaded, int(free * share), model.quantized, cuda)
        budget = int((free - sum(work.values())) * share)
    budget, copies = beside_states(model.shape, settings, model.dtype, loaded, page_bytes, budget)
    pages = min(useful, budget // page_bytes)
    if pages < FEWEST_PAGES:
        room = f"{max(pages, 0)} pages of {page_bytes} bytes ({size} tokens each) in {max(budget, 0) >> 20} MiB"
        raise ModelRefused(f"the K/V cache has room for {room}: raise cache.memory_mb or free memory")
    refuse_longer_context(settings, model.shape.max_positions, page_bytes, pages, budget)
    return pages, copies
