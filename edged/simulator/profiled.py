"""A device as its profile measured it: the times of a simulation from prices instead of a data sheet."""

from __future__ import annotations

from pathlib import Path

from edged.scheduler.cost.model import CostModel, Prices, roofline
from edged.scheduler.cost.profile import Profile, ProfileError
from edged.scheduler.task import Unit
from edged.settings.load import Settings
from edged.simulator.device_file import DeviceError
from edged.simulator.roofline import Memory, ModelSizes, Pass

_GUESSED_RATES = (4e10, 8e9)
"""Operations and bytes per second, for kinds of units that were not measured."""
_ENOUGH_BYTES = 1 << 40


class ProfiledDevice:
    """What the measured prices say of a packed forward and of units."""

    def __init__(self, profile: Profile, guess: Prices) -> None:
        self.name = profile.subject.device
        self.cuda = not profile.subject.threads
        self.overhead_s, self.rest_s = profile.overhead_s, profile.rest_s
        self._profile, self._guess = profile, guess
        self._prices = CostModel.from_profile(profile, guess)

    def guess(self) -> CostModel:
        """A daemon that has the profile starts from it."""
        return CostModel.from_profile(self._profile, self._guess)

    def forward_s(self, load: Pass) -> float:
        """Seconds of one packed forward with sampling; 0 when there is nothing in it."""
        return self._prices.priced_s(load)

    def unit_s(self, unit: Unit) -> float:
        """Seconds of one fine-tune unit."""
        return self._prices.unit_s(unit)


def profiled(path: Path, shape: Path, settings: Settings) -> tuple[ProfiledDevice, ModelSizes, Memory]:
    """The profile's device, its model and the memory that it had. Raises DeviceError, ModelRefused."""
    try:
        profile = Profile.read(path)
    except ProfileError as error:
        raise DeviceError(str(error)) from None
    subject = profile.subject
    cpu = subject.threads > 0
    update = {"dtype": subject.dtype, "quantize": subject.quantization}
    chosen = settings.model_copy(update={"model": settings.model.model_copy(update=update)})
    model = ModelSizes.read(shape, chosen, cuda=not cpu)
    if model.name != subject.model:
        raise DeviceError(f'profile "{path}" is of the model "{subject.model}", not of "{model.name}"')
    guess = roofline(model.shape.parameters, *_GUESSED_RATES, model.shape.layers, model.dtype.itemsize)
    return ProfiledDevice(profile, guess), model, _memory(profile, path, settings)


def _memory(profile: Profile, path: Path, settings: Settings) -> Memory:
    device, told = profile.subject.device, profile.device_memory
    if told is not None:
        return Memory(device, told.kind, told.available_bytes)
    if not settings.cache.memory_mb:
        raise DeviceError(
            f'profile "{path}" does not tell the memory of {device}, as an older edged wrote it: set cache.memory_mb, '
            "or measure it again with edged profile"
        )
    # The pages' share is given; that the rest has room is all that can be assumed.
    return Memory(device, "cpu" if profile.subject.threads else "discrete", _ENOUGH_BYTES)
