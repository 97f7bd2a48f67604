"""What the C heap does with freed memory once a model was loaded frugally, and what it tells of itself."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

from edged.runtime.process import _glibc, heap_bytes

FAULTS = """
import ctypes, resource
from edged.runtime.process import frugal
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
with frugal():
    pass
before = 0
for turn in range(20):
    if turn == 2:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = libc.malloc(8 << 20)
    ctypes.memset(block, 1, 8 << 20)
    libc.free(block)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(_glibc() is None, reason="another C library")
def test_after_frugal_loading_the_heap_keeps_an_iterations_tensors() -> None:
    done = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True)
    # A page fault for each 4 KiB of each of 18 blocks would be 36,864.
    assert int(done.stdout) < 2048


@pytest.mark.skipif(heap_bytes() is None, reason="a C library without mallinfo2")
@pytest.mark.parametrize("size", [16 << 10, 64 << 20], ids=["of the heap", "mapped"])
def test_the_heap_tells_what_is_in_use(size: int) -> None:
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = (
        ctypes.c_void_p,
        [ctypes.c_size_t],
        [ctypes.c_void_p],
    )
    total = 64 << 20

    def in_use() -> int:
        state = heap_bytes()
        assert state is not None
        assert min(state) >= 0
        return state[0]

    before = in_use()
    blocks = [libc.malloc(size) for _ in range(total // size)]
    held = in_use() - before
    for block in blocks:
        libc.free(block)
    assert held == pytest.approx(total, rel=0.05)
    assert in_use() - before < 0.05 * total
