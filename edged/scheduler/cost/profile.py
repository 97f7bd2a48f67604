"""A device's profile: measured times of forwards and units, fitted prices, and the model and device they are of.

All times are seconds.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass

from edged.scheduler.cost.prices import Load, Prices, unit_features
from edged.scheduler.cost.regression import least_squares

FOLDER = "profiles"
"""Folder of profiles in the data folder."""
KNEES = (1, 4, 8, 16, 32, 64, 128, 256, 512)
"""Numbers of tokens at which the price of a token may change."""
_HELD_OUT_EVERY = 4
_QUARTILES_APART = 1.349
"""Distance between a normal distribution's quartiles in standard deviations."""


class ProfileError(ValueError):
    """A profile cannot be used; the message names the file and the reason."""


class _Data(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Subject(_Data):
    """The model and device that were measured: prices hold for the same model in the same form on the same device."""

    model: str
    fingerprint: str
    device: str
    dtype: str
    quantization: str = ""
    threads: int = 0
    """Most CPU threads; 0 on other devices."""

    def difference(self, other: Subject) -> str:
        """Say why prices of this subject do not hold for `other`, naming both; "" where they do. Names may differ."""
        own, theirs = self.model_dump(exclude={"model"}), other.model_dump()
        differing = [f'{name} "{own[name]}" where "{theirs[name]}" runs' for name in own if own[name] != theirs[name]]
        if not differing:
            return ""
        models = f'it is of "{self.model}", not of "{other.model}": ' if self.model != other.model else ""
        return models + ", ".join(differing)


@dataclass(config=ConfigDict(extra="forbid"), kw_only=True)
class ForwardTime(Load):
    """A packed forward's load and the median of its times."""

    seconds: float = Field(gt=0.0)

    @property
    def kind(self) -> str:
        """The kind of work that its error counts to."""
        if self.finetune_tokens:
            return "finetune"
        if not self.prefill_tokens:
            return "decode"
        return "mixed" if self.decodes else "prefill"


class UnitTime(_Data):
    """A fine-tune unit (see `Unit`) and the median of its times."""

    kind: str
    tokens: int
    seconds: float = Field(gt=0.0)


class MemoryPeak(_Data):
    """Peak memory that a piece of work added, modelled and measured."""

    modelled_bytes: int
    measured_bytes: int


class DeviceMemory(_Data):
    """The device's memory before anything was loaded."""

    kind: Literal["integrated", "discrete", "cpu"]
    """Owner of the memory: "discrete", a GPU's own; "integrated", shared by GPU and CPU; "cpu", the box's."""
    total_bytes: int = Field(gt=0)
    available_bytes: int = Field(gt=0)


class Noise(_Data):
    """How the times of a device scatter around their prices; none by default."""

    jitter: float = Field(default=0.0, ge=0.0, le=2.0)
    """Standard deviation of the logarithm of a time over its price."""
    decode_after_chunk: float = Field(default=0.0, ge=0.0, le=10.0)
    """Share by which a forward of decodes alone takes longer right after a forward with a chunk."""


class Profile(_Data):
    """The profile of one device, as its file has it."""

    subject: Subject
    created_at: str
    """Time of the measurement, UTC, ISO 8601."""
    edged_version: str
    prices: Prices
    overhead_s: float = Field(ge=0.0)
    """Seconds of an iteration outside its forward and units: planning, bookkeeping, delivery."""
    rest_s: float = Field(default=0.0, ge=0.0)
    """Additional seconds of an iteration that finds the engine at rest; 0 in files of versions that lack it."""
    noise: Noise = Noise()
    """Scatter of single forwards; none in files of versions that lack it."""
    error_percent: dict[str, float]
    """MAPE by kind over measurements that the prices were not fitted to."""
    forwards: tuple[ForwardTime, ...] = ()
    units: tuple[UnitTime, ...] = ()
    memory: dict[str, MemoryPeak] = {}
    device_memory: DeviceMemory | None = None
    """Memory of the device; None in files of versions that did not keep it."""

    @classmethod
    def read(cls, path: Path) -> Profile:
        """Read a profile. Raises ProfileError when the file is not there or is no profile."""
        try:
            return cls.model_validate_json(path.read_bytes())
        except OSError as error:
            raise ProfileError(f'profile "{path}" cannot be read: {error.strerror}') from None
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise ProfileError(f'profile "{path}" is no profile of this version: {where} {first["msg"]}') from None

    def write(self, path: Path) -> None:
        """Write the file atomically. Raises OSError."""
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            with draft.open("w", encoding="utf-8") as file:
                file.write(self.model_dump_json(indent=1) + "\n")
                file.flush()
                os.fsync(file.fileno())
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)


