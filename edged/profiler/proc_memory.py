"""Readings of this process's current and peak memory."""

import gc
from pathlib import Path

import torch

from edged.runtime.process import give_back_memory

_STATUS = Path("/proc/self/status")


def start_peak(device: torch.device) -> None:
    """Reset the peak."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, see proc(5)


def peak_bytes(device: torch.device) -> int:
    """Return the most memory in use since `start_peak`: CUDA's allocator on a GPU, else the process's resident set."""
    return int(torch.cuda.max_memory_allocated(device)) if device.type == "cuda" else _status_bytes("VmHWM")


def used_bytes(device: torch.device) -> int:
    """Return the memory in use now, after freeing what can be freed."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return int(torch.cuda.memory_allocated(device))
    give_back_memory()
    return _status_bytes("VmRSS")


def _status_bytes(key: str) -> int:
    for line in _STATUS.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0]) << 10
    raise RuntimeError(f"{_STATUS} has no {key}: memory can only be measured on Linux or CUDA")
