"""The number of CPU threads of an operation, following the cores that other programs leave free.

Threads that synchronize after every operation are as slow as the one that waits for a core: with a busy neighbour
fewer threads are faster, and leave the neighbour more.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import psutil
import torch

_SMALL_PARAMETERS = 16_000_000
_EVERY_S, _OLD_S = 0.2, 1.0
"""Interval of the readings; an older reading than the second says nothing about now."""
_PART_OF_A_CORE = 0.5
"""Share of a core that must be free for another thread."""


T = TypeVar("T")
Usage = Callable[[], tuple[float, float]]
"""Reader of the seconds that this process computed and that its cores were idle, since some moment of the past."""


class CpuThreads:
    """The engine thread's number of threads; `follow` keeps it in step with the cores that are free."""

    def __init__(self, setting: int, parameters: int, usage: Usage | None = None) -> None:
        """`setting` fixes the number; 0: one for models whose operations are shorter than a hand-over, else by load.

        `usage` reads the box (by default from the system).
        """
        cores = sorted(os.sched_getaffinity(0))
        self._usage = usage or (lambda: _used_and_idle_s(cores))
        self._follows = not setting and parameters >= _SMALL_PARAMETERS and len(cores) > 1
        self.most = setting or (len(cores) if self._follows else 1)
        """The largest number of threads."""
        self._read_s: float | None = None
        self._before = (0.0, 0.0)
        self.begin()

    def begin(self) -> None:
        """Let the calling thread compute; other threads that use torch must be `beside` it, or have ended."""
        torch.set_num_threads(self.most)

    def follow(self, now: float) -> None:
        """Adapt to what other programs use, at most five times a second; call it on the thread that computes."""
        if not self._follows or (self._read_s is not None and now - self._read_s < _EVERY_S):
            return
        used_s, idle_s = self._usage()
        if self._read_s is not None and now - self._read_s < _OLD_S:
            free = (used_s - self._before[0] + idle_s - self._before[1]) / (now - self._read_s)
            threads = max(1, min(self.most, int(free + 1.0 - _PART_OF_A_CORE)))
            if threads != torch.get_num_threads():
                torch.set_num_threads(threads)
        self._read_s, self._before = now, (used_s, idle_s)


def beside() -> None:
    """Let the calling thread, which uses torch beside the one that computes, work without helper threads.

    OpenMP counts the threads that it keeps for every thread that ever shared an operation. With more of them than cores
    none waits actively between operations, and each operation costs the time of a wake-up.
    """
    torch.set_num_threads(1)


def apart(work: Callable[[], T]) -> T:
    """Run `work` on a temporary thread, whose OpenMP threads end with it, and return its result."""
    with ThreadPoolExecutor(1, thread_name_prefix="edged-apart") as pool:
        return pool.submit(work).result()


def one_beside(name: str) -> ThreadPoolExecutor:
    """Return a pool of one thread `beside` the one that computes; it starts at once, so that nothing is set later."""
    pool = ThreadPoolExecutor(1, thread_name_prefix=name, initializer=beside)
    pool.submit(lambda: None).result()
    return pool


def _used_and_idle_s(cores: list[int]) -> tuple[float, float]:
    """Return the seconds that this process computed and that `cores` were idle, since some moment of the past."""
    times = os.times()
    by_core = psutil.cpu_times(percpu=True)
    idle_s = sum(by_core[core].idle + getattr(by_core[core], "iowait", 0.0) for core in cores if core < len(by_core))
    return times.user + times.system, idle_s
