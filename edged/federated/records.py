"""Round files, which say what a box is asked, and records, which say what it answers; both are safetensors.

Their `__metadata__["edged"]` is JSON. Other fields, names, types and numbers than these are refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from edged.federated.averaging import A, B
from edged.federated.campaign_file import CampaignFile, CampaignRefused, Mode, parse_campaign
from edged.federated.privacy import Tensors

_FACTS, _MAX_FACTS = "edged", 1 << 20
Nonce = Annotated[str, Field(pattern=r"^[0-9a-f]{16,64}$")]
Number = Annotated[int, Field(ge=0, lt=1 << 31)]


class RecordRefused(ValueError):
    """A round file or record that is not taken; the message names the file, what is wrong and the way out."""


class _Facts(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


Facts = TypeVar("Facts", bound=_Facts)


class HeldOutCounts(_Facts):
    """How many of a participant's held-out pairs were right with the start, and after the round; a tie is a half."""

    pairs: Annotated[int, Field(ge=1)]
    right: Annotated[float, Field(ge=0.0)]
    right_before: Annotated[float, Field(ge=0.0)]


class RecordForm(_Facts):
    """The LoRA's form: its alpha, and the inputs of each linear; the rest is in the shapes of B."""

    alpha: Annotated[float, Field(gt=0.0)]
    inputs: dict[str, Annotated[int, Field(ge=1, lt=1 << 24)]]


class _RoundFacts(_Facts):
    job: dict[str, Any]
    round: Number
    nonce: Nonce
    start: Annotated[str, Field(pattern=r"^([A-Za-z0-9][A-Za-z0-9-]{0,31})?$")] = ""


class _RecordFacts(_RoundFacts):
    base: Annotated[str, Field(pattern=r"^[0-9a-f]{16,64}$")]
    mode: Mode
    pairs: Annotated[int, Field(ge=1, le=1024)]
    held_out: HeldOutCounts | None = None
    epsilon: Annotated[float, Field(ge=0.0)] | None = None
    form: RecordForm


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundFile:
    """A request to a box: to teach a start of a campaign, whose weights are `tensors`, for a round."""

    job: CampaignFile
    round: int
    nonce: str
    start: str
    """The start's name; "" for a campaign's new one."""
    tensors: Tensors
    """A and B by PEFT's names; none where the box has the start, or makes a new one of the campaign's name."""

    @classmethod
    def read(cls, path: Path, max_bytes: int) -> Self:
        """Read a file. Raises RecordRefused, and CampaignRefused for its campaign."""
        facts, tensors = _read(path, max_bytes, _RoundFacts)
        job = parse_campaign(facts.job)
        _demand_start(path, job, facts.start)
        return cls(job=job, round=facts.round, nonce=facts.nonce, start=facts.start, tensors=tensors)

    def content(self) -> bytes:
        """Return the file's bytes."""
        facts = _RoundFacts(job=self.job.table(), round=self.round, nonce=self.nonce, start=self.start)
        return _content(self.tensors, facts)


@dataclass(frozen=True, slots=True, kw_only=True)
class FederatedRecord:
    """An answer of a box, which is all that leaves it: how B moved, and what it is of."""

    job: CampaignFile
    round: int
    nonce: str
    start: str
    base: str
    """Fingerprint of the base and the form."""
    mode: Mode
    pairs: int
    held_out: HeldOutCounts | None
    epsilon: float | None
    """Epsilon of this participation; None without noise: there is no guarantee."""
    form: RecordForm
    tensors: Tensors
    """The clipped and noised change of B, by PEFT's names."""

    @classmethod
    def read(cls, path: Path, max_bytes: int) -> Self:
        """Read a file. Raises RecordRefused, and CampaignRefused for its campaign."""
        facts, tensors = _read(path, max_bytes, _RecordFacts)
        if not tensors or any(not name.endswith(B) for name in tensors):
            raise RecordRefused(f"{path}: a record has B of each linear, and nothing else")
        linears = {name.removesuffix(B) for name in tensors}
        if linears != facts.form.inputs.keys():
            raise RecordRefused(f"{path}: its form has other linears than its tensors")
        job = parse_campaign(facts.job)
        _demand_start(path, job, facts.start)
        if (facts.base, facts.mode) != (job.model, job.aggregation):
            raise RecordRefused(f'{path}: it is of another model or mode than its campaign "{job.name}" says')
        told = {name: getattr(facts, name) for name in _RecordFacts.model_fields if name != "job"}
        return cls(job=job, tensors=tensors, **told)

    def content(self) -> bytes:
        """Return the file's bytes, of which the ledger keeps the SHA-256."""
        told = {name: getattr(self, name) for name in _RecordFacts.model_fields if name != "job"}
        return _content(self.tensors, _RecordFacts(job=self.job.table(), **told))

    @property
    def sha256(self) -> str:
        """The SHA-256 of its bytes, in hex digits."""
        return hashlib.sha256(self.content()).hexdigest()

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """The shapes of A and B by PEFT's names."""
        return lora_shapes({name: (own.shape[0], own.shape[1]) for name, own in self.tensors.items()}, self.form.inputs)


