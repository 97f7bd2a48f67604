"""What the C heap does with freed memory once a model was loaded frugally."""

from __future__ import annotations

import subprocess
import sys

import pytest

from edged.engine.process import _glibc

FAULTS = """
import ctypes, resource
from edged.engine.process import frugal, prepare
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
prepare(keep_freed_memory=False)
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
