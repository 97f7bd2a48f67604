"""The source of readings of a desktop GPU, through NVML."""

from collections.abc import Callable, Mapping
from typing import Any

import pynvml

from edged.telemetry.reading import SourceAbsent

_THROTTLES = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x20: "thermal",
    0x40: "thermal (hardware)",
    0x80: "power brake",
}
"""Bits of nvmlClocksEventReasons that mean throttling; the others are idleness and settings."""


class Nvml:
    """A source that reads one GPU. The library is loaded and initialised at the first reading."""

    name = "NVML"

    def __init__(self, device: str, environ: Mapping[str, str]) -> None:
        """`device` is torch's name, such as "cuda:1"; of any other the first GPU is read."""
        self._device, self._environ = device, environ
        self._handle: Any = None

    def read(self) -> dict[str, Any]:
        """See `Source`."""
        try:
            if self._handle is None:
                pynvml.nvmlInit()
                self._handle = self._find()
            return self._values(self._handle)
        except pynvml.NVMLError as error:
            raise SourceAbsent(str(error)) from None

    def close(self) -> None:
        """Unload NVML, so that a driver that was updated is found."""
        if self._handle is not None:
            self._handle = None
            pynvml.nvmlShutdown()

    def _find(self) -> Any:
        """Return NVML's handle of the GPU that has the device's number in CUDA."""
        number = int(self._device.partition(":")[2] or 0)
        visible = [part.strip() for part in self._environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if part.strip()]
        name = visible[number] if number < len(visible) else str(number)
        if name.isdigit():
            return pynvml.nvmlDeviceGetHandleByIndex(int(name))
        return pynvml.nvmlDeviceGetHandleByUUID(name)

    def _values(self, gpu: Any) -> dict[str, Any]:
        # All GPUs have a temperature: where reading it fails the driver is gone.
        temperature_c = float(pynvml.nvmlDeviceGetTemperature(gpu, pynvml.NVML_TEMPERATURE_GPU))
        slowdown = pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN
        limit_c = _asked(float, pynvml.nvmlDeviceGetTemperatureThreshold, gpu, slowdown)
        power_w = _asked(_watts, pynvml.nvmlDeviceGetPowerUsage, gpu)
        return {
            "heats": [(temperature_c, limit_c)],
            "gpu_percent": _asked(lambda rates: float(rates.gpu), pynvml.nvmlDeviceGetUtilizationRates, gpu),
            "gpu_memory_used_bytes": _asked(lambda memory: int(memory.used), pynvml.nvmlDeviceGetMemoryInfo, gpu),
            "gpu_memory_total_bytes": _asked(lambda memory: int(memory.total), pynvml.nvmlDeviceGetMemoryInfo, gpu),
            "gpu_clock_hz": _asked(_hertz, pynvml.nvmlDeviceGetClockInfo, gpu, pynvml.NVML_CLOCK_SM),
            "gpu_clock_max_hz": _asked(_hertz, pynvml.nvmlDeviceGetMaxClockInfo, gpu, pynvml.NVML_CLOCK_SM),
            "throttle_reasons": _asked(throttles, pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, gpu),
            "power_w": power_w,
            "power_rails_w": {} if power_w is None else {"GPU": power_w},
            "power_limit_w": _asked(_watts, pynvml.nvmlDeviceGetPowerManagementLimit, gpu),
            "power_limit_default_w": _asked(_watts, pynvml.nvmlDeviceGetPowerManagementDefaultLimit, gpu),
            "fan_percent": _asked(float, pynvml.nvmlDeviceGetFanSpeed, gpu),
        }


def throttles(reasons: int) -> tuple[str, ...]:
    """Return the names of those set bits of nvmlClocksEventReasons that mean throttling."""
    return tuple(name for bit, name in _THROTTLES.items() if reasons & bit)


def _watts(milliwatts: int) -> float:
    return milliwatts * 1e-3


def _hertz(megahertz: int) -> float:
    return megahertz * 1e6


def _asked(read: Callable[[Any], Any], question: Callable[..., Any], *arguments: Any) -> Any:
    """Return `read` of the answer to an NVML query; None where this GPU does not support it."""
    try:
        return read(question(*arguments))
    except (pynvml.NVMLError_NotSupported, pynvml.NVMLError_FunctionNotFound, pynvml.NVMLError_NoPermission):
        return None
