"""Prediction errors of iterations, by the kind of work."""

from dataclasses import dataclass
from typing import Any

UNKNOWN_ERROR = 0.25
"""Relative error assumed before anything was measured."""
WARM_UP = 200
"""Number of first iterations that the lasting means leave out."""
PARTS = ("prefill", "decode", "units")
"""Parts of an iteration with errors of their own: a forward with tokens of prompts or of preference pairs, a forward of
decodes alone, and the fine-tune units after the forward, together."""
_RECENT = 0.05
"""Weight of the latest iteration in a recent mean."""
_LARGEST_ERROR = 1.0
"""Most that one iteration counts in a recent mean."""


@dataclass(slots=True)
class _Mean:
    """Mean relative errors, a recent one and a lasting one of iterations after the warm-up, and the seconds of all."""

    recent: float = UNKNOWN_ERROR
    count: int = 0
    lasting_sum: float = 0.0
    lasting_count: int = 0
    usual_s: float = 0.0
    measured_s: float = 0.0


class PredictionError:
    """Mean absolute percentage errors, as shares: 0.1 is 10 %."""

    def __init__(self) -> None:
        self._means = {name: _Mean() for name in ("all", *PARTS)}

    @property
    def iterations(self) -> int:
        """Number of iterations that were predicted."""
        return self._means["all"].count

    @property
    def recent(self) -> float:
        """Mean relative error of the latest iterations as a whole."""
        return self._means["all"].recent

    def observe(self, parts: dict[str, tuple[float, float, float]]) -> None:
        """Take in an iteration's (predicted, usual, measured) seconds by part, of PARTS; the measured above zero."""
        warm = self.iterations >= WARM_UP
        whole = [sum(seconds) for seconds in zip(*parts.values(), strict=True)]
        for name, (predicted, usual, measured) in {"all": whole, **parts}.items():
            mean, error = self._means[name], abs(predicted / measured - 1.0)
            mean.usual_s += usual
            mean.measured_s += measured
            mean.count += 1
            mean.recent += (min(_LARGEST_ERROR, error) - mean.recent) * max(_RECENT, 1.0 / (mean.count + 1))
            if warm:
                mean.lasting_sum += error
                mean.lasting_count += 1

    def report(self) -> dict[str, Any]:
        """Return percentages by part, None where nothing was measured, and the seconds of all iterations.

        After the warm-up all iterations count alike.
        """
        means = self._means
        return {
            "mape_percent": self.recent * 100.0,
            "mape_percent_by_kind": {part: means[part].recent * 100.0 if means[part].count else None for part in PARTS},
            "after_warm_up": {
                name: {
                    "iterations": mean.lasting_count,
                    "mape_percent": mean.lasting_sum / mean.lasting_count * 100.0 if mean.lasting_count else None,
                }
                for name, mean in means.items()
            },
            "spent_s": {part: {"usual": means[part].usual_s, "measured": means[part].measured_s} for part in PARTS},
        }