def file_name(subject: Subject) -> str:
    """Return `<model>@<device>.<type>.json`, without characters that do not belong into a file's name."""
    kind = f"{subject.dtype}-{subject.quantization}" if subject.quantization else subject.dtype
    model, device = (re.sub(r"[^\w.+-]+", "-", part).strip("-.") for part in (subject.model, subject.device))
    return f"{model}@{device}.{kind}.json"


def fit_prices(forwards: Sequence[ForwardTime], units: Sequence[UnitTime]) -> Prices:
    """Fit non-negative prices by least squares of relative errors; the knee is the one that leaves the smallest.

    ValueError without any forward or without any unit.
    """
    seconds = [forward.seconds for forward in forwards]
    fits: list[tuple[float, int, list[float]]] = []
    for knee in KNEES:
        rows = [forward.features(knee) for forward in forwards]
        prices = least_squares(rows, seconds)
        off = [abs(_dot(prices, row) / took - 1.0) for row, took in zip(rows, seconds, strict=True)]
        fits.append((sum(off), knee, prices))
    _, knee, prices = min(fits)
    # Units have the forward's knee, or none.
    _, unit_knee, kinds = min(_fit_units(units, own) for own in (1, knee))
    return Prices(tuple(prices), knee, kinds, unit_knee)


def _fit_units(units: Sequence[UnitTime], knee: int) -> tuple[float, int, dict[str, tuple[float, float]]]:
    """Fit the prices of units of at least `knee` tokens; returns (sum of relative errors, knee, prices)."""
    off, kinds = 0.0, {}
    for kind in sorted({unit.kind for unit in units}):
        seen = [unit for unit in units if unit.kind == kind]
        rows = [unit_features(kind, unit.tokens, knee) for unit in seen]
        once, token = least_squares(rows, [unit.seconds for unit in seen])
        kinds[kind] = once, token
        off += sum(abs(_dot((once, token), row) / unit.seconds - 1.0) for row, unit in zip(rows, seen, strict=True))
    return off, knee, kinds


def fit_noise(prices: Prices, runs: Sequence[tuple[ForwardTime, bool]]) -> Noise:
    """Fit the scatter of single forwards around the prices; each run tells whether one with a chunk ran right before.

    It is taken from medians and quartiles, since a neighbour's busy second is no property of the device. ValueError
    with fewer than two runs.
    """
    off = [math.log(run.seconds / _dot(prices.forward, run.features(prices.knee_tokens))) for run, _ in runs]
    decodes: dict[bool, list[float]] = {True: [], False: []}
    for value, (run, after_chunk) in zip(off, runs, strict=True):
        if run.kind == "decode":
            decodes[after_chunk].append(value)
    later = max(0.0, median(decodes[True]) - median(decodes[False])) if all(decodes.values()) else 0.0
    own = [value - later * (after and run.kind == "decode") for value, (run, after) in zip(off, runs, strict=True)]
    low, _, high = quantiles(own, n=4)
    return Noise(jitter=(high - low) / _QUARTILES_APART, decode_after_chunk=math.expm1(later))


def held_out_error(forwards: Sequence[ForwardTime], units: Sequence[UnitTime]) -> dict[str, float]:
    """Return the MAPE in percent, by kind, of every fourth measurement with prices fitted to the others."""
    kept = [item for index, item in enumerate(forwards) if index % _HELD_OUT_EVERY]
    in_turn = sorted(units, key=lambda unit: unit.kind)
    kept_units = [unit for index, unit in enumerate(in_turn) if index % _HELD_OUT_EVERY]
    prices = fit_prices(kept, kept_units)
    off: dict[str, list[float]] = {}
    for forward in forwards[::_HELD_OUT_EVERY]:
        predicted_s = _dot(prices.forward, forward.features(prices.knee_tokens))
        off.setdefault(forward.kind, []).append(abs(predicted_s / forward.seconds - 1.0))
    for unit in in_turn[::_HELD_OUT_EVERY]:
        if unit.kind in prices.units:
            predicted_s = _dot(prices.units[unit.kind], unit_features(unit.kind, unit.tokens, prices.unit_knee))
            off.setdefault(unit.kind, []).append(abs(predicted_s / unit.seconds - 1.0))
    return {kind: 100.0 * sum(values) / len(values) for kind, values in off.items()}


def find_profile(setting: str, data_dir: Path | None, subject: Subject) -> tuple[Path, Profile] | None:
    """Read the profile at `setting`, or the data folder's own of `subject`; None where there is none.

    Raises ProfileError, naming both sides, for a profile of another model or device, and for a file that cannot be
    read.
    """
    if setting:
        path = Path(setting).expanduser()
    elif data_dir is None or not (path := data_dir / FOLDER / file_name(subject)).exists():
        return None
    profile = Profile.read(path)
    if reason := profile.subject.difference(subject):
        raise ProfileError(f'profile "{path}" is not used: {reason}')
    return path, profile


def _dot(prices: Sequence[float], row: Sequence[float]) -> float:
    return sum(map(float.__mul__, prices, row))
