"""Growth of a process's resources over its life, and whether it is a leak.

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
"""Least share of a life that is warm-up: heaps, caches and pools fill."""
LARGEST_MIB_PER_MINUTE = 0.5
"""Limit of a leak, as half an hour can resolve: some sixteen minutes are judged, the heap grows by huge pages of 2 MiB,
and up to three of them in that time are chance."""
MIN_JUDGED_S = 600.0
"""Shortest time that is judged: in less, one step of the heap is as steep as a leak."""
_MIN_SAMPLES = 12
_SPARE = 8
"""Files or threads that may be open by chance at the end."""
_PARTS = 6
_POINTS = 240
"""Number of medians that are fitted: all pairs of thousands of samples would be millions."""


@dataclass(frozen=True, slots=True)
class Said:
    """Readings from a daemon's own metrics: bytes in use of its C heap (or 0), blocks of Python objects, iterations."""

    heap_bytes: int
    python_blocks: int
    iterations: int


@dataclass(frozen=True, slots=True)
class Held:
    """A sample of the process's resources: resident bytes; the daemon's own metrics, if it answered; open files without
    sockets, sockets, threads."""

    at_s: float
    rss_bytes: int
    said: Said | None
    files: int
    sockets: int
    threads: int


@dataclass(frozen=True, slots=True)
class Growth:
    """Growth over `seconds` after the warm-up. `slope` and `steady` are MiB of resident memory a minute, `heap` is MiB
    in use of the C heap a minute, `python_blocks` is blocks a minute; `rss_mib` is the last sample's."""

    slope: float = 0.0
    steady: float = 0.0
    heap: float = 0.0
    python_blocks: float = 0.0
    rss_mib: float = 0.0
    files: float = 0.0
    threads: float = 0.0
    seconds: float = 0.0

    def problems(self) -> list[str]:
        """Return a line for each resource that grows too much."""
        leak = min(self.slope, self.steady)
        found = []
        if self.seconds >= MIN_JUDGED_S and leak > LARGEST_MIB_PER_MINUTE:
            found = [f"resident memory grows by {leak:.2f} MiB a minute"]
        more = {"files": self.files, "threads": self.threads}
        return found + [f"{what} grow by {count:g}" for what, count in more.items() if count > _SPARE]


def growth(samples: Sequence[Held]) -> Growth:
    """Return one process's growth after its warm-up; all 0 if there are too few samples."""
    kept = samples[_warm_up(samples) :]
    if len(kept) < _MIN_SAMPLES:
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
    """Return the number of warm-up samples: it lasts until as many iterations have run as records of them are kept."""
    least = int(WARM_SHARE * len(samples))
    full = (place for place, sample in enumerate(samples) if sample.said and sample.said.iterations >= KEPT)
    told = any(sample.said for sample in samples)
    return max(least, next(full, len(samples))) if told else least


def _of_those_that_said(samples: Sequence[Held], number: Callable[[Said], int]) -> float:
    """Return the slope of one of the daemon's own metrics a second, over the samples that have them."""
    known = [(sample.at_s, number(sample.said)) for sample in samples if sample.said is not None]
    return theil_sen(*(np.array(values, float) for values in zip(*known, strict=True))) if len(known) > 1 else 0.0


def theil_sen(x: np.ndarray, y: np.ndarray) -> float:
    """Return the median slope between all pairs of points, first thinned to medians of equally many. (n), (n)."""
    x, y = _thinned(x, y, min(_POINTS, len(x)))
    first, second = np.triu_indices(len(x), k=1)
    return float(np.median((y[second] - y[first]) / (x[second] - x[first])))


def steady(x: np.ndarray, y: np.ndarray) -> float:
    """Return the median of the slopes between the medians of neighbouring parts. (n), (n)."""
    x, y = _thinned(x, y, _PARTS)
    return float(np.median(np.diff(y) / np.diff(x)))


def _thinned(x: np.ndarray, y: np.ndarray, parts: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the medians of `parts` stretches of (nearly) equally many points. (n), (n) -> (parts), (parts)."""
    x, y = (np.array([np.median(part) for part in np.array_split(values, parts)]) for values in (x, y))
    return x, y


def _more(counts: Sequence[int]) -> float:
    """Return the increase from the first to the last fifth of the samples, by their medians."""
    part = max(1, len(counts) // 5)
    return float(np.median(counts[-part:]) - np.median(counts[:part]))
