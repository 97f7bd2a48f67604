"""A device as its profile measured it: the times of a simulation from prices instead of a data sheet.

Owns the reading of a profile for that. Must not know requests or the scheduler.
"""

from __future__ import annotations

from pathlib import Path

import torch

from edged.bench.device import DeviceError
from edged.bench.roofline import Memory, Model, Pass
from edged.config import Settings
from edged.engine.memory import free_bytes, has_own_memory
from edged.scheduler.cost import CostModel, Prices, roofline
from edged.scheduler.profile import Profile, ProfileError
from edged.scheduler.task import Unit

_GUESSED_RATES = (4e10, 8e9)
"""Operations and bytes per second, for kinds of units that were not measured."""


class ProfiledDevice:
    """What the measured prices say of a packed forward and of units."""

    def __init__(self, profile: Profile, guess: Prices) -> None:
        self.name = profile.subject.device
        self.cuda = not profile.subject.threads
        self.overhead_s = profile.overhead_s
        self._profile, self._guess = profile, guess
        self._prices = CostModel.from_profile(profile, guess)

    def guess(self) -> CostModel:
        """A daemon that has the profile starts from it."""
        return CostModel.from_profile(self._profile, self._guess)

    def forward_s(self, load: Pass) -> float:
        """Seconds of one packed forward with sampling; 0 when there is nothing in it."""
        return self._prices.forward_s(load)

    def unit_s(self, unit: Unit) -> float:
        """Seconds of one fine-tune unit."""
        return self._prices.unit_s(unit)


def profiled(path: Path, shape: Path, settings: Settings) -> tuple[ProfiledDevice, Model, Memory]:
    """The profile's device, its model and this machine's free memory. Raises DeviceError, ModelRefused."""
    try:
        profile = Profile.read(path)
    except ProfileError as error:
        raise DeviceError(str(error)) from None
    subject = profile.subject
    cpu = subject.threads > 0
    if not cpu and not torch.cuda.is_available():
        raise DeviceError(
            f'profile "{path}" is of {subject.device}, whose memory it does not tell: simulate it where it is, or from '
            "a file as in configs/devices"
        )
    update = {"dtype": subject.dtype, "quantize": subject.quantization}
    chosen = settings.model_copy(update={"model": settings.model.model_copy(update=update)})
    model = Model.read(shape, chosen, cuda=not cpu)
    if model.name != subject.model:
        raise DeviceError(f'profile "{path}" is of the model "{subject.model}", not of "{model.name}"')
    here = torch.device("cpu" if cpu else "cuda")
    kind = "cpu" if cpu else "discrete" if has_own_memory(here) else "integrated"
    guess = roofline(model.shape.parameters, *_GUESSED_RATES, model.shape.layers, model.dtype.itemsize)
    return ProfiledDevice(profile, guess), model, Memory(subject.device, kind, free_bytes(here)[0])
