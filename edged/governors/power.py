"""The power governor: the share of the time that heat and power leave for fine-tuning.

The governor is pure: readings, the clock and the time of day go in, a share of the time comes out. Serving is never
held back: it is what the box is for, and the hardware slows it down by itself where it must.
"""

from edged.settings.live import Live
from edged.settings.load import GovernorSettings, Settings, minutes_of
from edged.telemetry.reading import Reading

LEVELS = (1.0, 0.5, 0.25, 0.0)
_MARGIN_C = 10.0
"""Degrees below the limit from which fine-tuning slows down."""
_HOLD_S = 30.0
"""Seconds for which readings must allow more before the share rises by a level."""
_DISTANCES = ((0.3, 0.0), (0.6, 0.25), (1.0, 0.5))
"""(share of the margin to the temperature limit, level below it)."""
_RELIEF = 0.3
"""Share of the margin by which the temperature must be further from the limit for the share to rise again."""
_MODES = ((0.6, 0.25), (0.9, 0.5))
"""(share of the clock or power that the box can have, level below it)."""
_BUSY_PERCENT, _SLOWED = 80.0, 0.85
"""A GPU counts as throttled if it is at least this busy at less than this share of its allowed clock."""
_SLOW_LEVEL = 0.5


class Hysteresis:
    """A level out of LEVELS, at first the highest: it falls at once, and rises by one level every _HOLD_S."""

    def __init__(self) -> None:
        self._better_since_s: float | None = None
        self.level = LEVELS[0]

    def follow(self, worst: float, easy: float, now: float) -> float:
        """Return the level after a reading: at most `worst`, and higher only once `easy` was higher for _HOLD_S.

        `easy` is the allowed level with a margin, so at most `worst`: a reading between the two changes nothing.
        """
        if worst < self.level:
            self.level = max(level for level in LEVELS if level <= worst)
            self._better_since_s = None
        elif easy <= self.level:
            self._better_since_s = None
        elif self._better_since_s is None:
            self._better_since_s = now
        elif now - self._better_since_s >= _HOLD_S:
            self.level = min(level for level in LEVELS if level > self.level)
            self._better_since_s = now
        return self.level


class PowerGovernor:
    """The governor of heat, throttled clocks, power mode, battery and quiet hours; the strictest of them counts."""

    def __init__(self, settings: Live[Settings]) -> None:
        self._settings = settings
        self._heat, self._clocks, self._mode = (Hysteresis() for _ in range(3))
        self._highest_clock_hz = 0.0
        self.share = 1.0
        """Share of the time that fine-tuning may work."""
        self.reasons: list[str] = []
        """Reasons why the share is below 1."""
        self.throttled: tuple[str, ...] = ()
        """Reasons why the device is slowed down now."""

    def update(self, reading: Reading, now: float, minute: int) -> float:
        """Return the share after a reading, at `minute` of the local day."""
        settings, self.throttled = self._settings.current.governor, throttling(reading)
        quiet, slowed = minutes_of(settings.quiet_hours), _SLOW_LEVEL if self.throttled else 1.0
        on_battery = {"pause": 0.0, "slow": _SLOW_LEVEL, "ignore": 1.0}[settings.on_battery]
        held = [
            self._by_heat(reading, now, settings),
            (self._clocks.follow(slowed, slowed, now), f"clocks held down: {', '.join(self.throttled) or 'until now'}"),
            self._by_mode(reading, now),
            (on_battery if reading.on_battery else 1.0, "on battery"),
            (0.0 if quiet and within(quiet, minute) else 1.0, "quiet hours"),
        ]
        self.share = min(share for share, _ in held)
        self.reasons = [reason for share, reason in held if share < 1.0]
        return self.share

    def _by_heat(self, reading: Reading, now: float, settings: GovernorSettings) -> tuple[float, str]:
        """Share and reason by temperature: the share falls over the margin below the limit."""
        limit_c = settings.temperature_limit_c or reading.temperature_limit_c
        if reading.temperature_c is None or not limit_c:
            return self._heat.follow(1.0, 1.0, now), "temperature is not known any more"
        near = (limit_c - reading.temperature_c) / _MARGIN_C
        share = self._heat.follow(_level(_DISTANCES, near), _level(_DISTANCES, near - _RELIEF), now)
        return share, f"{reading.temperature_c:.0f} °C of at most {limit_c:.0f} °C"

    def _by_mode(self, reading: Reading, now: float) -> tuple[float, str]:
        """Share and reason by power mode: its clock over the highest seen, or its power cap over the default."""
        shares = [1.0]
        if reading.gpu_clock_max_hz:
            self._highest_clock_hz = max(self._highest_clock_hz, reading.gpu_clock_max_hz)
            shares.append(reading.gpu_clock_max_hz / self._highest_clock_hz)
        if reading.power_limit_w and reading.power_limit_default_w:
            shares.append(reading.power_limit_w / reading.power_limit_default_w)
        wanted = _level(_MODES, min(shares))
        share = self._mode.follow(wanted, wanted, now)
        mode = f"power mode {reading.power_mode}" if reading.power_mode else "power mode"
        return share, f"{mode}: {min(shares):.0%} of full speed"


def throttling(reading: Reading) -> tuple[str, ...]:
    """Reasons why the clocks are held down: the driver's; else that a busy GPU runs slower than its mode allows."""
    if reading.throttle_reasons is not None:
        return reading.throttle_reasons
    clock, most = reading.gpu_clock_hz, reading.gpu_clock_max_hz
    busy = reading.gpu_percent is not None and reading.gpu_percent >= _BUSY_PERCENT
    if busy and clock and most and clock < _SLOWED * most:
        return (f"{clock / 1e6:.0f} of {most / 1e6:.0f} MHz though busy",)
    return ()


def within(hours: tuple[int, int], minute: int) -> bool:
    """Whether a minute of the day lies in hours that may go past midnight; the end is not part of them."""
    first, end = hours
    return first <= minute < end if first < end else minute >= first or minute < end


def _level(bounds: tuple[tuple[float, float], ...], value: float) -> float:
    return next((level for below, level in bounds if value < below), 1.0)
