"""Files in configs/devices that describe a device, and the search for them by name.

`edged.lab.simulator.roofline` computes times.
"""

import difflib
import sysconfig
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from edged.scheduler.cost.profile import Noise

CHECKOUT, INSTALLED = Path(__file__).parents[3] / "configs", Path(sysconfig.get_path("data")) / "share" / "edged"
"""Folders of the files: a checkout's come before those that were installed with the package."""
Positive = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
Efficiency = Annotated[float, Field(gt=0.0, le=1.0)]


class DeviceError(ValueError):
    """A device or model is unknown, or its file is invalid; the message names it and the way out."""


class _DeviceTable(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Bandwidth(_DeviceTable):
    """Bandwidth of the memory that holds weights and K/V."""

    peak_gb_per_s: Positive
    """10^9 bytes a second."""
    efficiency: Efficiency

    @property
    def bytes_per_s(self) -> float:
        """Bytes a second that are reached."""
        return 1e9 * self.peak_gb_per_s * self.efficiency


class Compute(_DeviceTable):
    """Dense compute peaks in 10^12 operations a second."""

    bfloat16_tflops: Positive
    float32_tflops: Positive
    efficiency: Efficiency

    def flops_per_s(self, itemsize: int) -> float:
        """Return the operations a second that matrix products of numbers of `itemsize` bytes reach."""
        return 1e12 * self.efficiency * (self.bfloat16_tflops if itemsize == 2 else self.float32_tflops)


class Overhead(_DeviceTable):
    """Time that neither bytes nor operations account for."""

    launch_us: NotNegative
    """CPU time to launch a kernel."""
    gap_us: NotNegative
    """Idle time of the device between two kernels."""
    iteration_ms: NotNegative
    """Work of an iteration outside its forward and units."""


class DeviceFile(_DeviceTable):
    """A device in one power mode."""

    name: Annotated[str, Field(min_length=1)]
    power_mode: str
    kind: Literal["integrated", "discrete", "cpu"]
    """Kind of device: a GPU that shares the host's memory, a GPU with its own, or a CPU."""
    memory_gib: Positive
    available_gib: Positive
    """Part of `memory_gib` that edged, with the model's weights, can use. 2^30 bytes."""
    bandwidth: Bandwidth
    compute: Compute
    overhead: Overhead
    noise: Noise = Noise()

    @property
    def cuda(self) -> bool:
        """Whether the device runs CUDA."""
        return self.kind != "cpu"


def find_device(name_or_path: str) -> Path:
    """Return the file of a device: a path, or a name from configs/devices. Raises DeviceError with the nearest name.

    The name may also be that of a profile (.json) in the folder; a .toml of the same name comes first.
    """
    return _find(name_or_path, "device", "devices", (".toml", ".json"))


def find_model_shape(name_or_path: str) -> Path:
    """Return a model's directory or config.json: a path, or a name from configs/models. Raises DeviceError."""
    return _find(name_or_path, "model", "models", (".json",))


def _find(name: str, what: str, folder: str, suffixes: tuple[str, ...]) -> Path:
    given = Path(name)
    # Any other folder, such as a comparison's that is named after its device, counts only if no known name matches.
    if given.is_file() or (given / "config.json").is_file():
        return given
    known: dict[str, Path] = {}
    for place in (CHECKOUT, INSTALLED):
        for suffix in suffixes:
            for path in sorted((place / folder).glob(f"*{suffix}")):
                known.setdefault(path.name.removesuffix(suffix), path)
    if name in known:
        return known[name]
    if given.exists():
        return given
    near = difflib.get_close_matches(name.lower(), known, n=1)
    hint = f'did you mean "{near[0]}"?' if near else f"known are {', '.join(known) or 'none here'}, or give a file"
    raise DeviceError(f'there is no {what} "{name}": {hint}')


def read_device(path: Path) -> DeviceFile:
    """Read a device's file. Raises DeviceError that names the file, the field and what is wrong with it."""
    try:
        values = tomllib.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise DeviceError(f'device file "{path}" cannot be read: {error}') from None
    try:
        device = DeviceFile.model_validate(values)
    except ValidationError as error:
        problems = "; ".join(_explain(item) for item in error.errors())
        raise DeviceError(f'device file "{path}": {problems} (configs/devices has examples)') from None
    if device.available_gib > device.memory_gib:
        raise DeviceError(
            f'device file "{path}": available_gib = {device.available_gib} is more than memory_gib = '
            f"{device.memory_gib}: it is what the system leaves of it"
        )
    return device


def _explain(item: Any) -> str:
    dotted = ".".join(str(part) for part in item["loc"])
    if item["type"] == "missing":
        return f'"{dotted}" is missing'
    if item["type"] == "extra_forbidden":
        return f'"{dotted}" is not known'
    return f'"{dotted}" = {item["input"]!r}: {item["msg"]}'
