"""A device's profile: measures forwards, units, memory and the engine's own overhead, and fits prices to them."""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal

import torch

import edged
from edged.engine.engine import Engine
from edged.engine.model.loading import pick_device
from edged.engine.model.memory_model import free_bytes, iteration_bytes, kept_kinds, lone_step_bytes, total_bytes
from edged.profiler.engine_time import engine_time
from edged.profiler.measure import Prober, Progress, Shape, StepShape, measure
from edged.profiler.proc_memory import peak_bytes, start_peak, used_bytes
from edged.profiler.recorder import ReplayRecorder
from edged.scheduler.cost.profile import (
    FOLDER,
    DeviceMemory,
    MemoryPeak,
    Profile,
    file_name,
    fit_noise,
    fit_prices,
    held_out_error,
)
from edged.settings.load import Settings
from edged.tensors.cpu_threads import apart
from edged.tensors.device_copy import has_own_memory


class ProfilingFailed(RuntimeError):
    """The device could not be measured; the message says why."""


def profile_device(
    settings: Settings,
    model_dir: Path,
    data_dir: Path,
    output: Path | None = None,
    quick: bool = False,
    progress: Progress = lambda _done, _all, _what: None,
) -> tuple[Profile, Path]:
    """Measure, fit and write the profile, to `output` or into the data folder; return the profile and its path.

    Raises ModelRefused, OSError where the file cannot be written, and ProfilingFailed.
    """
    room = _device_memory(pick_device(settings.model.device))
    recorder = ReplayRecorder()
    parts = Engine.build(_for_measuring(settings), model_dir, recorder.deliver, lambda _records: None, None)
    try:
        # First, while the heap is not fragmented yet.
        progress(0, 1, "memory")
        memory = apart(lambda: _peaks(parts))
        measured = apart(lambda: measure(parts, quick, progress))
        overhead_s, rest_s = engine_time(parts, recorder, quick, progress)
    except RuntimeError as error:
        raise ProfilingFailed(str(error)) from error
    forwards, units = measured.times()
    prices = fit_prices(forwards, units)
    profile = Profile(
        subject=parts.subject,
        created_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        edged_version=edged.__version__,
        prices=prices,
        overhead_s=overhead_s,
        rest_s=rest_s,
        noise=fit_noise(prices, measured.runs),
        error_percent=held_out_error(forwards, units),
        forwards=tuple(forwards),
        units=tuple(units),
        memory=memory,
        device_memory=room,
    )
    path = output or data_dir / FOLDER / file_name(parts.subject)
    profile.write(path)
    return profile, path


def _for_measuring(settings: Settings) -> Settings:
    """Return settings under which steps learn from exactly the pairs that they are given, whatever they score."""
    align = settings.align.model_copy(update={"replay_share": 0.0, "loss_threshold": 0.0, "epochs": 1})
    guard = settings.guard.model_copy(update={"held_out_share": 0.0})
    feedback = settings.feedback.model_copy(update={"quarantine": False})
    return settings.model_copy(update={"align": align, "guard": guard, "feedback": feedback})


def _device_memory(device: torch.device) -> DeviceMemory:
    kind: Literal["integrated", "discrete", "cpu"] = "cpu"
    if device.type == "cuda":
        kind = "discrete" if has_own_memory(device) else "integrated"
    return DeviceMemory(kind=kind, total_bytes=total_bytes(device), available_bytes=free_bytes(device)[0])


def _peaks(parts: Engine) -> dict[str, MemoryPeak]:
    """Return memory peaks by name: the largest forward, and a step of full windows with and without a kept graph.

    Pages, weights and adapters are allocated before. Empty if this system does not report a process's peak. Raises
    RuntimeError if memory cannot be read.
    """
    prober, shape, settings, dtype = Prober(parts), parts.model.shape, parts.settings, parts.model.dtype
    pages = parts.runner.pages.pool.pages - 1
    modelled = iteration_bytes(shape, settings, dtype, pages * parts.model.page_bytes(settings.cache.page_size))
    pieces: dict[str, tuple[int, Callable[[], object]]] = {
        "forward": (modelled, partial(prober.run_forward, _largest_forward(parts)))
    }
    if not parts.model.trainable_error:
        window, longest = settings.align.window_tokens, settings.align.max_pair_tokens
        pairs = 2 if 2 * window > longest else 1
        steps = {"step": StepShape(max(2 * window, longest) // pairs, pairs, recompute="full")}
        for kind in kept_kinds(shape, settings.align.recompute, parts.model.device.type == "cuda"):
            steps["kept graph" if kind == "none" else "selective"] = StepShape(min(window, longest), 1, kind)
        for name, step in steps.items():
            modelled = lone_step_bytes(shape, settings, dtype, step.recompute)
            pieces[name] = modelled, partial(prober.run_step, step)
    try:
        return {
            name: MemoryPeak(modelled_bytes=modelled, measured_bytes=_peak_of(parts.model.device, work))
            for name, (modelled, work) in pieces.items()
        }
    except OSError:
        return {}


def _largest_forward(parts: Engine) -> Shape:
    """Return the largest forward of an iteration: a few decodes, and one chunk that ends at the longest context."""
    serving, page, pages = parts.settings.serving, parts.runner.pages.page_size, parts.runner.pages.pool.pages - 1
    decodes = min(serving.max_sequences, serving.max_batch_tokens // 2, pages // 4) - 1
    room = (pages - decodes - 1) * page
    num_tokens = min(serving.max_batch_tokens - decodes, parts.max_context_tokens, room)
    return Shape(decodes, page - 1, ((num_tokens, min(parts.max_context_tokens, room) - num_tokens),))


def _peak_of(device: torch.device, work: Callable[[], object]) -> int:
    """Return the peak bytes of `work` above the memory before it; a first run allocates pages and workspaces."""
    work()
    before = used_bytes(device)
    start_peak(device)
    work()
    return max(0, peak_bytes(device) - before)
