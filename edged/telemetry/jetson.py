"""The source of readings on a Jetson: a client of the jetson-stats service, which reads the hardware as root."""

import contextlib
import multiprocessing
import queue
from pathlib import Path
from typing import Any

from edged.telemetry.reading import SourceAbsent, plausible

_OFFLINE_C = -256.0
"""Temperature that jtop shows of a sensor that is switched off."""


class Jetson:
    """A source over `jtop.jtop`, opened at the first reading and again after its service was gone."""

    name = "jtop"

    def __init__(self, interval_s: float = 1.0) -> None:
        self._interval_s = interval_s
        self._jtop: Any = None

    def read(self) -> dict[str, Any]:
        """See `Source`."""
        try:
            if self._jtop is None:
                self._jtop = _opened(self._interval_s)
            if not self._jtop.ok(spin=True):
                raise SourceAbsent("jtop.service has stopped: systemctl start jtop.service")
            return values_of(self._jtop)
        except SourceAbsent:
            raise
        except queue.Empty:
            raise SourceAbsent("jtop.service does not answer: systemctl restart jtop.service") from None
        except Exception as error:
            # jtop raises whatever its socket, its service's version or its permissions come to.
            raise SourceAbsent(" ".join(str(error).split()) or type(error).__name__) from error

    def close(self) -> None:
        """Close the connection to the service."""
        if self._jtop is not None:
            with contextlib.suppress(Exception):
                self._jtop.close()
            self._jtop = None


def is_jetson(root: Path = Path("/")) -> bool:
    """Whether this is a Jetson: its Linux says so, or its device tree."""
    if (root / "etc/nv_tegra_release").exists():
        return True
    try:
        return b"nvidia,tegra" in (root / "proc/device-tree/compatible").read_bytes()
    except OSError:
        return False


def _opened(interval_s: float) -> Any:
    """Return a started `jtop.jtop`. Importing it sets multiprocessing's start method globally: that is undone."""
    method = multiprocessing.get_start_method(allow_none=True)
    try:
        import jtop
    except ImportError:
        raise SourceAbsent("jetson-stats is not installed: pip install jetson-stats") from None
    finally:
        multiprocessing.set_start_method(method, force=True)
    client = jtop.jtop(interval=interval_s)
    client.start()
    return client


def values_of(jetson: Any) -> dict[str, Any]:
    """The fields of a `Reading` from a connected `jtop.jtop`; powers come in mW, clocks of sysfs in kHz, NVML's in MHz.

    The shapes are those of `jtop.jtop`'s properties `gpu`, `temperature`, `power`, `nvpmodel` and `fan` (version 7).
    """
    gpu: dict[str, Any] = next(iter(jetson.gpu.values()), {})
    clocks = gpu.get("freq", {})
    unit_hz = 1e6 if clocks.get("governor") == "nvml" else 1e3
    power = jetson.power or {}
    total_w = power.get("tot", {}).get("power")
    rails = {name: rail["power"] / 1e3 for name, rail in power.get("rail", {}).items() if rail.get("online", True)}
    if name := power.get("tot", {}).get("name"):
        rails[name] = total_w / 1e3
    speeds = [speed for fan in jetson.fan.values() for speed in fan.get("speed", ())]
    return {
        "gpu_percent": gpu.get("status", {}).get("load"),
        "gpu_clock_hz": clocks["cur"] * unit_hz if clocks.get("cur") else None,
        "gpu_clock_max_hz": clocks["max"] * unit_hz if clocks.get("max") else None,
        # Only sensors that are on; disks' temperatures are not this device's.
        "heats": [
            (sensor["temp"], plausible(sensor.get("max")) or plausible(sensor.get("crit")))
            for name, sensor in jetson.temperature.items()
            if sensor.get("online", sensor["temp"] != _OFFLINE_C) and not name.lower().startswith("nvme")
        ],
        "power_w": None if total_w is None else total_w / 1e3,
        "power_rails_w": rails,
        "power_mode": None if jetson.nvpmodel is None else str(jetson.nvpmodel),
        "fan_percent": float(max(speeds)) if speeds else None,
    }
