"""The memory behind K/V tensors: parts of it can be returned to the system while the tensor keeps its address.

On the CPU it is an anonymous mapping: returned parts read as zeros, and come back by themselves when they are written.
On an integrated GPU, whose memory is the box's, it is pieces that are mapped one by one. Elsewhere it is torch's own
memory: no other program could use what a discrete GPU returned.
"""

import ctypes
import logging
import math
import mmap
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from edged.runtime.process import in_huge_pages

log = logging.getLogger("edged.engine")
_OUT_OF_MEMORY = 2
_PINNED, _ON_DEVICE, _READ_WRITE = 1, 1, 3
_ZEROS = (ctypes.c_uint64(0), ctypes.c_uint64(0))
"""Arguments of the driver: an address of its choice, and no flags."""

Ranges = Sequence[tuple[int, int]]
"""Parts of a tensor's memory: (first byte, end) of each."""


class Backing:
    """A tensor, zeros at first, and the memory behind it; here torch's, of which no part can be returned."""

    gives_back = False

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def give_back(self, ranges: Ranges) -> None:
        """Return these parts to the system, as far as their pages hold nothing else; their content is lost."""

    def reclaim(self, ranges: Ranges) -> None:
        """Make all of these parts usable again, zeros where they were given back. Raises MemoryError."""


class HostMemory(Backing):
    """An anonymous mapping, which becomes resident page by page when it is written, also after `give_back`."""

    gives_back = True

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        size = math.prod(shape) * dtype.itemsize
        self._map = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if in_huge_pages():
            self._map.madvise(mmap.MADV_HUGEPAGE)
        super().__init__(torch.frombuffer(self._map, dtype=dtype).view(shape))

    def give_back(self, ranges: Ranges) -> None:
        """See `Backing`; only whole pages of the system are returned."""
        for first, end in ranges:
            start = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE
            length = end // mmap.PAGESIZE * mmap.PAGESIZE - start
            if length > 0:
                self._map.madvise(mmap.MADV_DONTNEED, start, length)


class CudaMemoryError(RuntimeError):
    """The driver cannot map memory piece by piece here; the message has its reason."""


class _Properties(ctypes.Structure):
    """The driver's CUmemAllocationProp; its location is two integers, its flags are eight bytes."""

    _fields_ = (
        *((name, ctypes.c_int) for name in ("type", "handle_types", "location_type", "location_id")),
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
    )


class _Access(ctypes.Structure):
    """The driver's CUmemAccessDesc."""

    _fields_ = tuple((name, ctypes.c_int) for name in ("location_type", "location_id", "flags"))


