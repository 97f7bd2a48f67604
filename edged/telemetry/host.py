"""The source of readings on every Linux box: processor, memory, pressure, sensors, this process."""

import os
from pathlib import Path
from typing import Any

import psutil

from edged.telemetry.cgroup import ControlGroup, pressure_percent
from edged.telemetry.reading import Heat, plausible

_OTHERS = ("nvme", "drivetemp", "iwlwifi", "ath", "mt79")
"""Name prefixes of sensors whose heat does not come from fine-tuning."""
_PRESSURE = Path("/proc/pressure/memory")
_TRIPS = ("passive", "hot", "critical")
"""Types of a thermal zone's trip points; the first that is there says where the part slows down."""


class Host:
    """The source that reads psutil, pressure stall information, the control group and thermal zones."""

    name = "psutil"

    def __init__(self, sys: Path = Path("/sys"), cgroup: ControlGroup | None = None) -> None:
        """`cgroup` is this process's own, where it has bounds."""
        self._sys, self._cgroup = sys, cgroup
        self._process = psutil.Process()
        # The first reading of either is meaningless: it has nothing to compare with.
        psutil.cpu_percent(None)
        self._process.cpu_percent(None)

    def read(self) -> dict[str, Any]:
        """See `Source`."""
        memory, swap = psutil.virtual_memory(), psutil.swap_memory()
        total, available = memory.total, memory.available
        bound = self._cgroup.bound() if self._cgroup is not None else None
        if bound is not None:
            total, available = min(total, bound.total_bytes), min(available, bound.available_bytes)
        return {
            "cpu_percent": psutil.cpu_percent(None),
            "cpu_count": os.cpu_count() or 1,
            "memory_total_bytes": total,
            "memory_available_bytes": available,
            "memory_pressure_some_percent": pressure_percent(_PRESSURE, "some"),
            "memory_pressure_full_percent": pressure_percent(_PRESSURE, "full"),
            "cgroup_pressure_some_percent": self._cgroup.pressure() if self._cgroup is not None else None,
            "swap_total_bytes": swap.total,
            "swap_used_bytes": swap.used,
            "process_cpu_percent": self._process.cpu_percent(None),
            "process_rss_bytes": self._process.memory_info().rss,
            "heats": [*_hwmon(), *_thermal_zones(self._sys / "class/thermal")],
            "on_battery": _on_battery(),
        }

    def close(self) -> None:
        """Do nothing: no resource is open."""


def _hwmon() -> list[Heat]:
    """(temperature, limit) of the sensors that psutil knows."""
    try:
        groups = psutil.sensors_temperatures()
    except (AttributeError, OSError):
        return []
    return [
        (sensor.current, plausible(sensor.high) or plausible(sensor.critical))
        for name, sensors in groups.items()
        if not name.startswith(_OTHERS)
        for sensor in sensors
        if sensor.current > 0.0
    ]


def _thermal_zones(folder: Path) -> list[Heat]:
    """(temperature, first trip point) of the thermal zones: a Jetson's, where hwmon knows no limits."""
    heats = []
    for zone in sorted(folder.glob("thermal_zone*")):
        try:
            temperature_c = int((zone / "temp").read_text()) / 1e3
            trips = {
                (zone / f"trip_point_{number}_type").read_text().strip(): int(path.read_text()) / 1e3
                for path in zone.glob("trip_point_*_temp")
                if (number := path.name.split("_")[2])
            }
        except (OSError, ValueError):
            # A zone whose part is switched off cannot be read.
            continue
        limit_c = next((limit for name in _TRIPS if (limit := plausible(trips.get(name))) is not None), None)
        if temperature_c > 0.0:
            heats.append((temperature_c, limit_c))
    return heats


def _on_battery() -> bool | None:
    """Whether a battery is being discharged; None without one."""
    try:
        battery = psutil.sensors_battery()
    except (AttributeError, OSError):
        return None
    return None if battery is None or battery.power_plugged is None else not battery.power_plugged
