"""How many K/V pages fit: the arithmetic of free memory at start.

Owns the budget rule. Must not know who uses the pages.
"""

from __future__ import annotations

import psutil
import torch

from edged.config import Settings
from edged.engine.model import ModelRefused, ServedModel

_CPU_SHARE = 0.25
_CUDA_SHARE = 0.85
_UNIFIED_SHARE = 0.5


def free_bytes(device: torch.device) -> tuple[int, float]:
    """Free memory of the device and the share of it that the cache may take.

    On an integrated GPU memory is the box's own: MemAvailable counts what cudaMemGetInfo does not (page cache).
    """
    available = int(psutil.virtual_memory().available)
    if device.type != "cuda":
        return available, _CPU_SHARE
    if getattr(torch.cuda.get_device_properties(device), "is_integrated", False):
        return available, _UNIFIED_SHARE
    return int(torch.cuda.mem_get_info(device)[0]), _CUDA_SHARE


def finetune_bytes(model: ServedModel, settings: Settings) -> int:
    """What one fine-tune step keeps beside pages: the layers' inputs of a group, and one layer's graph."""
    rows = max(2 * settings.align.window_tokens, 2 * settings.align.max_pair_tokens)
    return (model.shape.layers + 16) * rows * model.shape.hidden_size * model.dtype.itemsize


def graph_bytes(model: ServedModel, settings: Settings) -> int:
    """About what a window's kept graph takes: each linear's input and output, and as much again between them."""
    matrices = (p.shape for layer in model.layers for p in layer.parameters() if p.dim() == 2)
    width = 2 * sum(rows + columns for rows, columns in matrices)
    return settings.align.window_tokens * width * model.dtype.itemsize


def page_count(model: ServedModel, settings: Settings) -> int:
    """Pages of the pool: from `cache.memory_mb`, or from free memory, never more than max_sequences can use.

    Raises ModelRefused, with the arithmetic, when not even a short sequence fits.
    """
    size = settings.cache.page_size
    page_bytes = model.page_bytes(size)
    wanted = settings.model.max_context_tokens or model.shape.max_positions
    useful = settings.serving.max_sequences * -(-wanted // size) + 1
    if settings.cache.memory_mb:
        budget = settings.cache.memory_mb << 20
    else:
        free, share = free_bytes(model.device)
        budget = int((free - finetune_bytes(model, settings)) * share)
    pages = min(useful, budget // page_bytes)
    if pages < 4:
        raise ModelRefused(
            f"the K/V cache has room for {max(pages, 0)} pages of {page_bytes} bytes ({size} tokens each) in "
            f"{max(budget, 0) >> 20} MiB: raise cache.memory_mb or free memory"
        )
    return pages
