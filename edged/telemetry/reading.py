"""A reading of the box at one moment, merged from the values of its sources."""

from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

Heat = tuple[float, float | None]
"""A sensor's temperature, and the one at which its part slows down (None: not known), in °C."""
_PLAUSIBLE_LIMIT_C = (40.0, 130.0)
"""Range of believable limits: sensors without a limit report anything from 0 to 65261."""


class SourceAbsent(RuntimeError):
    """The source cannot be read on this box, or not now; the message says why and what to do."""


class Source(Protocol):
    """A source of some fields of a `Reading`; one thread uses it."""

    name: str

    def read(self) -> dict[str, Any]:
        """Return values by the `Reading`'s names, None where unknown. Raises SourceAbsent; then `close` is called.

        The key `heats` has all temperatures of the source.
        """
        ...

    def close(self) -> None:
        """Close open resources; `read` opens them again."""
        ...


@dataclass(frozen=True, slots=True)
class Reading:
    """The box at one moment; None: not known. The process's CPU percentage is of one core, the box's of all cores."""

    at_s: float
    """Time of the reading, by the monotonic clock."""
    cpu_percent: float = 0.0
    cpu_count: int = 1
    memory_total_bytes: int = 0
    """Memory of the box, or of this process's control group where that is less."""
    memory_available_bytes: int = 0
    """Memory available without swapping: MemAvailable, or what the control group still allows where that is less."""
    memory_pressure_some_percent: float | None = None
    """Share of the last 10 s in which some task of the box waited for memory (PSI `some avg10`)."""
    memory_pressure_full_percent: float | None = None
    """Share of the last 10 s in which all tasks that could run waited for memory (PSI `full avg10`)."""
    cgroup_pressure_some_percent: float | None = None
    """PSI `some avg10` of the tasks in this process's own control group."""
    swap_total_bytes: int | None = None
    swap_used_bytes: int | None = None
    process_cpu_percent: float = 0.0
    process_rss_bytes: int = 0
    temperature_c: float | None = None
    """Temperature of the sensor nearest to its limit; of the hottest where none has a limit."""
    temperature_limit_c: float | None = None
    """Temperature at which that sensor's part slows down."""
    gpu_percent: float | None = None
    gpu_memory_used_bytes: int | None = None
    gpu_memory_total_bytes: int | None = None
    """None on an integrated GPU too: its memory is the box's."""
    gpu_clock_hz: float | None = None
    gpu_clock_max_hz: float | None = None
    """Highest clock that the present power mode allows."""
    throttle_reasons: tuple[str, ...] | None = None
    """Reasons why the GPU's clocks are held down now, in the driver's words."""
    power_w: float | None = None
    """Power of the whole board, or of the GPU where no more can be read."""
    power_rails_w: dict[str, float] = field(default_factory=dict)
    power_limit_w: float | None = None
    power_limit_default_w: float | None = None
    power_mode: str | None = None
    fan_percent: float | None = None
    on_battery: bool | None = None

    def report(self) -> dict[str, Any]:
        """Return the fields as the status shows them."""
        return {name: value for name, value in asdict(self).items() if name != "at_s"}


def merged(at_s: float, parts: list[dict[str, Any]]) -> Reading:
    """Merge the values of all sources into a reading; a later source takes precedence, but for the temperature.

    The temperature nearest to its limit counts, else the hottest. Raises TypeError for a name that `Reading` lacks.
    """
    values = {name: value for part in parts for name, value in part.items() if value is not None and name != "heats"}
    heats = [heat for part in parts for heat in part.get("heats", ())]
    values["temperature_c"], values["temperature_limit_c"] = min(heats, key=_distance, default=(None, None))
    return Reading(at_s, **values)


def plausible(limit_c: float | None) -> float | None:
    """Return a sensor's limit if it is believable, else None."""
    least, most = _PLAUSIBLE_LIMIT_C
    return limit_c if limit_c is not None and least <= limit_c <= most else None


def _distance(heat: Heat) -> tuple[bool, float]:
    """Sort key: the distance to the limit, then, without limits, the hottest first."""
    temperature_c, limit_c = heat
    return (True, -temperature_c) if limit_c is None else (False, limit_c - temperature_c)
