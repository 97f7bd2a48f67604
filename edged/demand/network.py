"""A small network in numpy that maps features to one number: four layers, ReLU, Adam, L2."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

_WIDTHS = (32, 32, 16, 1)
_EPOCHS, _BATCH = 60, 64
_STEP, _DECAY = 3e-3, 1e-4


@dataclass(frozen=True, slots=True)
class Network:
    """Trained layers, and the scale of features and target that they were trained with."""

    layers: list[tuple[np.ndarray, np.ndarray]]
    scale: np.ndarray
    mean: float
    spread: float

    def __call__(self, features: np.ndarray) -> float:
        """Return the number for one row of features."""
        return float(_outputs(self.layers, (features * self.scale)[None, :])[-1][0, 0]) * self.spread + self.mean


def train(rows: np.ndarray, targets: np.ndarray, seed: int = 0) -> Network:
    """Return a network that was trained on rows of features and their targets; the same for the same seed."""
    random = np.random.default_rng(seed)
    largest = np.abs(rows).max(axis=0)
    scale = np.where(largest > 0, 1.0 / np.maximum(largest, 1e-12), 0.0)
    mean, spread = float(targets.mean()), float(targets.std()) or 1.0
    x, y = (rows * scale).astype(np.float32), ((targets - mean) / spread)[:, None].astype(np.float32)
    sizes = (rows.shape[1], *_WIDTHS)
    layers = [
        (
            random.normal(0.0, np.sqrt(2.0 / into), (into, out)).astype(np.float32),
            np.zeros(out, np.float32),
        )
        for into, out in pairwise(sizes)
    ]
    moments = [(np.zeros_like(part), np.zeros_like(part)) for layer in layers for part in layer]
    step = 0
    for _ in range(_EPOCHS):
        order = random.permutation(len(x))
        for first in range(0, len(x), _BATCH):
            chosen, step = order[first : first + _BATCH], step + 1
            gradients = _gradients(layers, x[chosen], y[chosen])
            parts = [part for layer in layers for part in layer]
            for part, gradient, (slow, fast) in zip(parts, gradients, moments, strict=True):
                gradient = gradient + _DECAY * part
                slow += 0.1 * (gradient - slow)
                fast += 0.001 * (gradient**2 - fast)
                corrected = slow / (1 - 0.9**step), fast / (1 - 0.999**step)
                part -= _STEP * corrected[0] / (np.sqrt(corrected[1]) + 1e-8)
    return Network(layers, scale, mean, spread)


def _outputs(layers: list[tuple[np.ndarray, np.ndarray]], x: np.ndarray) -> list[np.ndarray]:
    """Return the input and what each layer makes of it."""
    outputs = [x]
    for number, (weight, bias) in enumerate(layers, 1):
        x = x @ weight + bias
        outputs.append(np.maximum(x, 0.0) if number < len(layers) else x)
        x = outputs[-1]
    return outputs


def _gradients(layers: list[tuple[np.ndarray, np.ndarray]], x: np.ndarray, y: np.ndarray) -> list[np.ndarray]:
    """Return the gradients of the mean square error, layer by layer, weight before bias."""
    outputs = _outputs(layers, x)
    error = 2.0 * (outputs[-1] - y) / len(x)
    gradients: list[np.ndarray] = []
    for number in reversed(range(len(layers))):
        gradients[:0] = [outputs[number].T @ error, error.sum(axis=0)]
        error = (error @ layers[number][0].T) * (outputs[number] > 0)
    return gradients
