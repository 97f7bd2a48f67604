"""What the box is doing: processor, memory, this process.

Owns the readings. Must not know the engine; the compute device's name is passed in.
"""

from __future__ import annotations

import os
from typing import Any

import psutil


class DeviceMonitor:
    """Readings since the one before; cheap enough for every status request."""

    def __init__(self, name: str) -> None:
        """`name` is the compute device's, such as "cpu" or "cuda:0"."""
        self._name = name
        self._process = psutil.Process()
        # The first reading of either is meaningless: it has nothing to compare with.
        psutil.cpu_percent(None)
        self._process.cpu_percent(None)

    def read(self) -> dict[str, Any]:
        """Percentages are of one core for the process and of all cores for the box; sizes in bytes."""
        memory = psutil.virtual_memory()
        return {
            "name": self._name,
            "cpu_percent": psutil.cpu_percent(None),
            "cpu_count": os.cpu_count() or 1,
            "memory_total_bytes": memory.total,
            "memory_available_bytes": memory.available,
            "process_cpu_percent": self._process.cpu_percent(None),
            "process_rss_bytes": self._process.memory_info().rss,
            "temperature_c": _hottest_c(),
        }


def _hottest_c() -> float | None:
    """The highest temperature that any sensor reports; None where there is no sensor."""
    try:
        sensors = psutil.sensors_temperatures()
    except (AttributeError, OSError):
        return None
    return max((reading.current for group in sensors.values() for reading in group), default=None)
