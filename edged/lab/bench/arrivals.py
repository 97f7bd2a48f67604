"""Arrival processes that replace a trace's own times: Poisson, gamma and cyclic ones."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from edged.lab.bench.traces import TraceError

_WAY_OUT = "give poisson, gamma:CV (such as gamma:2) or cyclic:INTENSITY:SHARE[:MINUTES] (such as cyclic:2:0.35:20)"
_PERIOD_MINUTES = 20.0


@dataclass(frozen=True, slots=True)
class Arrivals:
    """An arrival process: gamma-distributed gaps of the coefficient of variation `cv`, at a rate that may be cyclic.

    Each period of a cyclic rate begins with a burst: `intensity` times the mean rate, for `share` of the period.
    """

    text: str
    cv: float = 1.0
    intensity: float = 1.0
    share: float = 0.0
    period_s: float = 60.0 * _PERIOD_MINUTES

    @classmethod
    def parse(cls, text: str | None) -> Arrivals | None:
        """Read "poisson", "gamma:CV" or "cyclic:INTENSITY:SHARE[:MINUTES]"; None keeps a trace's own times.

        Raises TraceError.
        """
        if text is None:
            return None
        kind, *given = text.split(":")
        try:
            numbers = [float(number) for number in given]
        except ValueError as error:
            raise TraceError(f'arrivals "{text}": {error}; {_WAY_OUT}') from None
        if not all(0.0 < number < float("inf") for number in numbers):
            raise TraceError(f'arrivals "{text}": its numbers must be above 0; {_WAY_OUT}')
        match kind, numbers:
            case "poisson", []:
                return cls(text)
            case "gamma", [cv]:
                return cls(text, cv=cv)
            case "cyclic", [intensity, share, *minutes] if len(minutes) < 2:
                if intensity * share >= 1.0:
                    raise TraceError(
                        f'arrivals "{text}": bursts of {intensity:g} times the mean rate for {share:g} of the time '
                        f"leave nothing for the rest: INTENSITY * SHARE must be below 1 and is {intensity * share:g}"
                    )
                return cls(text, 1.0, intensity, share, 60.0 * (minutes or [_PERIOD_MINUTES])[0])
        raise TraceError(f'arrivals "{text}" are not known: {_WAY_OUT}')

    def times_s(self, rate_per_s: float, seconds: float, seed: int = 0) -> list[float]:
        """Return the times of `rate_per_s * seconds` arrivals within `seconds`; a cyclic rate's mean is over whole
        periods.

        Raises TraceError for a cyclic rate whose period is longer.
        """
        if self.share and seconds < self.period_s:
            raise TraceError(
                f'arrivals "{self.text}" have periods of {self.period_s:g} s, and the load lasts {seconds:g} s: send '
                f"for longer, or give a shorter period (cyclic:{self.intensity:g}:{self.share:g}:{seconds / 60:g})"
            )
        mass = self._mass(seconds)
        number = max(1, round(rate_per_s * mass))
        # The load's last gap ends with it, so that the mean rate is the one that was asked for.
        gaps = np.random.default_rng((seed, number)).gamma(self.cv**-2, size=number + 1)
        return [self._moment(mass * part) for part in (np.cumsum(gaps[:-1]) / gaps.sum()).tolist()]

    def _mass(self, at_s: float) -> float:
        """Return the arrivals until `at_s` that are expected at a mean rate of one a second."""
        periods, rest = divmod(at_s, self.period_s)
        burst_s = min(rest, self.share * self.period_s)
        return periods * self.period_s + burst_s * self.intensity + (rest - burst_s) * self._calm

    def _moment(self, mass: float) -> float:
        """Return the time at which `_mass` is reached."""
        periods, rest = divmod(mass, self.period_s)
        burst = min(rest, self.intensity * self.share * self.period_s)
        return periods * self.period_s + burst / self.intensity + (rest - burst) / self._calm

    @property
    def _calm(self) -> float:
        """The rate outside of bursts over the mean rate."""
        return (1.0 - self.intensity * self.share) / (1.0 - self.share)
