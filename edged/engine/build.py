"""Builds the runner of an engine's model from its settings, with the sizes that follow from free memory."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from edged.align.adapters.adapter import LoraSpec
from edged.cache.page_pool import PagePool
from edged.engine.attention.selection import Backends, pick_lora_kernel, pick_paths
from edged.engine.kv.offload import pick_spill
from edged.engine.kv.store import KvStore
from edged.engine.kv_pages import KvPages
from edged.engine.model.cpu_layers import shorten_layers
from edged.engine.model.memory_plan import page_count
from edged.engine.model.served_model import ServedModel
from edged.engine.model_runner import ModelRunner
from edged.engine.pruner import Pruner
from edged.scheduler.policies.registry import ROWS
from edged.settings.load import AlignSettings, Settings
from edged.tensors.cpu_threads import CpuThreads

if TYPE_CHECKING:
    from edged.engine.cuda_graphs import DecodeGraphs

log = logging.getLogger("edged.engine")


def build_runner(model: ServedModel, settings: Settings, folder: Path) -> ModelRunner:
    """The runner of a loaded model, as settings, policy and device have it; `folder` is for evicted prefixes.

    Raises ModelRefused with the reason.
    """
    if model.device.type == "cuda":
        # Triton launches on the thread's current device, whatever its tensors say.
        torch.cuda.set_device(model.device)
    threads = CpuThreads(settings.model.threads, model.shape.parameters) if model.device.type == "cpu" else None
    if model.trainable_error:
        log.warning("%s", model.trainable_error)
    model.attach_lora(settings.align, settings.align.max_active_adapters)
    native = settings.model.short_layers
    if settings.model.pack_weights and (reason := model.pack_weights(native, settings.model.narrow_weights)):
        log.info("weights are not packed: %s", reason)
    if native and (reason := shorten_layers(model)):
        log.info("layers are computed as the model has them: %s", reason)
    page_size, policy = settings.cache.page_size, ROWS[settings.scheduler.policy]
    pool = PagePool(page_count(model, settings), page_size)
    kv = model.new_kv(pool.pages, page_size)
    # Page tables are padded with page 0: no sequence may own it.
    pool.allocate(1)
    shares = settings.cache.prefix_sharing and policy.shares_prefixes
    pages = KvPages(pool, shares, pick_spill(kv, settings.cache, folder) if shares else None)
    longest = min(settings.model.max_context_tokens or model.shape.max_positions, model.shape.max_positions)
    max_context = min(longest, (pool.pages - 1) * page_size)
    why_not_lora = pick_lora_kernel(model.lora, settings.model)
    backends = pick_paths(kv, settings.model, model.shape.heads // model.shape.kv_heads)
    graphs, why_not_graphs = _graphs(model, kv, backends, settings, -(-longest // page_size))
    reasons = {**backends.why_not, "lora": why_not_lora, "graphs": why_not_graphs}
    window, pruner = model.shape.window, None
    if settings.cache.pruning != "off" and policy.prunes:
        if window is not None and window < max_context:
            message = "K/V is not pruned: layers attend to the latest %d tokens, contexts have up to %d"
            log.info(message, window, max_context)
        else:
            pruner = Pruner(settings.cache, kv, pages)
    why_not = {part: reason for part, reason in reasons.items() if reason}
    return ModelRunner(model, kv, pages, backends, max_context, threads, graphs, pruner, why_not)


def _graphs(
    model: ServedModel, kv: KvStore, paths: Backends, settings: Settings, width: int
) -> tuple[DecodeGraphs | None, str]:
    """Captured decode iterations of sequences of up to `width` pages, or why there are none."""
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


def lora_spec(shapes: dict[str, tuple[int, int]], base_model: str, fingerprint: str, align: AlignSettings) -> LoraSpec:
    """What the adapters of a base model with these target linears look like."""
    all_linear = align.target_modules == "all-linear"
    return LoraSpec(
        shapes=shapes,
        rank=align.rank,
        alpha=align.alpha,
        base_model=base_model,
        fingerprint=fingerprint,
        peft_targets=tuple(sorted({key.rsplit(".", 1)[-1] for key in shapes} if all_linear else shapes)),
    )