def lora_shapes(shapes: Mapping[str, tuple[int, int]], inputs: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """Return the shapes of A and B by PEFT's names, from those of B and the inputs of each linear."""
    of_a = {name.removesuffix(B) + A: (shape[1], inputs[name.removesuffix(B)]) for name, shape in shapes.items()}
    return of_a | dict(shapes)


def fingerprint(base: str, alpha: float, shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Return the fingerprint of a base model and a LoRA's form; boxes that have the same may take part together."""
    told = {"base": base, "alpha": alpha, "shapes": {name: list(shape) for name, shape in sorted(shapes.items())}}
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


def check_weights(tensors: Tensors, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise RecordRefused unless these are A and B of the form, by names and shapes."""
    for name, shape in shapes.items():
        found = tensors[name].shape if name in tensors else "missing"
        if found != shape:
            raise RecordRefused(f"the start's {name} is {found}, {shape} is needed: it is of another model or form")
    if more := sorted(set(tensors) - set(shapes)):
        raise RecordRefused(f'the start has "{more[0][:80]}", which this model does not: it is of another one')


def check_together(records: Mapping[str, FederatedRecord]) -> None:
    """Raise RecordRefused unless records, by their files, are of one sum, each there once."""
    (first_name, first), *others = records.items()
    seen = {first.sha256: first_name}
    for name, record in others:
        for field in ("job", "round", "start", "form", "shapes"):
            if getattr(record, field) != getattr(first, field):
                raise RecordRefused(f"{name} and {first_name} differ in {field}: average records of one round")
        if record.sha256 in seen:
            raise RecordRefused(f"{name} and {seen[record.sha256]} are the same record: give each once")
        seen[record.sha256] = name


def _demand_start(path: Path, job: CampaignFile, start: str) -> None:
    if start not in (job.starts or ("",)):
        known = ", ".join(job.starts) or "none, but a new one"
        raise RecordRefused(f'{path}: campaign "{job.name}" has no start "{start}": it has {known}')


def _read(path: Path, max_bytes: int, kind: type[Facts]) -> tuple[Facts, dict[str, np.ndarray]]:
    try:
        if (size := path.stat().st_size) > max_bytes:
            raise RecordRefused(f"{path} has {size} bytes: federated.max_update_mb allows {max_bytes}")
        with safe_open(path, "np") as file:
            told, tensors = (file.metadata() or {}).get(_FACTS, ""), {}
            if len(told) > _MAX_FACTS:
                raise RecordRefused(f"{path}: its metadata is larger than any of edged's")
            facts = kind.model_validate_json(told)
            for name in file.keys():  # noqa: SIM118 (not a dict)
                kind_of = file.get_slice(name).get_dtype()
                if kind_of != "F32" or not name.endswith((A, B)) or len(file.get_slice(name).get_shape()) != 2:
                    raise RecordRefused(f'{path}: "{name[:80]}" is none of a LoRA\'s matrices in float32')
                tensors[name] = file.get_tensor(name)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "its metadata"
        raise RecordRefused(f"{path}: {where}: {first['msg']}: it was made by another program or version") from None
    except (OSError, SafetensorError, ValueError) as error:
        if isinstance(error, RecordRefused | CampaignRefused):
            raise
        raise RecordRefused(f"{path} cannot be read: {error}") from None
    for name, each in tensors.items():
        if not np.isfinite(each).all():
            raise RecordRefused(f"{path}: {name} has numbers that are not finite")
    return facts, tensors


def _content(tensors: Tensors, facts: _Facts) -> bytes:
    told = facts.model_dump_json(exclude_none=True)
    return save({name: np.ascontiguousarray(each) for name, each in tensors.items()}, {_FACTS: told})
