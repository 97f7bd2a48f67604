"""What a process holds more at the end of its life than before, and whether that is a leak.

A heap that keeps what was freed grows by steps: the largest step of fine-tuning, the longest prompt, a thousand
connections at once. A leak grows all the time. Two rates tell them apart, and both must be too large: the median of the
slopes between all pairs of samples (Theil 1950; Sen 1968), which hardly feels what few samples say, and the median of
the rates from one sixth of the time to the next, which two steps leave near zero wherever they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from edged.engine.stats.iterations import KEPT

WARM_SHARE = 0.3
"""Of a life, at least: heaps, caches and pools fill."""
LARGEST_MIB_PER_MINUTE = 0.5
"""What half an hour can resolve: some sixteen minutes are judged, the heap grows by huge pages of 2 MiB, and up to
three of them in that time are chance."""
LEAST_JUDGED_S = 600.0
"""Less says too little: one step of the heap is then as steep as a leak."""
_LEAST_SAMPLES = 12
_SPARE = 8
"""Files or threads that may be open by chance."""
_PARTS = 6
_POINTS = 240
"""Medians of so many stretches of time are fitted: all pairs of thousands of samples would be millions."""


@dataclass(frozen=True, slots=True)
class Said:
    """What a daemon's metrics say of it: bytes in use of its C heap (or 0), blocks of Python objects, iterations."""

    heap_bytes: int
    python_blocks: int
    iterations: int


@dataclass(frozen=True, slots=True)
class Held:
    """What the process holds: resident bytes; what it said itself, if it answered; open files without sockets, sockets,
    threads."""

    at_s: float
    rss_bytes: int
    said: Said | None
    files: int
    sockets: int
    threads: int


@dataclass(frozen=True, slots=True)
class Growth:
    """Over `seconds` after the warm-up. `slope` and `steady` are MiB of resident memory a minute, `heap` is MiB in use
    of the C heap a minute, `python_blocks` so many a minute; `rss_mib` is the last."""

    slope: float = 0.0
    steady: float = 0.0
    heap: float = 0.0
    python_blocks: float = 0.0
    rss_mib: float = 0.0
    files: float = 0.0
    threads: float = 0.0
    seconds: float = 0.0

    def problems(self) -> list[str]:
        """What grows."""
        leak = min(self.slope, self.steady)
        found = []
        if self.seconds >= LEAST_JUDGED_S and leak > LARGEST_MIB_PER_MINUTE:
            found = [f"resident memory grows by {leak:.2f} MiB a minute"]
        more = {"files": self.files, "threads": self.threads}
        return found + [f"{what} grow by {count:g}" for what, count in more.items() if count > _SPARE]


def growth(samples: Sequence[Held]) -> Growth:
    """What one process' life says after its warm-up; nothing where there are too few samples."""
    kept = samples[_warm_up(samples) :]
    if len(kept) < _LEAST_SAMPLES:
        return Growth()
    at = np.array([sample.at_s for sample in kept])
    rss_mib = np.array([sample.rss_bytes for sample in kept]) / 2**20
    return Growth(
        slope=theil_sen(at, rss_mib) * 60,
        steady=steady(at, rss_mib) * 60,
        heap=_of_those_that_said(kept, lambda said: said.heap_bytes) / 2**20 * 60,
        python_blocks=_of_those_that_said(kept, lambda said: said.python_blocks) * 60,
        rss_mib=float(rss_mib[-1]),
        files=_more([sample.files for sample in kept]),
        threads=_more([sample.threads for sample in kept]),
        seconds=float(at[-1] - at[0]),
    )


def _warm_up(samples: Sequence[Held]) -> int:
    """Samples of the warm-up: it lasts until there are as many iterations as records of them are kept."""
    least = int(WARM_SHARE * len(samples))
    full = (place for place, sample in enumerate(samples) if sample.said and sample.said.iterations >= KEPT)
    told = any(sample.said for sample in samples)
    return max(least, next(full, len(samples))) if told else least


def _of_those_that_said(samples: Sequence[Held], number: Callable[[Said], int]) -> float:
    """The slope of a number."""
    known = [(sample.at_s, number(sample.said)) for sample in samples if sample.said is not None]
    return theil_sen(*(np.array(values, float) for values in zip(*known, strict=True))) if len(known) > 1 else 0.0


def theil_sen(x: np.ndarray, y: np.ndarray) -> float:
    """Median of the slopes between all pairs of points, those first thinned to medians of equally many. (n), (n)."""
    x, y = _thinned(x, y, min(_POINTS, len(x)))
    first, second = np.triu_indices(len(x), k=1)
    return float(np.median((y[second] - y[first]) / (x[second] - x[first])))


def steady(x: np.ndarray, y: np.ndarray) -> float:
    """Median of the slopes between the medians of neighbouring parts. (n), (n)."""
    x, y = _thinned(x, y, _PARTS)
    return float(np.median(np.diff(y) / np.diff(x)))


def _thinned(x: np.ndarray, y: np.ndarray, parts: int) -> tuple[np.ndarray, np.ndarray]:
    """The medians of `parts` stretches of (nearly) equally many points. (n), (n) -> (parts), (parts)."""
    x, y = (np.array([np.median(part) for part in np.array_split(values, parts)]) for values in (x, y))
    return x, y


def _more(counts: Sequence[int]) -> float:
    """How many more at the end; medians of a fifth of the samples each."""
    part = max(1, len(counts) // 5)
    return float(np.median(counts[-part:]) - np.median(counts[:part]))
