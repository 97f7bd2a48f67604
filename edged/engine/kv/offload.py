"""KV offload: copies of evicted prefix pages in pinned host memory or in a file.

On CUDA copies run on their own stream, after the work that was launched before and before the work that is launched
after `join`; the engine thread waits for none of them.
"""

import contextlib
import logging
import math
import os
import queue
import tempfile
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import psutil
import torch

from edged.engine.kv.store import PagedKv
from edged.settings.load import CacheSettings
from edged.tensors.device_copy import has_own_memory
from edged.tensors.oom import out_of_memory

log = logging.getLogger("edged.engine")
_HOST_SHARE = 0.25
"""Largest share of the box's free memory that pinned copies take."""
_BUFFER_BYTES = 64 << 20
"""Size of the write buffers together, in pages at least 4 and at most 64."""
_READ_BUFFERS = 8
_DISK_WAIT_S = 0.02
"""Longest time that one iteration waits for the disk, before the read that exceeds it."""

Slab = tuple[torch.Tensor, ...]
"""Keys and values of one page by store, each [layers, kv_heads, page_size, head_dim]."""


class _Copies:
    """Numbered places for copies of pages; the prefix trie holds their numbers as handles. Copies are ordered with the
    compute stream: on CUDA they run beside it, on the CPU at once."""

    kind = ""

    def __init__(self, kv: PagedKv, capacity: int) -> None:
        keys = kv.stores[0].keys
        self.capacity, self._kv, self._device, self._dtype = capacity, kv, keys.device, keys.dtype
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._behind = False
        self._free = list(range(capacity - 1, -1, -1))

    @property
    def full(self) -> bool:
        """Whether a handle must be dropped before the next page can be saved."""
        return not self._free

    def _copy(self, targets: Slab, sources: Slab) -> torch.cuda.Event | None:
        """Copy after all launched work; return the event of its end, None if it has ended. Raises MemoryError."""
        try:
            if self._stream is not None:
                self._stream.wait_stream(torch.cuda.current_stream(self._device))
                self._behind = True
            with torch.cuda.stream(self._stream):
                for target, source in zip(targets, sources, strict=True):
                    target.copy_(source, non_blocking=True)
            return None if self._stream is None else self._stream.record_event()
        except Exception as error:
            if out_of_memory(error):
                raise MemoryError from error
            raise

    def drop(self, handle: int) -> None:
        """Free the place of a copy."""
        self._free.append(handle)

    def close(self) -> None:
        """End copying and release what it needs."""

    def settle(self) -> None:
        """Order all work launched from now on after the copies, so that it may overwrite the copied pages."""
        if self._stream is not None and self._behind:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
            self._behind = False

    def join(self) -> None:
        """Begin an iteration: order the work that it launches after the copies that were made for it."""
        self.settle()

    def _slab(self, page: int) -> Slab:
        both = ((kv.kv_heads, part) for kv in self._kv.stores for part in (kv.keys, kv.values))
        return tuple(part.narrow(1, page * heads, heads) for heads, part in both)

    def _buffers(self, count: int) -> torch.Tensor:
        """Allocate host memory for `count` pages, each a row."""
        shape = (count, self._kv.page_bytes // self._dtype.itemsize)
        return torch.empty(shape, dtype=self._dtype, pin_memory=self._stream is not None)

    def _parts(self, buffer: torch.Tensor) -> Slab:
        """Return the slab that a row of `_buffers` holds."""
        shapes = [(kv.layers, kv.kv_heads, kv.page_size, kv.head_dim) for kv in self._kv.stores for _ in range(2)]
        parts = buffer.split([math.prod(shape) for shape in shapes])
        return tuple(part.view(shape) for part, shape in zip(parts, shapes, strict=True))


class HostOffload(_Copies):
    """KV offload to one buffer of host memory, which is pinned on CUDA and freed with this object.

    Copies are made in order: reusing a place disturbs no copy that is under way.
    """

    kind = "host"

    def __init__(self, kv: PagedKv, capacity: int) -> None:
        super().__init__(kv, capacity)
        self._copies = self._buffers(capacity)

    def save(self, page: int) -> int | None:
        """Copy a page and return its place; None if all are taken, or the copy finds no memory."""
        with contextlib.suppress(MemoryError):
            if not self.full:
                self._copy(self._parts(self._copies[self._free[-1]]), self._slab(page))
                return self._free.pop()
        return None

    def load(self, handle: int, page: int) -> bool:
        """Copy back into a page; return False if the copy finds no memory."""
        with contextlib.suppress(MemoryError):
            self._copy(self._slab(page), self._parts(self._copies[handle]))
            return True
        return False


class DiskOffload(_Copies):
    """KV offload to an unlinked file, which vanishes with the process however that ends.

    A thread writes, in order. The engine thread reads, and waits for the disk at most `wait_s` an iteration: pages that
    would take longer are not saved, or not found.
    """

    kind = "disk"

    def __init__(self, kv: PagedKv, capacity: int, folder: Path, wait_s: float = _DISK_WAIT_S) -> None:
        super().__init__(kv, capacity)
        folder.mkdir(parents=True, exist_ok=True)
        self._file = tempfile.TemporaryFile(dir=folder, prefix="offload-", buffering=0)  # noqa: SIM115
        self._wait_s = self._left_s = wait_s
        reading = self._buffers(_READ_BUFFERS)
        self._bytes = reading[0].nbytes
        self._reading: deque[tuple[torch.Tensor, torch.cuda.Event | None]] = deque((part, None) for part in reading)
        self._idle: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
        for part in self._buffers(min(64, max(4, _BUFFER_BYTES // self._bytes))):
            self._idle.put(part)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="edged-offload")
        self._written: dict[int, Future[None]] = {}
        self._failed = False

    def join(self) -> None:
        """See `_Copies`; each iteration has its own time for the disk."""
        super().join()
        self._left_s = self._wait_s

    def save(self, page: int) -> int | None:
        """Start to write a page and return its place; None if all are taken, or the disk is too slow, or failed."""
        if self.full or self._failed:
            return None
        started = time.perf_counter()
        try:
            buffer = self._idle.get(timeout=max(0.0, self._left_s))
        except queue.Empty:
            return None
        finally:
            self._left_s -= time.perf_counter() - started
        try:
            copied = self._copy(self._parts(buffer), self._slab(page))
        except MemoryError:
            self._idle.put(buffer)
            return None
        handle = self._free.pop()
        self._written[handle] = self._writer.submit(self._write, handle, buffer, copied)
        return handle

    def load(self, handle: int, page: int) -> bool:
        """Read back into a page; return False if this iteration has waited long enough, or the copy is lost."""
        if self._left_s <= 0.0:
            return False
        started = time.perf_counter()
        try:
            self._written[handle].result(timeout=self._left_s)
            return self._read(handle, page)
        except (OSError, TimeoutError, MemoryError):
            return False
        finally:
            self._left_s -= time.perf_counter() - started

    def drop(self, handle: int) -> None:
        """See `_Copies`; pages are written in order, so the latest page of a place wins."""
        self._written.pop(handle)
        super().drop(handle)

    def close(self) -> None:
        """End the writing and close the file, which deletes it."""
        self._writer.shutdown(cancel_futures=True)
        self._file.close()

    def _read(self, handle: int, page: int) -> bool:
        buffer, copied = self._reading[0]
        if copied is not None:
            copied.synchronize()
        if os.preadv(self._file.fileno(), [_bytes(buffer)], handle * self._bytes) < self._bytes:
            return False
        self._reading[0] = (buffer, self._copy(self._slab(page), self._parts(buffer)))
        self._reading.rotate(-1)
        return True

    def _write(self, handle: int, buffer: torch.Tensor, copied: torch.cuda.Event | None) -> None:
        try:
            if copied is not None:
                copied.synchronize()
            written = os.pwrite(self._file.fileno(), _bytes(buffer), handle * self._bytes)
            if written < self._bytes:
                raise OSError(f"{written} of {self._bytes} bytes were written")
        except OSError as error:
            if not self._failed:
                log.warning("cached prefixes are not offloaded to disk any more: %s", error)
            self._failed = True
            raise
        finally:
            self._idle.put(buffer)


KvOffload = HostOffload | DiskOffload


def pick_offload(kv: PagedKv, settings: CacheSettings, folder: Path) -> KvOffload | None:
    """Return the offload of evicted pages by `cache.offload`, or None if they are dropped.

    "auto": a discrete GPU offloads to host memory. Other devices share the box's memory, and would win nothing.
    """
    device = kv.stores[0].keys.device
    kind = settings.offload
    if kind == "auto":
        kind = "host" if has_own_memory(device) else "off"
    if kind == "off":
        return None
    budget = settings.offload_mb << 20
    if kind == "host":
        budget = min(budget, int(psutil.virtual_memory().available * _HOST_SHARE))
        if device.type == "cuda":
            # Pinned memory comes in powers of two.
            budget = 1 << max(0, budget.bit_length() - 1)
    capacity = budget // kv.page_bytes
    if not capacity:
        log.warning("no page of %d bytes fits cache.offload_mb: evicted prefixes are dropped", kv.page_bytes)
        return None
    try:
        offload = HostOffload(kv, capacity) if kind == "host" else DiskOffload(kv, capacity, folder)
    except (OSError, RuntimeError) as error:
        log.warning("evicted prefixes are dropped, cache.offload %s is not possible: %s", kind, error)
        return None
    log.info("evicted prefixes go to %s: %d pages of %d bytes", kind, capacity, kv.page_bytes)
    return offload


def _bytes(buffer: torch.Tensor) -> memoryview:
    return buffer.view(-1).view(torch.uint8).numpy().data
