"""A device as its profile measured it: the times of a simulation from prices instead of a data sheet."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from edged.bench.memory import ModelSizes
from edged.scheduler.cost.model import CostModel, roofline
from edged.scheduler.cost.profile import Profile, ProfileError
from edged.settings.load import Settings
from edged.simulator.device_file import DeviceError
from edged.simulator.roofline import Device

_GUESSED_RATES = (4e10, 8e9)
"""Operations and bytes per second, for kinds of units that were not measured."""
_ENOUGH_BYTES = 1 << 40


def profiled(path: Path, shape: Path, settings: Settings) -> tuple[Device, ModelSizes]:
    """The profile's device, with its measured times and the memory that it had, and its model.

    Raises DeviceError, ModelRefused.
    """
    try:
        profile = Profile.read(path)
    except ProfileError as error:
        raise DeviceError(str(error)) from None
    subject, memory = profile.subject, profile.device_memory
    update = {"dtype": subject.dtype, "quantize": subject.quantization}
    chosen = settings.model_copy(update={"model": settings.model.model_copy(update=update)})
    model = ModelSizes.read(shape, chosen, cuda=not subject.threads)
    if model.name != subject.model:
        raise DeviceError(f'profile "{path}" is of the model "{subject.model}", not of "{model.name}"')
    if memory is None and not settings.cache.memory_mb:
        raise DeviceError(
            f'profile "{path}" does not tell the memory of {subject.device}, as an older edged wrote it: set '
            "cache.memory_mb, or measure it again with edged profile"
        )
    guess = roofline(model.shape.parameters, *_GUESSED_RATES, model.shape.layers, model.dtype.itemsize)
    # A daemon that has the profile starts from it, too.
    measured = partial(CostModel.from_profile, profile, guess)
    prices = measured()
    device = Device(
        name=subject.device,
        # Where the pages' share is given alone, that the rest has room is all that can be assumed.
        kind=memory.kind if memory else "cpu" if subject.threads else "discrete",
        available_bytes=memory.available_bytes if memory else _ENOUGH_BYTES,
        overhead_s=profile.overhead_s,
        rest_s=profile.rest_s,
        guess=measured,
        forward_s=prices.priced_s,
        unit_s=prices.unit_s,
    )
    return device, model
