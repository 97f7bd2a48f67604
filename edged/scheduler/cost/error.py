"""How far predictions of iterations were off, by the kind of work."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

UNKNOWN_ERROR = 0.25
"""Relative error assumed before anything was measured."""
WARM_UP = 200
"""First iterations, which the lasting means leave out."""
_RECENT = 0.05
"""Weight of the latest iteration in a recent mean."""
_LARGEST_ERROR = 1.0
"""Most that one iteration counts in a recent mean."""


class PredictedPart(StrEnum):
    """What of an iteration is predicted by itself."""

    PREFILL = "prefill"
    """A forward with tokens of prompts or of preference pairs."""
    DECODE = "decode"
    """A forward of decodes alone."""
    UNITS = "units"
    """The fine-tune units after the forward, together."""


@dataclass(slots=True)
class _Mean:
    """Relative errors: a recent mean, and a lasting one of those after the warm-up."""

    recent: float = UNKNOWN_ERROR
    count: int = 0
    lasting_sum: float = 0.0
    lasting_count: int = 0

    def add(self, error: float, warm: bool) -> None:
        self.count += 1
        self.recent += (min(_LARGEST_ERROR, error) - self.recent) * max(_RECENT, 1.0 / (self.count + 1))
        if warm:
            self.lasting_sum += error
            self.lasting_count += 1


@dataclass(slots=True)
class PredictionError:
    """Mean absolute percentage errors, as shares: 0.1 is 10 %."""

    iterations: int = 0
    _whole: _Mean = field(default_factory=_Mean)
    _parts: dict[PredictedPart, _Mean] = field(default_factory=lambda: {part: _Mean() for part in PredictedPart})

    @property
    def recent(self) -> float:
        """Of the latest iterations as a whole."""
        return self._whole.recent

    def observe(self, parts: dict[PredictedPart, tuple[float, float]]) -> None:
        """An iteration's (predicted, measured) seconds by part; the measured ones above zero."""
        warm = self.iterations >= WARM_UP
        self.iterations += 1
        predicted_s = measured_s = 0.0
        for part, (predicted, measured) in parts.items():
            predicted_s += predicted
            measured_s += measured
            self._parts[part].add(abs(predicted / measured - 1.0), warm)
        self._whole.add(abs(predicted_s / measured_s - 1.0), warm)

    def report(self) -> dict[str, Any]:
        """Percentages by part; None where nothing was measured. Those after the warm-up count every iteration alike."""
        parts = self._parts.items()
        return {
            "mape_percent": self._whole.recent * 100.0,
            "mape_percent_by_kind": {str(part): mean.recent * 100.0 if mean.count else None for part, mean in parts},
            "after_warm_up": {
                str(part): {
                    "iterations": mean.lasting_count,
                    "mape_percent": mean.lasting_sum / mean.lasting_count * 100.0 if mean.lasting_count else None,
                }
                for part, mean in [("all", self._whole), *parts]
            },
        }
