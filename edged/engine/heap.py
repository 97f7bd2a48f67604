"""The C heap of this process: whether freed memory is kept for the next iteration, and when it is given back.

Owns that choice on the CPU, where every large tensor is otherwise mapped, faulted in and unmapped again in each
iteration. Must be imported before numpy and torch, and imports neither: the first threads fix the number of heaps.
"""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_LARGEST_FROM_HEAP = 32 << 20
"""glibc's own upper bound of the threshold above which an allocation is mapped by itself."""


def _libc() -> ctypes.CDLL | None:
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "mallopt") else None


def keep_freed_memory() -> bool:
    """From now on freed memory stays with the process; False where the C library is not glibc.

    To be called before the first thread starts. `give_back` returns what is free to the system.
    """
    libc = _libc()
    if libc is None:
        return False
    wanted = ((_M_ARENA_MAX, 1), (_M_MMAP_THRESHOLD, _LARGEST_FROM_HEAP), (_M_TRIM_THRESHOLD, 2**31 - 1))
    return all([libc.mallopt(option, value) == 1 for option, value in wanted])


def give_back() -> None:
    """Return free heap memory to the system; the next iterations fault it in again."""
    libc = _libc()
    if libc is not None and hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
