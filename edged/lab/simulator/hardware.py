"""A simulated device with a model on it, built from a device file or from a measured profile."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from edged.engine.model.loading import ModelRefused
from edged.engine.model.memory_model import (
    CACHE_SHARES,
    FEWEST_PAGES,
    Needs,
    beside_states,
    kept_that_fits,
    needs,
    refuse_longer_context,
)
from edged.lab.simulator.device_file import DeviceError, find_device, find_model_shape, read_device
from edged.lab.simulator.roofline import Device, roofline_device
from edged.profiler.memory import ModelSizes
from edged.scheduler.cost.model import CostModel, roofline
from edged.scheduler.cost.profile import DeviceMemory, Profile, ProfileError
from edged.settings.load import Settings

if TYPE_CHECKING:
    from edged.lab.simulator.plan import SimulationPlan

_GUESSED_RATES = (4e10, 8e9)
"""Operations and bytes per second, for kinds of units that were not measured."""
_ENOUGH_BYTES = 1 << 40


@dataclass(frozen=True, slots=True)
class SimulatedHardware:
    """A device with a model on it, and the number of KV pages that fit beside the weights and the working memory."""

    device: Device
    model: ModelSizes
    pages: int
    keeps_graph: bool
    """Whether a fine-tune step may keep its graph, or its costly results."""
    parts: Needs

    @classmethod
    def of(cls, plan: SimulationPlan) -> SimulatedHardware:
        """Read the files. Raises DeviceError, ModelRefused."""
        path, shape, settings = find_device(plan.device), find_model_shape(plan.model), plan.settings
        if path.suffix == ".json":
            device, model = _profiled(path, shape, settings)
        else:
            file = read_device(path)
            model = ModelSizes.read(shape, settings, file.cuda)
            device = roofline_device(file, model, settings)
        return room_for(device, model, settings)


def room_for(device: Device, model: ModelSizes, settings: Settings) -> SimulatedHardware:
    """Return the device with the KV pages that fit, by the engine's own arithmetic (`edged.engine.model.memory_model`).

    Raises ModelRefused, with the numbers, when not even a short sequence fits, or the context that was asked for.
    """
    shape, size = model.shape, settings.cache.page_size
    parts = needs(shape, settings, model.form, model.dtype, device.cuda, device.available_bytes)
    free = device.available_bytes - (parts.total - parts.kept_graph - parts.states)
    budget = settings.cache.memory_mb << 20 or int(free * CACHE_SHARES[device.kind])
    wanted = settings.model.max_context_tokens or shape.max_positions
    useful = settings.serving.max_sequences * -(-wanted // size) + 1
    page_bytes = size * parts.kv_per_token
    budget, _ = beside_states(shape, settings, model.dtype, parts.loaded_adapters, page_bytes, budget)
    pages = min(useful, budget // page_bytes)
    if pages < FEWEST_PAGES:
        raise ModelRefused(
            f'model "{model.name}" needs {(parts.total - parts.kept_graph) / 2**30:.1f} GiB without K/V pages, and '
            f"{device.name} has {device.available_bytes / 2**30:.1f} GiB for edged: quantize it or take a larger device"
        )
    refuse_longer_context(settings, shape.max_positions, page_bytes, pages, budget)
    left = free - pages * page_bytes - parts.states
    keeps = kept_that_fits(shape, settings, model.dtype, device.cuda, left / 4) != "full"
    return SimulatedHardware(device, model, pages, keeps, parts)


def _profiled(path: Path, shape: Path, settings: Settings) -> tuple[Device, ModelSizes]:
    """Read a profile: the device with its measured times and its memory, and the model that was measured.

    Raises DeviceError, ModelRefused.
    """
    try:
        profile = Profile.read(path)
    except ProfileError as error:
        raise DeviceError(str(error)) from None
    subject = profile.subject
    update = {"dtype": subject.dtype, "quantize": subject.quantization}
    chosen = settings.model_copy(update={"model": settings.model.model_copy(update=update)})
    model = ModelSizes.read(shape, chosen, cuda=not subject.threads)
    if model.name != subject.model:
        raise DeviceError(f'profile "{path}" is of the model "{subject.model}", not of "{model.name}"')
    if profile.device_memory is None and not settings.cache.memory_mb:
        raise DeviceError(
            f'profile "{path}" does not tell the memory of {subject.device}, as an older edged wrote it: set '
            "cache.memory_mb, or measure it again with edged profile"
        )
    # Without a device memory, cache.memory_mb sets the pages, and everything else is assumed to fit.
    kind: Literal["cpu", "discrete"] = "cpu" if subject.threads else "discrete"
    enough = DeviceMemory(kind=kind, total_bytes=_ENOUGH_BYTES, available_bytes=_ENOUGH_BYTES)
    memory = profile.device_memory or enough
    guess = roofline(model.shape.parameters, *_GUESSED_RATES, model.shape.layers, model.dtype.itemsize)
    # A daemon with this profile starts from the same prices.
    measured = partial(CostModel.from_profile, profile, guess)
    prices = measured()
    device = Device(
        name=subject.device,
        kind=memory.kind,
        available_bytes=memory.available_bytes,
        overhead_s=profile.overhead_s,
        rest_s=profile.rest_s,
        guess=measured,
        forward_s=prices.priced_s,
        unit_s=prices.unit_s,
        noise=profile.noise,
    )
    return device, model
