"""One reading of the box: what every source knows of it at one moment."""

from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

Heat = tuple[float, float | None]
"""A sensor's temperature, and where its part is slowed down; None where it does not say so."""
_PLAUSIBLE_LIMIT_C = (40.0, 130.0)
"""Sensors without a limit report anything from 0 to 65261."""


class SourceAbsent(RuntimeError):
    """The source cannot be read on this box, or not now; the message says why and what to do."""


class Source(Protocol):
    """Reads some fields of a `Reading`; one thread uses it."""

    name: str

    def read(self) -> dict[str, Any]:
        """Values by the `Reading`'s names, None where unknown. Raises SourceAbsent; then `close` is called.

        All temperatures that it knows are `heats`.
        """
        ...

    def close(self) -> None:
        """Let go of what is open; `read` opens it anew."""
        ...


@dataclass(frozen=True, slots=True)
class Reading:
    """The box at one moment; None where no source knows. Percentages are of all cores, but the process's of one."""

    at_s: float
    """Of the monotonic clock."""
    cpu_percent: float = 0.0
    cpu_count: int = 1
    memory_total_bytes: int = 0
    """Of the box, or of the control group that this process is in, where that is less."""
    memory_available_bytes: int = 0
    """What can be had without swapping: MemAvailable, or what the control group still allows, where that is less."""
    memory_pressure_some_percent: float | None = None
    """Share of the last 10 s in which some task waited for memory (PSI `some avg10`): of the box."""
    memory_pressure_full_percent: float | None = None
    """Likewise, in which all tasks that could run waited."""
    cgroup_pressure_some_percent: float | None = None
    """As the first, of the tasks of this process's own control group."""
    swap_total_bytes: int | None = None
    swap_used_bytes: int | None = None
    process_cpu_percent: float = 0.0
    process_rss_bytes: int = 0
    temperature_c: float | None = None
    """Of the sensor that is nearest to its limit; of the hottest where none has one."""
    temperature_limit_c: float | None = None
    """Where that sensor's part is slowed down."""
    gpu_percent: float | None = None
    gpu_memory_used_bytes: int | None = None
    gpu_memory_total_bytes: int | None = None
    """None on an integrated GPU too: its memory is the box's."""
    gpu_clock_hz: float | None = None
    gpu_clock_max_hz: float | None = None
    """The highest that the present power mode allows."""
    throttle_reasons: tuple[str, ...] | None = None
    """Why the GPU's clocks are held down just now, in the driver's words."""
    power_w: float | None = None
    """Of the whole board, or of the GPU where no more can be read."""
    power_rails_w: dict[str, float] = field(default_factory=dict)
    power_limit_w: float | None = None
    power_limit_default_w: float | None = None
    power_mode: str | None = None
    fan_percent: float | None = None
    on_battery: bool | None = None

    def report(self) -> dict[str, Any]:
        """As the status shows it."""
        return {name: value for name, value in asdict(self).items() if name != "at_s"}


def merged(at_s: float, parts: list[dict[str, Any]]) -> Reading:
    """One reading from what each source knows; a later source is the better one, but for the temperature.

    Of temperatures the one that is nearest to its limit counts, else the hottest. Raises TypeError for what no reading
    has.
    """
    values = {name: value for part in parts for name, value in part.items() if value is not None and name != "heats"}
    heats = [heat for part in parts for heat in part.get("heats", ())]
    values["temperature_c"], values["temperature_limit_c"] = min(heats, key=_distance, default=(None, None))
    return Reading(at_s, **values)


def plausible(limit_c: float | None) -> float | None:
    """A sensor's limit; None for none."""
    least, most = _PLAUSIBLE_LIMIT_C
    return limit_c if limit_c is not None and least <= limit_c <= most else None


def _distance(heat: Heat) -> tuple[bool, float]:
    """Sorts by what is most worrying."""
    temperature_c, limit_c = heat
    return (True, -temperature_c) if limit_c is None else (False, limit_c - temperature_c)
