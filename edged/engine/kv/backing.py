"""What K/V tensors lie in: memory of which parts can be returned to the system while the tensor stays where it is.

An anonymous mapping on the CPU: what is given back reads as zeros, and comes back by itself when it is written. On an
integrated GPU, whose memory is the box's, pieces that are mapped one by one (`edged.engine.kv.cuda_vmm`). Elsewhere
torch's own memory: what a discrete GPU gave back would be no neighbour's.
"""

from __future__ import annotations

import logging
import math
import mmap
from collections.abc import Sequence

import torch

from edged.runtime.process import in_huge_pages

log = logging.getLogger("edged.engine")

Ranges = Sequence[tuple[int, int]]
"""(first byte, end) of some parts."""


class Backing:
    """A tensor of zeros at first, and the memory behind it: torch's, which gives no part back, unless a kind of memory
    says otherwise."""

    gives_back = False

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def give_back(self, ranges: Ranges) -> None:
        """Return as much of this memory as can be returned alone; what was in it is lost."""

    def take_back(self, ranges: Ranges) -> None:
        """Have all of this memory, zeros where it was given back. Raises MemoryError."""


class HostMemory(Backing):
    """An anonymous mapping: resident page by page as it is written, also what was given back."""

    gives_back = True

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        size = math.prod(shape) * dtype.itemsize
        self._map = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if in_huge_pages():
            self._map.madvise(mmap.MADV_HUGEPAGE)
        super().__init__(torch.frombuffer(self._map, dtype=dtype).view(shape))

    def give_back(self, ranges: Ranges) -> None:
        """See `Backing`: whole pages of the system's."""
        for first, end in ranges:
            start = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE
            length = end // mmap.PAGESIZE * mmap.PAGESIZE - start
            if length > 0:
                self._map.madvise(mmap.MADV_DONTNEED, start, length)


def back(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Backing:
    """Zeros of this shape, in memory that can be given back where the device can do that."""
    if device.type == "cpu":
        return HostMemory(shape, dtype)
    if getattr(torch.cuda.get_device_properties(device), "is_integrated", False):
        from edged.engine.kv.cuda_vmm import CudaMemory, CudaMemoryError

        try:
            return CudaMemory(shape, dtype, device)
        except CudaMemoryError as error:
            log.warning("K/V pages cannot be given back to the box: %s", error)
    return Backing(torch.zeros(shape, dtype=dtype, device=device))
