"""The process's memory and threads on the CPU, which other processes want as well.

`prepare` must run before numpy and torch are imported, and imports neither: the first threads fix both.
"""

import ctypes
import gc
import logging
import os
import resource
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_LARGEST_FROM_HEAP = 32 << 20
"""Upper bound, in glibc, of the threshold above which an allocation is mapped by itself."""
_LARGEST_FROM_FRUGAL_HEAP = 64 << 10
_HUGE_PAGES = "glibc.malloc.hugetlb=1"
"""glibc tunable for transparent huge pages wherever the heap grows."""

_keeps_freed_memory = False
"""Whether `prepare` has turned trimming of the heap off."""


def prepare() -> None:
    """Have OpenMP threads wait briefly between operations, and keep freed memory for the next iteration.

    A thread that waits awake for a tenth of a millisecond is there for the next operation of an iteration; asleep it
    comes 20 to 100 us late. OpenMP's own 3 ms would take the cores that other programs, or the threads waited for,
    need. Kept memory saves mapping and faulting in every large tensor anew; `give_back_memory` returns it when there
    is nothing to do.
    """
    global _keeps_freed_memory
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    quiet()
    _keeps_freed_memory = True
    _set_malloc(_M_ARENA_MAX, 1)
    _set_malloc(_M_MMAP_THRESHOLD, _LARGEST_FROM_HEAP)
    _set_malloc(_M_TRIM_THRESHOLD, 2**31 - 1)


def restart_in_huge_pages() -> None:
    """Start this program again with the C heap in huge pages, unless it has them or cannot have them.

    A decode step reads every weight once; with 4 KiB pages the processor looks up the place of each anew. glibc is told
    by the environment that a program starts with, and only there. Nothing may be open or running yet.
    """
    tunables, choice = os.environ.get("GLIBC_TUNABLES", ""), Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if _HUGE_PAGES.partition("=")[0] in tunables or _glibc() is None:
        return
    if "[madvise]" in (choice.read_text() if choice.is_file() else ""):
        os.environ["GLIBC_TUNABLES"] = ":".join(filter(None, (tunables, _HUGE_PAGES)))
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def in_huge_pages() -> bool:
    """Whether this program was started with the C heap in huge pages."""
    return _HUGE_PAGES in os.environ.get("GLIBC_TUNABLES", "")


def quiet() -> None:
    """Keep quantization packages from warning about each product (a cast of its input), each kernel that this machine
    has no use for, and each of their classes that torch knows by now."""
    for name in ("bitsandbytes", "torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)


@contextmanager
def frugal() -> Iterator[None]:
    """Return freed memory to the system at once within the context, and collect cycles of garbage soon.

    Quantizing a weight takes many times its packed size for a moment. Left to the heap, packed weights come to lie
    between such holes, and quantized parameters hold the plain ones in cycles: three times the weights at the peak.
    """
    thresholds = gc.get_threshold()
    _set_malloc(_M_MMAP_THRESHOLD, _LARGEST_FROM_FRUGAL_HEAP)
    # Objects that exist already are not searched again and again.
    if ours := not gc.get_freeze_count():
        gc.freeze()
    gc.set_threshold(100, 2, 2)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        # Before the others are thawed: to search all that was imported takes longer than to load a small model.
        gc.collect()
        if ours:
            gc.unfreeze()
        # Where glibc's own moving thresholds end up; setting one of them has stopped both.
        _set_malloc(_M_MMAP_THRESHOLD, _LARGEST_FROM_HEAP)
        if not _keeps_freed_memory:
            _set_malloc(_M_TRIM_THRESHOLD, 2 * _LARGEST_FROM_HEAP)
        give_back_memory()


def allow_files(most: int = 65_536) -> None:
    """Raise the bound of open files to `most`, or to what this user may have: each connection is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = most if hard == resource.RLIM_INFINITY else min(most, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def give_back_memory() -> None:
    """Return free heap memory to the system; the next iterations fault it in again."""
    if libc := _glibc():
        libc.malloc_trim(0)


def heap_bytes() -> tuple[int, int] | None:
    """Return (in use, free within it) of the C heap, in bytes; None without glibc 2.33 or newer.

    Walks the list of free pieces: milliseconds for a heap in many of them.
    """
    libc = _glibc()
    if libc is None or not hasattr(libc, "mallinfo2"):
        return None
    libc.mallinfo2.restype = _HeapState
    state = libc.mallinfo2()
    return state.uordblks + state.hblkhd, state.fordblks


class _HeapState(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _names = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    _fields_ = [(name, ctypes.c_size_t) for name in _names]


def _set_malloc(option: int, value: int) -> None:
    if libc := _glibc():
        libc.mallopt(option, value)


def _glibc() -> ctypes.CDLL | None:
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "mallopt") else None


def in_thread(fn: Callable[[], T]) -> Future[T]:
    """Run `fn` on a thread of its own that does not keep the process alive."""
    done: Future[T] = Future()
    done.set_running_or_notify_cancel()

    def run() -> None:
        try:
            done.set_result(fn())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name="edged-once", daemon=True).start()
    return done