class _Addresses:
    """A range of device addresses that torch can make a tensor of bytes from."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 2}


class CudaMemory(Backing):
    """A tensor of zeros over pieces of the driver's granularity, usually 2 MiB, behind one range of addresses: pieces
    go back to the system while kernels keep their pointers.

    Captured graphs stay valid, for no address changes; the caller of `give_back` makes sure that nothing reads it.
    """

    gives_back = True

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        """Reserve, map and try out the memory. Raises CudaMemoryError or MemoryError, and then holds nothing."""
        self._device = device
        try:
            self._driver = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise CudaMemoryError(str(error)) from None
        # This makes torch's CUDA context the current one of this thread.
        torch.cuda.synchronize(device)
        index = device.index or 0
        self._properties = _Properties(type=_PINNED, location_type=_ON_DEVICE, location_id=index)
        self._access = _Access(_ON_DEVICE, index, _READ_WRITE)
        piece = ctypes.c_size_t()
        self._call("cuMemGetAllocationGranularity", ctypes.byref(piece), ctypes.byref(self._properties), 0)
        self._piece = piece.value
        size = math.prod(shape) * dtype.itemsize
        pieces = -(-size // self._piece)
        self._whole = pieces * self._piece
        address = ctypes.c_uint64()
        self._call("cuMemAddressReserve", ctypes.byref(address), *map(ctypes.c_size_t, (self._whole, 0)), *_ZEROS)
        self._address = address.value
        self._handles: dict[int, int] = {}
        try:
            self._map(range(pieces))
            self._bytes = torch.as_tensor(_Addresses(self._address, self._whole), device=device)
            self._bytes.zero_()
            self._try_out()
        except Exception as error:
            self._unmap(list(self._handles))
            self._driver.cuMemAddressFree(ctypes.c_uint64(self._address), ctypes.c_size_t(self._whole))
            raise CudaMemoryError(str(error)) from error
        self.tensor = self._bytes[:size].view(dtype).view(shape)

    def give_back(self, ranges: Ranges) -> None:
        """See `Backing`; only pieces that lie entirely in a range are returned."""
        pieces = {
            piece for first, end in ranges for piece in range(-(-first // self._piece), end // self._piece)
        } & self._handles.keys()
        if pieces:
            # Kernels that were launched may still read these pieces.
            torch.cuda.synchronize(self._device)
            self._unmap(pieces)

    def reclaim(self, ranges: Ranges) -> None:
        """See `Backing`: map all pieces that a range touches; on MemoryError those mapped before it stay."""
        wanted = {piece for first, end in ranges for piece in range(first // self._piece, -(-end // self._piece))}
        for piece in sorted(wanted - self._handles.keys()):
            self._map([piece])
            self._bytes[piece * self._piece : (piece + 1) * self._piece].zero_()

    def _try_out(self) -> None:
        """Give the last piece back and take it again, to see once that the driver can."""
        last = (self._whole - self._piece, self._whole)
        self._bytes[last[0] : last[1]].fill_(1)
        self.give_back([last])
        self.reclaim([last])
        if bool(self._bytes[last[0] : last[1]].any()):
            raise CudaMemoryError("memory that was given back and taken again is not zero")

    def _map(self, pieces: Iterable[int]) -> None:
        for piece in pieces:
            handle, address = ctypes.c_uint64(), ctypes.c_uint64(self._address + piece * self._piece)
            size = ctypes.c_size_t(self._piece)
            with ExitStack() as undo:
                self._call("cuMemCreate", ctypes.byref(handle), size, ctypes.byref(self._properties), _ZEROS[0])
                undo.callback(self._driver.cuMemRelease, handle)
                self._call("cuMemMap", address, size, ctypes.c_size_t(0), handle, _ZEROS[0])
                undo.callback(self._driver.cuMemUnmap, address, size)
                self._call("cuMemSetAccess", address, size, ctypes.byref(self._access), ctypes.c_size_t(1))
                undo.pop_all()
            self._handles[piece] = handle.value

    def _unmap(self, pieces: Iterable[int]) -> None:
        for piece in pieces:
            address = ctypes.c_uint64(self._address + piece * self._piece)
            self._call("cuMemUnmap", address, ctypes.c_size_t(self._piece))
            self._call("cuMemRelease", ctypes.c_uint64(self._handles.pop(piece)))

    def _call(self, name: str, *arguments: Any) -> None:
        """Call the driver. Raises MemoryError if it has no memory, CudaMemoryError for all other failures."""
        try:
            code = getattr(self._driver, name)(*arguments)
        except AttributeError:
            raise CudaMemoryError(f"the driver has no {name}") from None
        if code == _OUT_OF_MEMORY:
            raise MemoryError(f"{name}: the GPU finds no memory")
        if code:
            raise CudaMemoryError(f"{name} failed with error {code}")


def back(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Backing:
    """Return zeros of this shape, in memory that can be given back if the device supports that."""
    if device.type == "cpu":
        return HostMemory(shape, dtype)
    if getattr(torch.cuda.get_device_properties(device), "is_integrated", False):
        try:
            return CudaMemory(shape, dtype, device)
        except (CudaMemoryError, MemoryError) as error:
            log.warning("K/V pages cannot be given back to the box: %s", error)
    return Backing(torch.zeros(shape, dtype=dtype, device=device))
