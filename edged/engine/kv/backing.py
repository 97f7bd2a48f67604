"""What K/V tensors lie in: memory of which parts can be returned to the system while the tensor stays where it is.

An anonymous mapping on the CPU: what is given back reads as zeros, and comes back by itself when it is written. On an
integrated GPU, whose memory is the box's, pieces that are mapped one by one. Elsewhere torch's own memory: what a
discrete GPU gave back would be no neighbour's.
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
"""An address of the driver's choice, and no flags."""

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


class CudaMemoryError(RuntimeError):
    """The driver cannot map memory piece by piece here; the message has its reason."""


class _Properties(ctypes.Structure):
    """CUmemAllocationProp; its location is two integers, its flags are eight bytes."""

    _fields_ = (
        *((name, ctypes.c_int) for name in ("type", "handle_types", "location_type", "location_id")),
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = tuple((name, ctypes.c_int) for name in ("location_type", "location_id", "flags"))


class _Addresses:
    """What torch makes a tensor of bytes from."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 2}


class CudaMemory(Backing):
    """A tensor of zeros over pieces of the driver's granularity, usually 2 MiB, behind one range of addresses: pieces
    go back to the system while kernels keep their pointers.

    Captured graphs stay valid, for no address changes; who gives a piece back sees to it that nothing reads it.
    """

    gives_back = True

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        """Raises CudaMemoryError; then nothing is held."""
        self._device = device
        try:
            self._driver = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise CudaMemoryError(str(error)) from None
        # The context of this thread is torch's from here on.
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
        """See `Backing`: the pieces that lie in a range from end to end."""
        pieces = {
            piece for first, end in ranges for piece in range(-(-first // self._piece), end // self._piece)
        } & self._handles.keys()
        if pieces:
            # Kernels that were launched may still read beside what is given up.
            torch.cuda.synchronize(self._device)
            self._unmap(pieces)

    def take_back(self, ranges: Ranges) -> None:
        """See `Backing`: all pieces that a range touches; where memory is short, those that there was memory for."""
        wanted = {piece for first, end in ranges for piece in range(first // self._piece, -(-end // self._piece))}
        for piece in sorted(wanted - self._handles.keys()):
            self._map([piece])
            self._bytes[piece * self._piece : (piece + 1) * self._piece].zero_()

    def _try_out(self) -> None:
        """Give the last piece back and take it again: what works once is relied on."""
        last = (self._whole - self._piece, self._whole)
        self._bytes[last[0] : last[1]].fill_(1)
        self.give_back([last])
        self.take_back([last])
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
        """Call the driver. Raises MemoryError where it has no memory, CudaMemoryError for all else."""
        try:
            code = getattr(self._driver, name)(*arguments)
        except AttributeError:
            raise CudaMemoryError(f"the driver has no {name}") from None
        if code == _OUT_OF_MEMORY:
            raise MemoryError(f"{name}: the GPU finds no memory")
        if code:
            raise CudaMemoryError(f"{name} failed with error {code}")


def back(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Backing:
    """Zeros of this shape, in memory that can be given back where the device can do that."""
    if device.type == "cpu":
        return HostMemory(shape, dtype)
    if getattr(torch.cuda.get_device_properties(device), "is_integrated", False):
        try:
            return CudaMemory(shape, dtype, device)
        except CudaMemoryError as error:
            log.warning("K/V pages cannot be given back to the box: %s", error)
    return Backing(torch.zeros(shape, dtype=dtype, device=device))
