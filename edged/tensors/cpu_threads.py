"""How many CPU threads an operation is shared between, as far as other programs leave cores free.

Threads that meet after every operation are as slow as the one that waits for a core: with a busy neighbour fewer
threads are faster, and leave the neighbour more.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import psutil
import torch

_SMALL_PARAMETERS = 16_000_000
_EVERY_S, _OLD_S = 0.2, 1.0
"""How often to look; what was seen longer ago says nothing about now."""
_PART_OF_A_CORE = 0.5
"""How much of a core must be free for a thread of its own."""


T = TypeVar("T")
Usage = Callable[[], tuple[float, float]]
"""Seconds that this process computed, and that its cores did nothing, since some moment of the past."""


class CpuThreads:
    """The engine thread's number of threads; `follow` keeps it in step with the cores that are free."""

    def __init__(self, setting: int, parameters: int, usage: Usage | None = None) -> None:
        """`setting` fixes the number; 0: 1 for models whose operations are shorter than a hand-over, else what is free.

        `usage` reads the box (by default from the system).
        """
        cores = sorted(os.sched_getaffinity(0))
        self._usage = usage or (lambda: _used_and_idle_s(cores))
        self._follows = not setting and parameters >= _SMALL_PARAMETERS and len(cores) > 1
        self.most = setting or (len(cores) if self._follows else 1)
        """As many as there ever are."""
        self._read_s: float | None = None
        self._before = (0.0, 0.0)
        self.begin()

    def begin(self) -> None:
        """Let the calling thread compute: the others are to be `beside` it, or to have ended."""
        torch.set_num_threads(self.most)

    def follow(self, now: float) -> None:
        """Look, at most five times a second, what others use; to be called on the thread that computes."""
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
    """For a thread that uses torch beside the one that computes: it works alone.

    OpenMP counts the threads that it keeps for every thread that ever shared an operation. With more of them than cores
    none waits awake between operations any more, and each operation costs the time it takes to wake up.
    """
    torch.set_num_threads(1)


def apart(work: Callable[[], T]) -> T:
    """What `work` returns, done on a thread that ends, and its share of OpenMP's threads with it."""
    with ThreadPoolExecutor(1, thread_name_prefix="edged-apart") as pool:
        return pool.submit(work).result()


def one_beside(name: str) -> ThreadPoolExecutor:
    """A pool of one thread `beside` the one that computes; it is there at once, so that nothing is set later."""
    pool = ThreadPoolExecutor(1, thread_name_prefix=name, initializer=beside)
    pool.submit(lambda: None).result()
    return pool


def _used_and_idle_s(cores: list[int]) -> tuple[float, float]:
    """Seconds that this process computed, and that `cores` did nothing, since some moment of the past."""
    times = os.times()
    by_core = psutil.cpu_times(percpu=True)
    idle_s = sum(by_core[core].idle + getattr(by_core[core], "iowait", 0.0) for core in cores if core < len(by_core))
    return times.user + times.system, idle_s
