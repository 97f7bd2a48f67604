"""Privacy of records: the clip, Gaussian noise, epsilon over a person's life, and where noise drowns the signal."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping

import numpy as np

Tensors = Mapping[str, np.ndarray]
_MAX_NOISE = 8.0
"""Norm of a mean's noise, over the clip and its usable signal, from which on a start breaks the language."""
_SIGNAL = 0.2
"""Part of the clip that people alike have in common: measured on hh-lm (docs/decisions.md)."""


def norm(tensors: Tensors) -> float:
    """Return the L2 norm of all numbers together; it is not finite where one of them is not."""
    return math.sqrt(sum(float(np.square(each, dtype=np.float64).sum()) for each in tensors.values()))


def clipped(tensors: Tensors, clip: float) -> dict[str, np.ndarray]:
    """Return the tensors, scaled so that their norm is at most `clip`."""
    factor = min(1.0, clip / max(norm(tensors), 1e-30))
    return {name: (each * factor).astype(np.float32) for name, each in tensors.items()}


def record_deviation(noise: float, clip: float, threshold: int) -> float:
    """Return the standard deviation of the noise in one record of a sum of at least `threshold`.

    The sum keeps `noise` times `clip` though half of the others leave theirs out.
    """
    return noise * clip * math.sqrt(2.0 / threshold)


def noised(
    tensors: Tensors, deviation: float, random_bytes: Callable[[int], bytes] = os.urandom
) -> dict[str, np.ndarray]:
    """Return the tensors with Gaussian noise added, which nobody can compute again: it comes from the kernel."""
    found = {}
    for name, each in tensors.items():
        # Box-Muller; of 53 bits, as doubles have.
        bits = np.frombuffer(random_bytes(16 * each.size), np.uint64).reshape(2, -1)
        uniform = ((bits >> np.uint64(11)) + 1.0) * 2.0**-53
        normal = np.sqrt(-2.0 * np.log(uniform[0])) * np.cos(2.0 * np.pi * uniform[1])
        found[name] = (each + deviation * normal.reshape(each.shape)).astype(np.float32)
    return found


def epsilon(participations: float, delta: float) -> float:
    """Return the epsilon of a person's `participations`, the sum of 1 / noise^2 over them, at `delta`.

    Renyi differential privacy of the Gaussian mechanism (Mironov 2017) without amplification, converted as in Canonne,
    Kamath and Steinke 2020, proposition 12: the least over a > 1 of a p / 2 + ln((a - 1) / a) - ln(delta a) / (a - 1).
    """
    if participations <= 0:
        return 0.0

    def at(log_order: float) -> float:
        # In a - 1, which may be far below 1.
        above = math.exp(log_order)
        order = 1.0 + above
        return order * participations / 2 + math.log(above / order) - math.log(delta * order) / above

    low, high = -20.0, 30.0
    for _ in range(200):
        # The bound has one minimum: ternary search.
        left, right = low + (high - low) / 3, high - (high - low) / 3
        low, high = (low, right) if at(left) < at(right) else (left, high)
    return max(0.0, at(low))


def least_threshold(noise: float, size: int) -> int:
    """Return the least records of a sum in whose mean of `size` numbers this noise does not drown the signal."""
    return math.ceil(noise * math.sqrt(size) / (_SIGNAL * _MAX_NOISE))
