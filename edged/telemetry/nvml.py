"""A desktop GPU through NVML."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pynvml

from edged.telemetry.source import SourceAbsent

_THROTTLES = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x20: "thermal",
    0x40: "thermal (hardware)",
    0x80: "power brake",
}
"""nvmlClocksEventReasons that are no one's choice; the others are idleness and settings."""


class Nvml:
    """One GPU. The library is loaded and initialised at the first reading."""

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
        """Unload, so that a driver that was updated is found."""
        if self._handle is not None:
            self._handle = None
            pynvml.nvmlShutdown()

    def _find(self) -> Any:
        """The GPU that CUDA numbers so."""
        number = int(self._device.partition(":")[2] or 0)
        visible = [part.strip() for part in self._environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if part.strip()]
        name = visible[number] if number < len(visible) else str(number)
        if name.isdigit():
            return pynvml.nvmlDeviceGetHandleByIndex(int(name))
        return pynvml.nvmlDeviceGetHandleByUUID(name)

    def _values(self, gpu: Any) -> dict[str, Any]:
        # The temperature is the one thing that all GPUs tell: where it fails the driver is gone.
        temperature_c = float(pynvml.nvmlDeviceGetTemperature(gpu, pynvml.NVML_TEMPERATURE_GPU))
        load, memory = _asked(pynvml.nvmlDeviceGetUtilizationRates, gpu), _asked(pynvml.nvmlDeviceGetMemoryInfo, gpu)
        clock = _asked(pynvml.nvmlDeviceGetClockInfo, gpu, pynvml.NVML_CLOCK_SM)
        most = _asked(pynvml.nvmlDeviceGetMaxClockInfo, gpu, pynvml.NVML_CLOCK_SM)
        power = _scaled(_asked(pynvml.nvmlDeviceGetPowerUsage, gpu), 1e-3)
        limit = _asked(pynvml.nvmlDeviceGetTemperatureThreshold, gpu, pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN)
        reasons = _asked(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, gpu)
        fan = _asked(pynvml.nvmlDeviceGetFanSpeed, gpu)
        return {
            "temperature_c": temperature_c,
            "temperature_limit_c": None if limit is None else float(limit),
            "gpu_percent": None if load is None else float(load.gpu),
            "gpu_memory_used_bytes": None if memory is None else int(memory.used),
            "gpu_memory_total_bytes": None if memory is None else int(memory.total),
            "gpu_clock_hz": _scaled(clock, 1e6),
            "gpu_clock_max_hz": _scaled(most, 1e6),
            "throttle_reasons": None if reasons is None else throttles(reasons),
            "power_w": power,
            "power_rails_w": {} if power is None else {"GPU": power},
            "power_limit_w": _scaled(_asked(pynvml.nvmlDeviceGetPowerManagementLimit, gpu), 1e-3),
            "power_limit_default_w": _scaled(_asked(pynvml.nvmlDeviceGetPowerManagementDefaultLimit, gpu), 1e-3),
            "fan_percent": None if fan is None else float(fan),
        }


def throttles(reasons: int) -> tuple[str, ...]:
    """The names of the set bits of nvmlClocksEventReasons that hold clocks down against anyone's will."""
    return tuple(name for bit, name in _THROTTLES.items() if reasons & bit)


def _asked(question: Callable[..., Any], *arguments: Any) -> Any:
    """The answer; None where this GPU has none."""
    try:
        return question(*arguments)
    except (pynvml.NVMLError_NotSupported, pynvml.NVMLError_FunctionNotFound, pynvml.NVMLError_NoPermission):
        return None


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor
