"""The demand of a run by the type of its application and by its first call.

Costs are KV token-iterations of the whole run. A type with few runs is expected to cost its median, a new one that of
all; with more a network knows it by the words and sizes of the first call.
"""

from __future__ import annotations

import math
import re
import statistics
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from edged.demand.network import train

WORDS = 512
"""Classes that words are hashed into."""
_FEATURES = WORDS + 3
_MIN_KNOWN, _MIN_TRAINED = 3, 20
"""Runs of a type from which its own median counts, and from which a network is trained."""
_MAX_RUNS, MAX_TYPES = 300, 64
_GROWTH = 1.2
_LONGEST_TEXT = 2048
"""Characters of a call that are looked at."""
_WORD = re.compile(r"\w+")


def features_of(text: str, prompt: int, choices: int, max_tokens: int, salt: bytes = b"") -> np.ndarray:
    """Return the features of a first call: counts of its words by salted hash, and the logarithms of its sizes."""
    row = np.zeros(_FEATURES, np.float32)
    hashed = [zlib.crc32(salt + word.encode()) % WORDS for word in _WORD.findall(text[:_LONGEST_TEXT].lower())]
    row[:WORDS] = np.bincount(np.array(hashed, np.int64), minlength=WORDS)
    row[WORDS:] = [math.log1p(size) for size in (prompt, choices, max_tokens)]
    return row


@dataclass(slots=True)
class _Type:
    runs: deque[tuple[np.ndarray, float]] = field(default_factory=lambda: deque(maxlen=_MAX_RUNS))
    """The latest runs: features of the first call, and cost."""
    count: int = 0
    trained: int = 0
    log_cost: Callable[[np.ndarray], float] | None = None
    """The trained network, of features."""


class DemandPredictor:
    """The costs of one sharer's runs, from `observe`; `predict` may be asked while another thread is in `train`."""

    def __init__(self) -> None:
        self._types: OrderedDict[str, _Type] = OrderedDict()
        self._costs: deque[float] = deque(maxlen=_MAX_RUNS)

    def __len__(self) -> int:
        """Return the number of types that are known."""
        return len(self._types)

    def drop_oldest(self) -> None:
        """Forget the type of which no run has ended for longest."""
        self._types.popitem(last=False)

    def observe(self, application: str, row: np.ndarray, cost: float) -> None:
        """Learn what a run of a type cost, by the features of its first call."""
        known = self._types.setdefault(application, _Type())
        self._types.move_to_end(application)
        if len(self) > MAX_TYPES:
            self.drop_oldest()
        known.runs.append((row, max(1.0, cost)))
        known.count += 1
        self._costs.append(cost)

    def predict(self, application: str, row: np.ndarray, otherwise: float) -> float:
        """Return the expected cost of a run; `otherwise` where nothing is known yet."""
        known = self._types.get(application)
        if known is None or len(known.runs) < _MIN_KNOWN:
            return statistics.median(self._costs) if self._costs else otherwise
        costs = [cost for _, cost in known.runs]
        if known.log_cost is None:
            return statistics.median(costs)
        # No run is expected to be far from all that there were.
        return math.exp(min(max(known.log_cost(row), math.log(min(costs)) - 1.0), math.log(max(costs)) + 1.0))

    def due(self, application: str) -> bool:
        """Whether a type has so many more runs that its network is to be trained anew."""
        known = self._types.get(application)
        return known is not None and known.count >= max(_MIN_TRAINED, _GROWTH * known.trained)

    def train(self, application: str) -> None:
        """Train a type's network on its runs."""
        known = self._types.get(application)
        if known is None:
            return
        runs = list(known.runs)
        rows, costs = np.stack([row for row, _ in runs]), np.array([cost for _, cost in runs])
        seen = (rows[:, :WORDS] > 0).sum(axis=0)
        # The rarer a class of words is among the type's runs, the more it weighs.
        rarity = np.log((1.0 + len(rows)) / (1.0 + seen)).astype(np.float32)
        network = train(_weighted(rows, rarity), np.log(costs))
        known.log_cost, known.trained = lambda row: network(_weighted(row, rarity)), known.count

    def forget(self, application: str) -> None:
        """Forget what was learned of a type."""
        self._types.pop(application, None)


def _weighted(rows: np.ndarray, rarity: np.ndarray) -> np.ndarray:
    """Return features whose counts of words are weighed by their rarity (TF-IDF), of unit length."""
    words = rows[..., :WORDS] * rarity
    length = np.linalg.norm(words, axis=-1, keepdims=True)
    return np.concatenate([words / np.maximum(length, 1e-6), rows[..., WORDS:]], axis=-1)
