"""How many K/V pages and adapters fit: the arithmetic of free memory at start."""

from __future__ import annotations

import logging
import math
from dataclasses import fields

import psutil
import torch

from edged.engine.model.loading import ModelRefused
from edged.engine.model.memory_model import (
    STATE_BYTES,
    BaseShape,
    DecoderSizes,
    adapter_weights,
    adapters_that_fit,
    graph_bytes,
    linears_of,
    work_of,
)
from edged.engine.model.served_model import ServedModel
from edged.settings.load import Settings
from edged.tensors.device_copy import has_own_memory

log = logging.getLogger("edged.engine")
CACHE_SHARES = {"cpu": 0.25, "discrete": 0.85, "integrated": 0.5}
"""Shares of the free memory that K/V pages may take, by whose it is: the box's, a GPU's own, or both at once."""


def total_bytes(device: torch.device) -> int:
    """All memory that the device's work can use; the box's where CUDA is asked for and not there."""
    if device.type == "cuda" and torch.cuda.is_available() and has_own_memory(device):
        return int(torch.cuda.mem_get_info(device)[1])
    return int(psutil.virtual_memory().total)


def free_bytes(device: torch.device) -> tuple[int, float]:
    """Free memory of the device and the share of it that the cache may take.

    On an integrated GPU memory is the box's own: MemAvailable counts what cudaMemGetInfo does not (page cache).
    """
    available = int(psutil.virtual_memory().available)
    if has_own_memory(device):
        return int(torch.cuda.mem_get_info(device)[0]), CACHE_SHARES["discrete"]
    return available, CACHE_SHARES["integrated" if device.type == "cuda" else "cpu"]


def unused_bytes(device: torch.device) -> int:
    """What torch's allocator keeps of a GPU's own memory and nobody uses; `free_bytes` does not count it."""
    if not has_own_memory(device):
        return 0
    return torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def shape_of(model: ServedModel) -> BaseShape:
    """The sizes of a loaded model."""
    linears = linears_of(model.model, model.head)
    return BaseShape(
        **{field.name: getattr(model.shape, field.name) for field in fields(DecoderSizes)},
        linears=linears,
        targets=tuple((linear.in_features, linear.out_features) for linear in model.lora.linears.values()),
        plain_weights=model.shape.parameters - sum(map(math.prod, linears)),
    )


def kept_graph_bytes(model: ServedModel, settings: Settings) -> int:
    """About what a step takes that keeps its graph."""
    return graph_bytes(shape_of(model).linears, settings, model.dtype)


def bounded(settings: Settings, model: ServedModel) -> Settings:
    """Settings whose numbers of adapters fit the memory that is free beside the loaded base."""
    align = settings.align
    targets = [model.model.get_submodule(name) for name in model.targets(align)]
    weights = adapter_weights(tuple((linear.in_features, linear.out_features) for linear in targets), align.rank)
    loaded, active = adapters_that_fit(weights, settings, model.dtype, free_bytes(model.device)[0])
    if loaded < align.max_loaded_adapters or active < align.max_active_adapters:
        log.info("memory holds %d adapters of %d MiB at once", loaded, weights * STATE_BYTES >> 20)
    update = {"max_loaded_adapters": loaded, "max_active_adapters": active}
    return settings.model_copy(update={"align": align.model_copy(update=update)})


def page_count(model: ServedModel, settings: Settings) -> int:
    """Pages of the pool: from `cache.memory_mb`, or from free memory, never more than max_sequences can use.

    Raises ModelRefused, with the arithmetic, when not even a short sequence fits, or the context that was asked for.
    """
    size = settings.cache.page_size
    page_bytes = model.page_bytes(size)
    wanted = settings.model.max_context_tokens or model.shape.max_positions
    useful = settings.serving.max_sequences * -(-wanted // size) + 1
    if settings.cache.memory_mb:
        budget = settings.cache.memory_mb << 20
    else:
        free, share = free_bytes(model.device)
        loaded, cuda = settings.align.max_loaded_adapters, model.device.type == "cuda"
        work = work_of(shape_of(model), settings, model.dtype, loaded, int(free * share), model.quantized, cuda)
        budget = int((free - sum(work.values())) * share)
    pages = min(useful, budget // page_bytes)
    if pages < 4:
        raise ModelRefused(
            f"the K/V cache has room for {max(pages, 0)} pages of {page_bytes} bytes ({size} tokens each) in "
            f"{max(budget, 0) >> 20} MiB: raise cache.memory_mb or free memory"
        )
    refuse_longer_context(settings, model.shape.max_positions, page_bytes, pages, budget)
    return pages


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
