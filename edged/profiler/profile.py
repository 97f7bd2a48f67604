"""Makes a device's profile: measures forwards, units, memory and the engine's own overhead, and fits prices to them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

import edged
from edged.bench.recorder import ReplayRecorder
from edged.engine.engine import Engine
from edged.engine.model.loading import pick_device
from edged.engine.model.memory_plan import free_bytes, total_bytes
from edged.profiler.engine_time import engine_time
from edged.profiler.measure import Progress, measure
from edged.profiler.memory_peaks import measure_peaks
from edged.scheduler.cost.profile import (
    FOLDER,
    DeviceMemory,
    MemoryPeak,
    Profile,
    file_name,
    fit_prices,
    held_out_error,
)
from edged.settings.load import Settings
from edged.tensors.cpu_threads import apart
from edged.tensors.device_copy import has_own_memory


class ProfilingFailed(RuntimeError):
    """The device could not be measured; the message says why."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A profile and where it belongs."""

    profile: Profile
    path: Path


def profile_device(
    settings: Settings,
    model_dir: Path,
    data_dir: Path,
    output: Path | None = None,
    quick: bool = False,
    progress: Progress = lambda _done, _all, _what: None,
) -> Measured:
    """Measure, fit and write the profile, to `output` or into the data folder.

    Raises ModelRefused, OSError where the file cannot be written, and ProfilingFailed.
    """
    room = _device_memory(pick_device(settings.model.device))
    recorder = ReplayRecorder()
    parts = Engine.build(_for_measuring(settings), model_dir, recorder.deliver, lambda _records: None, None)
    try:
        # First, while the heap has no holes that others left.
        progress(0, 1, "memory")
        memory = apart(lambda: _alone(parts, lambda: _peaks(parts)))
        forwards, units = apart(lambda: _alone(parts, lambda: measure(parts, quick, progress)))
        added = engine_time(parts, recorder, quick, progress)
    except RuntimeError as error:
        raise ProfilingFailed(str(error)) from error
    profile = Profile(
        subject=parts.subject,
        created_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        edged_version=edged.__version__,
        prices=fit_prices(forwards, units),
        overhead_s=added.overhead_s,
        rest_s=added.rest_s,
        error_percent=held_out_error(forwards, units),
        forwards=tuple(forwards),
        units=tuple(units),
        memory=memory,
        device_memory=room,
    )
    path = output or data_dir / FOLDER / file_name(parts.subject)
    profile.write(path)
    return Measured(profile, path)


def _for_measuring(settings: Settings) -> Settings:
    """Steps learn from exactly the pairs that they are given, whatever they score."""
    align = settings.align.model_copy(update={"replay_share": 0.0, "loss_threshold": 0.0, "epochs": 1})
    guard = settings.guard.model_copy(update={"held_out_share": 0.0})
    return settings.model_copy(update={"align": align, "guard": guard})


def _device_memory(device: torch.device) -> DeviceMemory:
    kind: Literal["integrated", "discrete", "cpu"] = "cpu"
    if device.type == "cuda":
        kind = "discrete" if has_own_memory(device) else "integrated"
    return DeviceMemory(kind=kind, total_bytes=total_bytes(device), available_bytes=free_bytes(device)[0])


def _alone(parts: Engine, work: Callable[[], Any]) -> Any:
    """`work` with the threads and the device that the engine's own thread would have."""
    parts.runner.begin_thread()
    return work()


def _peaks(parts: Engine) -> dict[str, MemoryPeak]:
    """None of them where this system does not tell a process's peak."""
    try:
        return measure_peaks(parts)
    except OSError:
        return {}
